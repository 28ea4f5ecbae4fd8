"""Costs of the head with its loss on GPUs: the parts, and the methods made of them.

Nothing here is measured. A method is a list of named terms that add up to its time:

- a GEMM takes its FLOPs at the device's rate, or the reading of its operands if that is longer,
  over the share of its last wave of tiles that is filled; part of writing its output is not hidden;
- a sweep over logits takes its bytes or its instructions, whichever take longer;
- each launch costs the GPU a little; where launches take the CPU longer than all of that takes the
  GPU, the rest of it is a term, too.

`python -m benchmarks.cost_model` prints what comes out, and how far it is off published figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.contenders import BASELINE
from grpo_kernels.head.budget import ROW_MULTIPLE, default_chunk_bytes, strip_rows
from grpo_kernels.head.row_plan import RowPlan


class Guesses(NamedTuple):
    """Guesses of what nobody has measured, for all devices alike.

    Args:
        exposed: share of the traffic of a GEMM's output that its arithmetic does not hide.
        copy_speed: speed of a sweep that reads and writes, relative to a copy.
        issued: share of the issue slots that a sweep uses at best, at boost clock.
        fused_gemm: rate of a GEMM with a softmax in its epilogue, relative to cuBLAS.
        short: rate of a GEMM to float32 of at most 2,048 inner elements, relative to others.
        crowded: what a GEMM loses of its rate where its reads and writes would need all of the
            bandwidth; half of that is free.
        cpu_us: of a launch on the CPU, with the Python around it.
    """

    exposed: float = 0.4
    copy_speed: float = 0.88
    issued: float = 0.6
    fused_gemm: float = 0.88
    short: float = 1.0
    crowded: float = 0.05
    cpu_us: float = 10.0


LIKELY = Guesses()
BEST = Guesses(0.3, 0.95, 0.7, 0.96, 1.0, 0.0, 5.0)
WORST = Guesses(0.55, 0.8, 0.5, 0.8, 0.88, 0.2, 20.0)
COPY_SPEED, SCATTERED = LIKELY.copy_speed, 0.6  # gathers and scatters of whole rows
WAIT_MS = 0.3  # the GPU idles until the CPU, which waited for it, launches again
# Instructions per logit that the compiled loops of the Triton kernels take (`results/compile.md`);
# those of others' kernels are guesses.
INSTRUCTIONS = {
    "one sweep": 9.8, "token_stats": 8.9, "logit_grads": 10.3, "pair_stats": 20, "divergences": 38,
    "pair_grads": 28, "TRL's statistics": 25, "Liger FLCE": 40,
}  # fmt: skip

# The CPU's time per launch of this library's calls, relative to that of others. Over a driver that
# does nothing, 512 tokens took 1.5 ms of CPU if nobody reads the metrics, which are 22 us for each
# launch that is counted below; TRL's head 1.4 ms, 20 us; eager 0.4 ms, 11 us.
OURS_ON_CPU = 2.2
# For a call in which every token has a support: launches (`tests/test_fake_cuda.py`), and
# bytes that finding the order of the entries moves per entry, the sort included.
REPLAY_LAUNCHES, BYTES_OF_ORDER = 237, 1200
HOPPER_ONLY = "Liger scaled CE"


@dataclass(frozen=True)
class Device:
    """The speeds of a GPU: what large dense bf16 GEMMs and copies sustain, not the data sheet's."""

    tflops: float
    tb_per_s: float
    sms: int
    ghz: float  # boost clock
    gib: float
    launch_us: float = 2.5  # a small kernel's time on the GPU


# H200: 770 to 790 TFLOP/s on an 8,192^3 product and 4.3 TB/s on a copy, published. H100 and A100:
# the best products of "mamf-finder" reach 794 and 271. Where nothing is published: FLOPs are the
# data sheet's times 0.87 (the A100's share), on Blackwell times 0.79 (the H200's); bandwidth is the
# data sheet's times 0.9 (the H200's share). B200 is here for the calibration alone.
DEVICES = {
    "H200": Device(780, 4.3, 132, 1.98, 139),
    "H100": Device(780, 0.9 * 3.35, 132, 1.98, 79),
    "A100": Device(270, 0.9 * 2.04, 108, 1.41, 79),
    "RTX 4090": Device(0.87 * 165, 0.9 * 1.008, 128, 2.52, 23.5),
    "B200": Device(0.79 * 2250, 0.9 * 8.0, 148, 1.96, 179),
}
TILES = ((128, 256), (256, 128), (128, 128))


def device_of(name: str) -> Device | None:
    """Returns the device whose name is part of `name`, as PyTorch tells it; None if none is."""
    return next((device for key, device in DEVICES.items() if key in name), None)


def fill(m: int, n: int, sms: int) -> float:
    """Returns the share of the tiles' places that an [m, n] output uses, with the best tiles.

    A product may be cut along its inner dimension into two or four, which costs 5 %.
    """
    shares = []
    for (rows, columns), cuts in ((t, c) for t in TILES for c in (1, 2, 4)):
        tiles = math.ceil(m / rows) * math.ceil(n / columns) * cuts
        places = math.ceil(tiles / sms) * sms * rows * columns
        shares.append(m * n * cuts / places * (1 if cuts == 1 else 0.95))
    return max(shares)


def gemm_ms(d: Device, m: int, n: int, k: int, rate: float = 1.0) -> float:
    """Returns the time of [m, k] x [k, n], but for the writing of its output."""
    arithmetic = 2 * m * n * k / (1e9 * d.tflops * fill(m, n, d.sms) * rate)
    reading = 2 * (m + n) * k / (1e9 * d.tb_per_s)
    return max(arithmetic, reading)


class Step:
    """The terms of one step, in milliseconds by name, of N tokens under a head [V, H]."""

    def __init__(self, d: Device, N: int, V: int, H: int, guesses: Guesses = LIKELY) -> None:
        self.d, self.N, self.V, self.H, self.guesses = d, N, V, H, guesses
        self.terms: dict[str, float] = {}

    def add(self, name: str, ms: float) -> None:
        """Adds to a term."""
        self.terms[name] = self.terms.get(name, 0.0) + ms

    def copy(self, name: str, moved: float, copy_speed: float = 1.0) -> None:
        """Adds the time of moving so many bytes."""
        self.add(name, moved / (1e9 * self.d.tb_per_s * copy_speed))

    def sweep(self, name: str, bytes_each: float, kernel: str) -> None:
        """Adds a kernel that goes once over the logits."""
        d, g = self.d, self.guesses
        issue = g.issued * d.sms * 128 * d.ghz * 1e9  # four warps of 32 per clock
        each = max(bytes_each / (g.copy_speed * d.tb_per_s * 1e12), INSTRUCTIONS[kernel] / issue)
        self.add(name, 1e3 * self.N * self.V * each)

    def logits(self, rows: int, width: int, name: str = "GEMM 1", rate: float = 1.0) -> None:
        """Adds the logits' GEMM, `rows` at a time, and the unhidden writing of its output."""
        rows, g = min(rows, self.N), self.guesses
        alone = gemm_ms(self.d, rows, self.V, self.H, rate * (g.short if self.H <= 2048 else 1.0))
        # Each time the weight is read again.
        moved = 2 * self.V * self.H + width * rows * self.V
        load = moved / (1e9 * self.d.tb_per_s * alone)
        self.add(name, self.N / rows * alone * (1 + 2 * g.crowded * max(0.0, load - 0.5)))
        if width:
            self.copy(f"{name}, its output", g.exposed * width * self.N * self.V)

    def gradients(self, rows: int, width: int, summed: bool = True) -> None:
        """Adds the GEMMs of dH and dW, whose sum is read and written per chunk, `width` bytes.

        Not `summed`: dW's GEMM writes each chunk's part, and leaves the sum to others.
        """
        chunks = math.ceil(self.N / rows)
        rows = min(self.N, math.ceil(self.N / chunks / 128) * 128)
        share = self.N / rows
        self.add("dH", share * gemm_ms(self.d, rows, self.H, self.V))
        self.add("dW", share * gemm_ms(self.d, self.V, self.H, rows))
        moved = (2 * chunks - 1 if summed else chunks) * width * self.V * self.H
        self.copy("dW, read and written per chunk", self.guesses.exposed * moved)

    def finish(self, launches: float, waits: int = 0, on_cpu: float = 1.0) -> dict[str, float]:
        """Adds what launches and waits cost and returns the terms."""
        self.add("launches", launches * self.d.launch_us / 1e3)
        cpu = launches * on_cpu * self.guesses.cpu_us / 1e3
        self.add("CPU behind", max(0.0, cpu - sum(self.terms.values())))
        self.add("waits", waits * WAIT_MS)
        return self.terms

    def finish_ours(self, launches: float) -> dict[str, float]:
        """Adds the same for a call of this library, which waits once, for the counts of rows."""
        return self.finish(launches, waits=1, on_cpu=OURS_ON_CPU)


Method = Callable[[Step], dict[str, float]]


def budget(d: Device, V: int) -> int:
    """Returns the bytes of logits and gradients that a call takes there by default."""
    return default_chunk_bytes(V, "cuda", int(d.gib * 2**30))


def _rows(s: Step, width: int) -> int:
    """Returns how many rows of so many bytes per logit the budget holds."""
    return max(128, budget(s.d, s.V) // (width * s.V) // 128 * 128)


def bare_gemms(s: Step, rows: int = 4096) -> dict[str, float]:
    """The three GEMMs in bf16, as `benchmarks.head` times them."""
    s.logits(rows, 2)
    s.gradients(rows, 2)
    return s.finish(3 * s.N / min(rows, s.N))


def eager(s: Step) -> dict[str, float]:
    """All logits at once; float32 copy, log-softmax, its backward, and back to bf16: 40 bytes."""
    s.logits(s.N, 2)
    s.copy("element-wise", 40 * s.N * s.V, COPY_SPEED)
    s.gradients(s.N, 2)
    return s.finish(40)


def exact(s: Step) -> dict[str, float]:
    """Strips of float32 logits; one sweep leaves statistics and X = e^(z - a) in bf16."""
    plan = plan_of(s.d, s.N, s.V)
    chunks = len([*plan.chunk_slices()])
    _one_sweep(s, plan, 2 if chunks == 1 else 4)
    s.copy("finishing scale", (4 if chunks == 1 else 6) * (s.V + s.N) * s.H)
    return s.finish_ours(50 + 15 * chunks + 2 * math.ceil(s.N / plan.logit_rows))


def _one_sweep(s: Step, plan: RowPlan, width: int) -> None:
    s.logits(plan.logit_rows, 4)
    s.sweep("sweep", 6, "one sweep")
    s.gradients(plan.largest_chunk, width)
    s.copy("r h, and dH to bf16", 10 * s.N * s.H)


def plan_of(d: Device, N: int, V: int) -> RowPlan:
    """The chunks and strips that the library cuts tokens into."""
    chunk_bytes = budget(d, V)
    strip = strip_rows(chunk_bytes, 4 * V, ROW_MULTIPLE, d.sms)
    rows = (chunk_bytes - strip * 4 * V) // (2 * V) // ROW_MULTIPLE * ROW_MULTIPLE
    return RowPlan(None, N, N, rows, strip, N, row_bytes=(4 * V, 2 * V))


def scoring(s: Step) -> dict[str, float]:
    """Log-probs without a gradient: float32 logits, and one sweep."""
    rows = _rows(s, 4)
    s.logits(rows, 4)
    s.sweep("statistics", 4, "token_stats")
    return s.finish_ours(50 + 3 * math.ceil(s.N / rows))


def two_passes(s: Step) -> dict[str, float]:
    """Log-probs, then a loss over them: X is kept if one chunk has all rows, else made again."""
    plan = plan_of(s.d, s.N, s.V)
    if len([*plan.chunk_slices()]) > 1:
        return exact_two_sweeps(s, again=True)
    _one_sweep(s, plan, 2)
    return s.finish_ours(80 + 2 * math.ceil(s.N / plan.logit_rows))


def exact_two_sweeps(s: Step, again: bool = False) -> dict[str, float]:
    """Statistics, then the logits' gradient, in buffers of equal rows; `again`: in two passes."""
    rows = _rows(s, 6)
    s.logits(rows, 4)
    s.sweep("statistics", 4, "token_stats")
    if again:
        s.logits(rows, 4, "GEMM 1, again")
    s.sweep("gradient of the logits", 6, "logit_grads")
    _gradients(s, rows)
    return s.finish_ours(60 + (23 if again else 15) * math.ceil(s.N / rows))


def _gradients(s: Step, rows: int) -> None:
    s.gradients(rows, 4)
    s.copy("dH to bf16", 6 * s.N * s.H)
    s.copy("finishing scale", 6 * (s.V + s.N) * s.H)


def with_estimate(s: Step) -> dict[str, float]:
    """`exact` with a KL: before it the reference's logits, read once for its log-probs."""
    scoring(s)
    return exact(s)


def two_heads(s: Step) -> dict[str, float]:
    """Both models' float32 logits; statistics, the divergence, the gradient of the policy's."""
    rows = _rows(s, 5)
    s.logits(rows, 4)
    s.logits(rows, 4, "GEMM 1, of the reference")
    s.sweep("statistics of both", 8, "pair_stats")
    s.sweep("divergence by these", 8, "divergences")
    s.sweep("gradient of the logits", 10, "pair_grads")
    _gradients(s, rows)
    return s.finish_ours(70 + 20 * math.ceil(s.N / rows))


def replay(s: Step, entries: float) -> dict[str, float]:
    """The loss over so many entries per token: each gathers a row of W twice, and one of h."""
    row = 2 * s.H
    for name in ("forward", "dh", "dW"):
        s.copy(name, s.N * entries * row, SCATTERED)
    s.copy("forward", s.N * row)  # the states
    s.copy("dh", s.N * row)
    s.copy("writing dW", s.V * row)
    s.copy("order of the entries", BYTES_OF_ORDER * s.N * entries)
    return s.finish(REPLAY_LAUNCHES, waits=1, on_cpu=1.5)  # index operations, little Python


def entries_like_exact(d: Device, N: int, V: int, H: int) -> float:
    """Returns the entries per token at which `replay` takes as long as `exact`."""
    goal = sum(exact(Step(d, N, V, H)).values())
    low, high = 0.0, float(V)
    while high - low > 0.5:
        middle = (low + high) / 2
        slower = sum(replay(Step(d, N, V, H), middle).values()) > goal
        low, high = (low, middle) if slower else (middle, high)
    return low


def trl(s: Step) -> dict[str, float]:
    """TRL 1.16: tiles of 4,096 x 32,768 in bf16, computed again in the backward; dW in float32."""
    rows, tiles = 4096, math.ceil(s.V / 32_768)
    s.logits(rows, 2, "GEMM 1, twice")
    s.logits(rows, 2, "GEMM 1, twice")
    s.sweep("statistics", 2, "TRL's statistics")
    s.sweep("gradient of the logits", 4, "logit_grads")
    s.gradients(rows, 4)
    s.copy("dH, read and written per tile", s.guesses.exposed * 8 * tiles * s.N * s.H)
    s.copy("zeros, and to bf16", (4 + 6) * s.V * s.H)
    return s.finish(60 + 25 * tiles * s.N / rows)


def trl_sft(s: Step) -> dict[str, float]:
    """TRL's `chunked_nll` in bf16, as published: `eager` on 256 tokens at once, not recomputed.

    Autograd adds up the chunks' dW.
    """
    rows, chunks = 256, math.ceil(s.N / 256)
    s.logits(rows, 2)
    s.copy("element-wise", 40 * s.N * s.V, COPY_SPEED)
    s.gradients(rows, 2, summed=False)
    s.copy("sums of dW", 6 * (chunks - 1) * s.V * s.H, COPY_SPEED)
    return s.finish(20 + 20 * chunks)


def liger_flce(s: Step, copied: bool = False) -> dict[str, float]:
    """Liger 0.8.5's Triton cross-entropy; `copied`: up to 0.8.0, dW through a float32 copy."""
    rows = 1 << math.ceil(math.log2(math.ceil(s.N / math.ceil(s.V / s.H))))
    chunks = math.ceil(s.N / rows)
    s.logits(rows, 2)
    s.sweep("sweep", 6, "Liger FLCE")
    s.gradients(rows, 2, summed=not copied)
    if copied:  # to float32, 6 bytes; added to the sum, 8
        s.copy("float32 copies of dW", 14 * chunks * s.V * s.H, COPY_SPEED)
    return s.finish(20 + 8 * chunks, waits=1)


def liger_scaled_ce(s: Step) -> dict[str, float]:
    """Liger 0.8.5's kernels for Hopper: no logits in memory, recompute, dZ of 1,024 rows."""
    s.logits(s.N, 0, "GEMM 1 with statistics", s.guesses.fused_gemm)
    s.logits(1024, 2, "GEMM 1 with dZ", s.guesses.fused_gemm)
    s.gradients(1024, 2)
    return s.finish(60 + 8 * s.N / 1024)


def in_place_ce(s: Step) -> dict[str, float]:
    """bf16 logits, and one kernel that reads them once and leaves their gradient (quack, CuTe)."""
    s.logits(4096, 2)
    s.sweep("sweep", 4, "one sweep")
    s.gradients(4096, 4)
    return s.finish(30)


METHODS: dict[str, Method] = {
    "bare GEMMs": bare_gemms,
    BASELINE: eager,
    "exact": exact,
    "exact, two sweeps": exact_two_sweeps,
    "two passes": two_passes,
    "exact, and a KL by k3": with_estimate,
    "exact, and the exact KL": two_heads,
    "TRL chunked head": trl,
    "Liger FLCE": liger_flce,
    HOPPER_ONLY: liger_scaled_ce,
}

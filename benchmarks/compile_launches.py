"""Launches of the Triton kernels' launchers, recorded instead of launched.

The configurations are not listed here: the launchers are called with every combination of their
options. Those of the policy loss multiply to hundreds; there, both surrogates meet every form of
the KL, and the other options are drawn at random once and once inverted, so that every pair of them
occurs.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from benchmarks import exp_gemm
from grpo_kernels.kernels import (
    Entries,
    LogitTransform,
    RowGrads,
    TokenStats,
    triton_backend,
    triton_divergences,
    triton_entries,
    triton_logits,
    triton_pairs,
    triton_policy_loss,
)
from grpo_kernels.kernels.divergences import DIVERGENCES
from grpo_kernels.kernels.pair_stats import PairStats

# The modules whose kernels are compiled.
MODULES = (
    triton_logits, triton_divergences, triton_pairs, triton_entries, triton_policy_loss, exp_gemm,
)  # fmt: skip
DTYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64",
    torch.bool: "i1",
}  # fmt: skip
HALVES = (torch.bfloat16, torch.float16)
GEMM_ARCHS = {8: ("sm_80",), 9: ("sm_90",), 10: ("sm_100",)}
# Scale, softcap and what they are rounded to.
STEPS = (
    (1.0, None, None), (1.0, 30.0, None), (0.5, 30.0, torch.bfloat16), (0.5, None, torch.float16)
)  # fmt: skip
# Qwen's, GPT-2's, and less than a block.
VOCABULARIES = (151_936, 50_257, 1003)


@dataclass(frozen=True)
class KernelLaunch:
    """Kernel with the arguments of its launcher."""

    kernel: str
    signature: tuple[tuple[str, str], ...]
    # Arguments that 16 divides, of those that Triton compiles anew for; all pointers do.
    divisible: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    num_warps: int
    fp_fusion: bool | None  # None: left to Triton
    maxnreg: int | None = None
    archs: tuple[str, ...] = ()  # where alone it is launched; (): everywhere


def recorded(calls: Callable[[], Any]) -> set[KernelLaunch]:
    """Returns what `calls` would launch."""
    launches: set[KernelLaunch] = set()

    def record(
        self: Any, *args: Any, grid: Any, warmup: bool, num_warps: int,
        enable_fp_fusion: bool | None = None, maxnreg: int | None = None, **flags: Any,
    ) -> None:  # fmt: skip
        params = [p for p in self.params if not p.is_constexpr]
        kinds, divisible = [], []
        for param, value in zip(params, args, strict=True):
            specialized = not (param.do_not_specialize or param.do_not_specialize_on_alignment)
            if isinstance(value, TensorDescriptor):
                block = ", ".join(map(str, value.block_shape))
                kinds.append((param.name, f"tensordesc<{DTYPES[value.base.dtype]}[{block}]>"))
            elif isinstance(value, torch.Tensor):
                kinds.append((param.name, "*" + DTYPES[value.dtype]))
                divisible += [param.name] if specialized else []
            else:
                number = isinstance(value, float)
                kinds.append((param.name, "fp32" if number else "i32"))
                divides = not number and value % 16 == 0
                divisible += [param.name] if specialized and divides else []
        # Functions by their names: they cannot be sent to another process.
        flags = {k: v.__name__ if isinstance(v, JITFunction) else v for k, v in flags.items()}
        names = self.__name__, tuple(kinds), tuple(divisible), tuple(sorted(flags.items()))
        launches.add(KernelLaunch(*names, num_warps, enable_fp_fusion, maxnreg))

    original = JITFunction.run
    JITFunction.run = record
    try:
        calls()
    finally:
        JITFunction.run = original
    return launches


def head_launches() -> None:
    """Launches the kernels on logits with every transform that the public calls can ask for."""
    rows = 2
    targets, column = torch.zeros(rows, dtype=torch.int64), torch.ones(rows)
    temperatures: tuple[float | torch.Tensor, ...] = (1.0, column)
    options = itertools.product(STEPS, temperatures, (False, True))
    for (scale, softcap, rounding), temperature, entropy in options:
        for V in VOCABULARIES:
            logits = padded(rows, V, torch.float32)
            transform = LogitTransform(scale, softcap, temperature, rounding)
            triton_backend.token_stats(logits, targets, transform, entropy=entropy)
            if entropy:
                # A head in bf16 keeps the exponentials apart, one in float32 on the logits.
                for exps in (padded(rows, V, torch.bfloat16), logits):
                    triton_backend.token_stats(logits, targets, transform, entropy=True, exps=exps)
            grads = RowGrads(*[column] * (5 if entropy else 3))
            # On the logits or beside them, the launch is the same.
            for dtype in (torch.float32, *HALVES):
                out = padded(rows, V, dtype)
                triton_backend.logit_grads_(logits, targets, transform, grads, out)
    # selective_log_softmax gets the caller's logits, in any dtype; the gradients have the same.
    for dtype, temperature in itertools.product(HALVES, temperatures):
        logits = torch.empty(rows, VOCABULARIES[0], dtype=dtype)
        transform = LogitTransform(temperature=temperature)
        triton_backend.token_stats(logits, targets, transform, entropy=False)
        grads = RowGrads(*[column] * 3)
        triton_backend.logit_grads_(logits, targets, transform, grads, torch.empty_like(logits))


def pair_launches() -> None:
    """Launches the kernels on two models' logits, with options on both and on none."""
    rows, targets, column = 2, torch.zeros(2, dtype=torch.int64), torch.ones(2)
    transforms = [
        LogitTransform(scale, softcap, column if softcap else 1.0, rounding)
        for scale, softcap, rounding in STEPS
    ]
    for policy, V in itertools.product(transforms, VOCABULARIES):
        other = policy
        logits = padded(rows, V, torch.float32)
        stats = PairStats.empty(logits)
        divergences = [x() for x in DIVERGENCES.values()]
        for invariant in (False, True):
            triton_pairs.pair_stats(
                logits, logits, targets, policy, other, stats, invariant=invariant
            )
        policy_grads = (None, RowGrads(*[column] * 3), RowGrads(*[column] * 5))
        for x, grads in itertools.product(divergences, policy_grads):
            triton_pairs.divergences(logits, logits, policy, other, stats, divergence=x)
            for dtype in (torch.float32, torch.bfloat16):
                out = padded(rows, V, dtype)
                triton_pairs.pair_grads_(
                    logits, logits, targets, policy, other, stats, grads, column, out, divergence=x
                )


def gemm_launches() -> set[KernelLaunch]:
    """Launches of the experiment's GEMM that stores exponentials, on the GPUs of each tile."""
    V, H, rows = 151_936, 2048, 256
    weight, hidden = (torch.empty(n, H, dtype=torch.bfloat16) for n in (V, rows))
    exps, out = padded(rows, V, torch.bfloat16), TokenStats(*torch.zeros(4, rows))
    targets, launches = torch.zeros(rows, dtype=torch.int64), set()
    for major, tile in ((x, tile) for x, tiles in exp_gemm.TILES.items() for tile in tiles):
        tile_launches = recorded(
            partial(exp_gemm.exp_gemm, hidden, weight, targets, exps, out, tile=tile)
        )
        launches |= {replace(x, archs=GEMM_ARCHS[major]) for x in tile_launches}
    return {x for x in launches if x.kernel != "entry_dots_kernel"}


def entry_launches() -> None:
    """Launches the kernels on entries: of a head of 4,096 columns, a LoRA's and the bias."""
    entries = some_entries()
    # So many that a segment can be long.
    many = some_entries(2 * triton_entries.PART + 1)
    half_and_float = [(a, b) for a, b in itertools.product(DTYPES, repeat=2) if a.is_floating_point
                      and b.is_floating_point and (a == b or torch.float32 in (a, b))]  # fmt: skip
    for (dtype, other), K in itertools.product(half_and_float, (4096, 16)):
        rows = torch.empty(2, K, dtype=dtype)
        triton_backend.entry_dots(rows, rows.to(other), entries, torch.ones(len(entries)))
        sum_entries(many, rows, other)
    for dtype in (torch.float32, *HALVES):
        sum_entries(many, torch.ones(1, 1), dtype)


def some_entries(count: int = 5) -> Entries:
    per_entry, per_token = torch.zeros(count, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    return Entries(per_entry, per_entry, per_token, per_token[1:], per_entry)


def sum_entries(entries: Entries, rows: torch.Tensor, dtype: torch.dtype) -> None:
    """Launches the sums over tokens."""
    factors = torch.ones(len(entries))
    triton_backend.segment_sums(factors, entries.ids, entries.offsets, rows, dtype)


def padded(rows: int, V: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns logits whose rows are padded as in the head's chunks."""
    return torch.empty(rows, -(-V // 64) * 64, dtype=dtype)[:, :V]


def policy_launches() -> None:
    """Launches the policy loss: both surrogates with every KL, and all pairs of other options."""
    draw = random.Random(0)
    kls: list[dict[str, Any]] = [{}]
    for name, ratio in itertools.product(("k1", "k2", "k3"), (False, True)):
        kls.append({"beta": 0.1, "kl_estimator": name, "kl_ratio": ratio})
    tokens, count = torch.ones(4), torch.tensor(4.0)
    for surrogate, kl in itertools.product(("clip", "cispo"), kls):
        drawn = [draw.random() < 0.5 for _ in range(5)]
        everything = [[True] * 5] if kl else []
        for flags in (drawn, [not flag for flag in drawn], *everything):
            masked, old, scaled, bonus, grad = flags
            triton_policy_loss.policy_loss(
                tokens, tokens, advantages=tokens, weights=tokens, count=count,
                mask=tokens > 0 if masked else None, old_logps=tokens if old else None,
                ref_logps=tokens if kl else None, scale=tokens if scaled else None, grad=grad,
                surrogate=surrogate, low=0.8, high=1.2, entropy_coef=0.1 * bonus, **kl,
            )  # fmt: skip


def all_launches() -> list[KernelLaunch]:
    each = (head_launches, pair_launches, entry_launches, policy_launches)
    return sorted(gemm_launches().union(*map(recorded, each)), key=repr)


def functions() -> dict[str, Any]:
    """Returns the compiled functions by name, the kernels among them."""
    return {
        name: x
        for module in MODULES
        for name, x in vars(module).items()
        if isinstance(x, JITFunction)
    }


def kernels() -> dict[str, Any]:
    """Returns the kernels by name; other compiled functions are helpers that they call."""
    return {name: x for name, x in functions().items() if name.endswith("_kernel")}


def sample(launches: list[KernelLaunch]) -> list[KernelLaunch]:
    """Few of the launches: every pair of options that occurs in all of them, and the hungriest."""
    by_kernel: dict[str, list[KernelLaunch]] = defaultdict(list)
    for launch in launches:
        by_kernel[launch.kernel].append(launch)
    chosen = {launch for group in by_kernel.values() for launch in _covering(group)}
    return sorted(chosen | set(filter(_takes_most_registers, launches)), key=repr)


def _takes_most_registers(launch: KernelLaunch) -> bool:
    """Returns True for a softcap and an entropy beside one more operand; the report checks it."""
    flags = dict(launch.constants)
    more = flags.get("KEEPS_EXPS") and not flags.get("INVARIANT")
    capped = flags.get("STEPS", 0) % 2 and flags.get("HAS_ENTROPY")
    return bool(capped and more and flags["BLOCK_V"] >= 2048)


def _covering(launches: list[KernelLaunch]) -> list[KernelLaunch]:
    """Greedily covers all pairs; of launches that cover as many, that with more switched on."""
    uncovered = {launch: _pairs(launch) for launch in launches}
    on = {
        x: sum(
            value is True or (name.endswith("STEPS") and value > 0) for name, value in x.constants
        )
        for x in launches
    }
    chosen = []
    while any(uncovered.values()):
        best = max(uncovered, key=lambda x: (len(uncovered[x]), on[x], repr(x)))
        covered = uncovered.pop(best)
        chosen.append(best)
        uncovered = {launch: pairs - covered for launch, pairs in uncovered.items()}
    return chosen


def _pairs(launch: KernelLaunch) -> set[Any]:
    strides = [("divides", name) for name in launch.divisible]
    return set(itertools.combinations((*launch.constants, *launch.signature, *strides), 2))

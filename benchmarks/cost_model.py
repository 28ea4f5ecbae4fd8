"""Predicts milliseconds per step of the head with its loss on GPUs, from bytes, FLOPs and launches.

    python -m benchmarks.cost_model [--markdown benchmarks/results/predicted.md]

Nothing here is measured; `benchmarks/gpu_costs.py` says what is counted. A method's time is a list
of named terms, so that a run on a GPU (`benchmarks.gpu_day`) refutes terms and not one total. The
constants are few and not fitted to one figure or another: the same model is compared with figures
that others have published, and its errors stand beside every prediction.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.contenders import BASELINE
from benchmarks.gpu_costs import (
    BEST,
    DEVICES,
    HOPPER_ONLY,
    LIKELY,
    METHODS,
    WORST,
    Device,
    Guesses,
    Method,
    Step,
    bare_gemms,
    eager,
    entries_like_exact,
    exact,
    in_place_ce,
    liger_flce,
    liger_scaled_ce,
    replay,
    trl_sft,
)

Shape = tuple[int, int, int]  # N, V, H
SHOWN = [name for name in DEVICES if name != "B200"]
SHAPES = [
    *[(16_384, 151_936, H) for H in (896, 2048, 3584, 5120)],
    *[(4096, 151_936, H) for H in (896, 2048, 4096)],
    (512, 151_936, 896),  # where the CPU is behind
]
# Tokens, vocabulary and hidden size of support replay, and the entries of a token's kept set.
REPLAY, ENTRIES = (16_384, 151_936, 4096), (8, 64)
COMMAND = "python -m benchmarks.cost_model --markdown benchmarks/results/predicted.md"
BEGIN = f"<!-- begin: {COMMAND} -->\n"
END = "<!-- end of the cost model's tables -->\n"


def predict(device: Device, shape: Shape, method: Method, guesses: Guesses = LIKELY) -> float:
    """Returns milliseconds per step."""
    return sum(method(Step(device, *shape, guesses)).values())


def cell(device: Device, shape: Shape, method: Method) -> str:
    """Returns the milliseconds, and how often they are the bare GEMMs': likely, best and worst."""
    ratios = [
        predict(device, shape, method, g) / predict(device, shape, bare_gemms, g)
        for g in (LIKELY, BEST, WORST)
    ]
    likely, *ends = ratios
    ms = predict(device, shape, method)
    return f"{ms:.1f} ({likely:.2f}; {min(ratios):.2f}-{max(ends):.2f})"


def absent(device: str, shape: Shape, method: str) -> str | None:
    """Returns why a method cannot run there, or None if it can."""
    N, V, H = shape
    # Eager holds 14 bytes per logit at its peak.
    if method == BASELINE and DEVICES[device].gib * 2**30 < 14 * N * V + 4 * V * H:
        return "does not fit"
    return "no kernel" if method == HOPPER_ONLY and device not in ("H100", "H200") else None


class Published(NamedTuple):
    """A figure that others have measured, and the method that stands for it here."""

    what: str
    device: str
    shape: Shape
    method: Method
    ms: float


_TRL, _CUTE, _SFT = (8192, 151_936, 4096), (4096, 128_256, 4096), (16_384, 248_320, 2048)
_SCALED = (8192, 131_072, 4096)  # published as a rate; the tokens are assumed
PUBLISHED = (
    Published("three bare GEMMs", "H100", _TRL, partial(bare_gemms, rows=8192), 42),
    Published("materialized cross-entropy", "H100", _TRL, eager, 59),
    Published("Liger FLCE, Triton", "H100", _TRL, partial(liger_flce, copied=True), 192),
    Published("Liger FLCE, Triton", "H200", _CUTE, partial(liger_flce, copied=True), 141),
    Published("Liger FLCE, CuTe", "H200", _CUTE, in_place_ce, 18.1),
    Published("quack's chunked linear CE", "H200", _CUTE, in_place_ce, 17.3),
    Published("Liger scaled CE, 682 TFLOP/s at 4 GEMMs", "H100", _SCALED, liger_scaled_ce,
              8 * math.prod(_SCALED) / 682e9),
    Published("one bf16 GEMM, materialized cross-entropy", "H100", _SFT, eager, 137.0),
    Published("TRL's SFT loss, 256 tokens at once", "H100", _SFT, trl_sft, 224.4),
    Published("Liger FLCE, Triton", "H100", _SFT, partial(liger_flce, copied=True), 321.2),
    Published("materialized GRPO", "B200", (8192, 128_256, 4096), eager, 44),
)  # fmt: skip


def calibration() -> list[tuple[Published, float, float]]:
    """Returns each published figure with the model's milliseconds and relative error."""
    predicted = [predict(DEVICES[p.device], p.shape, p.method) for p in PUBLISHED]
    return [(p, ms, ms / p.ms - 1) for p, ms in zip(PUBLISHED, predicted, strict=True)]


def error_of_the_model() -> str:
    """Returns the sentence that stands wherever predictions are shown."""
    errors = [abs(error) for _, _, error in calibration()]
    return (
        f"Not measured. On {len(errors)} figures that others have published the model is off by "
        f"{statistics.median(errors):.0%} (median) and {max(errors):.0%} (worst)."
    )


def render() -> str:
    """Returns the tables: predictions by device, and the calibration."""
    titles = " | ".join(f"H = {H:,}, N = {N:,}" for N, _, H in SHAPES)
    (V,) = {V for _, V, _ in SHAPES}
    lines = [
        f"V = {V:,}; bf16. In brackets: x bare GEMMs, and the range from the best guesses to the "
        "worst."
    ]
    for name in SHOWN:
        lines += ["", f"**{name}, predicted ms.** {error_of_the_model()}", ""]
        lines += [f"| | {titles} |", "|---" * (len(SHAPES) + 1) + "|"]
        device = DEVICES[name]
        for title, method in METHODS.items():
            cells = [absent(name, x, title) or cell(device, x, method) for x in SHAPES]
            lines.append(f"| {title} | {' | '.join(cells)} |")
    lines += _replay_table()
    lines += ["", "The same model on figures that others have published (as ms):", ""]
    lines += [
        "| published | on | N, V, H | ms | predicted ms | error |",
        "|---|---|---|---|---|---|",
    ]
    for p, ms, error in calibration():
        where = f"{p.what} | {p.device} | {', '.join(f'{x:,}' for x in p.shape)}"
        lines.append(f"| {where} | {p.ms:.1f} | {ms:.1f} | {error:+.0%} |")
    return "\n".join(lines) + "\n"


def _replay_table() -> list[str]:
    """Returns the table of the loss over the ids that a sampler kept, with a title."""
    N, V, H = REPLAY
    columns = ("forward", "dh", "dW", "writing dW")
    lines = [
        "",
        f"**Support replay, N = {N:,}, V = {V:,}, H = {H:,}, bf16, predicted ms.** "
        + error_of_the_model(),
        "",
        f"| | entries per token | {' | '.join(columns)} | launches, waits, order | all | exact "
        "| as slow as exact at |",
        "|---" * (len(columns) + 6) + "|",
    ]
    for name, entries in itertools.product(SHOWN, ENTRIES):
        device = DEVICES[name]
        terms = replay(Step(device, *REPLAY), entries)
        shown = [terms[column] for column in columns]
        total = sum(terms.values())
        cells = [f"{ms:.2f}" for ms in (*shown, total - sum(shown), total)]
        cells.append(f"{predict(device, REPLAY, exact):.1f}")
        cells.append(f"{entries_like_exact(device, *REPLAY):,.0f} entries per token")
        lines.append(f"| {name} | {entries} | {' | '.join(cells)} |")
    return lines


def write_section(page: Path, text: str) -> None:
    """Replaces the text between the two marks of a page."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{page}: expected {BEGIN.strip()} and {END.strip()}; got none")
    page.write_text(before + BEGIN + text + END + after)


def main(argv: list[str] | None = None) -> None:
    about = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cost_model", description=about)
    parser.add_argument("--markdown", type=Path, metavar="FILE",
                        help="write the tables into this page, between its marks")  # fmt: skip
    args = parser.parse_args(argv)
    if args.markdown:
        write_section(args.markdown, render())
    else:
        print(render(), end="")


if __name__ == "__main__":
    main()

"""Counts what the kernels do, as a profiler would, from their PTX executed on a CPU.

    python -m benchmarks.counters [--arch 90] [--markdown benchmarks/results/counters.md]

Per logit (or per element that is multiplied, or per token): instructions of threads. Per request of
a warp: sectors of 32 bytes. Coalescing: the part of what is moved that was asked for. Nothing here
is a time; `tests/ptx` executes the PTX, and `ptxas` may make fewer instructions of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.compile_launches import padded, some_entries, sum_entries
from benchmarks.cost_model import BEGIN, write_section
from tests.ptx import Counts, EmulatedDriver

END = "<!-- end of the counters -->\n"
ROWS, V, ODD, K, TOKENS = 2, 151_936, 50_257, 4096, 4096
Case = tuple[Callable[[], Any], int]


def cases() -> dict[str, Case]:
    """The launches, and how many logits, elements or tokens each handles."""
    from grpo_kernels.kernels import LogitTransform, RowGrads, triton_backend
    from grpo_kernels.kernels.triton_policy_loss import policy_loss

    y, plain = torch.zeros(ROWS, dtype=torch.int64), LogitTransform()
    grads, entries = RowGrads(*[torch.ones(ROWS)] * 3), some_entries(64)
    made: dict[str, Case] = {}
    stats = triton_backend.token_stats
    for name, columns in (("", V), (", V = 50,257", ODD)):
        x = padded(ROWS, columns, torch.float32).normal_()
        exps = padded(ROWS, columns, torch.bfloat16)
        logits = ROWS * columns
        calls: dict[str, Callable[[], Any]] = {
            "one sweep": partial(stats, x, y, plain, entropy=True, exps=exps),
            "token_stats": partial(stats, x, y, plain, entropy=True),
            "token_stats, invariant": partial(stats, x, y, plain, entropy=True, invariant=True),
            "logit_grads": partial(triton_backend.logit_grads_, x, y, plain, grads, exps),
        }
        made |= {f"{kind}{name}": (call, logits) for kind, call in calls.items()}
    rows, tokens = torch.randn(2, K).bfloat16(), torch.rand(TOKENS)
    count = torch.tensor(float(TOKENS))

    def policy() -> Any:
        return policy_loss(tokens, None, advantages=tokens, weights=tokens, count=count,
                           grad=True, surrogate="clip", low=0.8, high=1.2)  # fmt: skip

    made["entry_dots"] = (
        lambda: triton_backend.entry_dots(rows, rows, entries, torch.zeros(len(entries))),
        len(entries) * K,
    )
    made["segment_sums"] = (
        lambda: sum_entries(entries_of_one(entries), rows, rows.dtype),
        len(entries) * K,
    )
    made["policy_loss"] = (policy, TOKENS)
    return made


def entries_of_one(entries: Any) -> Any:
    """All entries in the first token's kept set."""
    entries.offsets[1:] = len(entries)
    return entries


def counted(call: Callable[[], Any]) -> Counts:
    """What the launches of a call do, together."""
    settings = EmulatedDriver.settings
    settings.counted.clear()
    call()
    total = Counts()
    for counts in settings.counted.values():
        total.add(counts)
    return total


def table(arch: int) -> list[str]:
    """The table, one row per launch."""
    EmulatedDriver.activate(arch, counts=True, races=False)
    kinds = ("float", "special function", "integer", "comparison", "conversion", "move")
    lines = [
        f"sm_{arch}, Triton {triton.__version__}; {ROWS} rows of V = {V:,}, float32 beside bf16.",
        "",
        f"| launch | instructions | {' | '.join(kinds)} | loads: sectors per request, coalescing "
        "| stores | barriers per program | bank conflicts | divergent branches |",
        "|---" * (len(kinds) + 7) + "|",
    ]
    for name, (call, amount) in cases().items():
        counts = counted(call)
        per = 32 / amount
        cells = [f"{per * sum(counts.instructions.values()):.1f}"]
        cells += [f"{per * counts.instructions[kind]:.2f}" for kind in kinds]
        for kind in ("load", "store"):
            t = counts.traffic[kind]
            each = t.sectors / max(1, t.requests)
            cells.append(f"{each:.1f}, {t.efficiency:.0%}" if t.requests else "")
        cells.append(f"{counts.barriers / max(1, counts.programs):.0f}")
        cells += [str(counts.traffic["shared"].conflicts), str(counts.divergent_branches)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.counters", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--arch", type=int, default=90, help="compute capability (default: 90)")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the table into this page"
    )
    args = parser.parse_args(argv)
    text = "\n".join(table(args.arch)) + "\n"
    if args.markdown is None:
        return print(text, end="")
    arguments = f"--markdown benchmarks/results/{args.markdown.name}"
    begin = BEGIN.replace("cost_model", "counters").format(arguments)
    write_section(args.markdown, begin, END, text)


if __name__ == "__main__":
    main()

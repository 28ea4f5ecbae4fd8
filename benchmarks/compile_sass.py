"""Instructions in the innermost loops of compiled kernels, and how many there may be.

A sweep over the logits is to be bound by memory. It is, as long as a thread spends few instructions
on a logit, moves 16 bytes at a time and waits for no other. Counted is what is in the machine code,
per logit that one thread handles in one iteration; in kernels over entries, per element of a row
that is multiplied.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks.compile_launches import KernelLaunch, padded, recorded, some_entries, sum_entries
from grpo_kernels.kernels import (
    LogitTransform,
    RowGrads,
    triton_backend,
    triton_pairs,
)
from grpo_kernels.kernels.divergences import ReverseKL
from grpo_kernels.kernels.pair_stats import PairStats

# Instructions per logit, rounded up from what is known to be possible.
# For pairs, per logit of either model.
BUDGETS = {
    "one sweep": 14.0, "token_stats": 12.0, "logit_grads": 16.0, "pair_stats": 12.0,
    "divergences": 20.0, "pair_grads": 16.0, "entry_dots": 8.0, "segment_sums": 8.0,
}  # fmt: skip
# Before sm_80 maxima that keep NaN are three instructions. A T4 has time for 50 per logit.
SM_75_BUDGETS = BUDGETS | {"token_stats": 14.0, "pair_stats": 14.0}
# Of the loop with the most, over the target's block and the rest: it looks at every column, and has
# two turns where the main one has 73.
LAST_BLOCKS_BUDGETS = {"one sweep": 17.0, "token_stats": 16.0}
# Bytes loaded for each: of a logit in float32, of the two or one half that is multiplied.
LOADED = {"entry_dots_kernel": 4, "segment_sums_kernel": 2}


class Loop(NamedTuple):
    """Counts of one innermost loop."""

    instructions: int
    barriers: int
    shuffles: int
    vector_loads: int  # of 16 bytes or more
    other_loads: int
    vector_stores: int
    other_stores: int
    loaded_bytes: int  # by vectors
    spilled: int  # registers moved to the stack and back


def budgets_of(name: str, launch: KernelLaunch, loops: list[Loop], arch: str) -> list[float]:
    """Returns the most instructions per logit of each loop."""
    budget = (SM_75_BUDGETS if arch == "sm_75" else BUDGETS)[name]
    counts = [loop.instructions / logits_per_thread(launch, loop) for loop in loops]
    largest = max(counts, default=0.0) if name in LAST_BLOCKS_BUDGETS else None
    return [LAST_BLOCKS_BUDGETS[name] if count == largest else budget for count in counts]


def budgeted(half: torch.dtype) -> dict[str, KernelLaunch]:
    """Returns the launches that have a budget: Qwen's vocabulary, a head in `half`, no options.

    The head of single entries has 4,096 columns.
    """
    V = 151_936
    logits, targets = padded(2, V, torch.float32), torch.zeros(2, dtype=torch.int64)
    grad, column = padded(2, V, half), torch.ones(2)
    # Products of float16 take a second sweep; the exponentials of float32 ones lie on the logits.
    exps = logits if half == torch.float16 else grad
    inputs = (logits, targets, LogitTransform())
    grads, entries = RowGrads(*[column] * 3), some_entries()
    both = (logits, logits, targets, LogitTransform(), LogitTransform())
    stats = PairStats.empty(logits)
    rows = torch.empty(2, 4096, dtype=half)
    calls: dict[str, Callable[[], Any]] = {
        "one sweep": lambda: triton_backend.token_stats(*inputs, entropy=True, exps=exps),
        "token_stats": lambda: triton_backend.token_stats(*inputs, entropy=True),
        "logit_grads": lambda: triton_backend.logit_grads_(*inputs, grads, grad),
        "pair_stats": lambda: triton_pairs.pair_stats(*both, stats),
        "divergences": lambda: triton_pairs.divergences(
            logits, logits, *both[3:], stats, divergence=ReverseKL()
        ),
        "pair_grads": lambda: triton_pairs.pair_grads_(
            *both, stats, grads, column, grad, divergence=ReverseKL()
        ),
        "entry_dots": lambda: triton_backend.entry_dots(
            rows, rows, entries, torch.ones(len(entries))
        ),
        "segment_sums": lambda: sum_entries(entries, rows, rows.dtype),
    }
    return {name: recorded(call).pop() for name, call in calls.items()}


def innermost_loops(sass: str) -> list[Loop]:
    """Reads the innermost loops from what `cuobjdump -sass` prints."""
    code = [
        (int(address, 16), text)
        for address, text in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", sass, re.M)
    ]
    places = {address: i for i, (address, _) in enumerate(code)}
    # First instruction of a loop to the last instruction that branches back there.
    ends: dict[int, int] = {}
    for i, (address, text) in enumerate(code):
        branch = re.search(r"\bBRA\b.*?\b0x([0-9a-f]+)", text)
        # The code ends in a branch to itself. What is beyond an end is code apart, for threads of a
        # warp that have parted, say, and a branch back from there makes no loop.
        if not branch or int(branch[1], 16) >= address:
            continue
        first = places[int(branch[1], 16)]
        if all(other.strip() != "EXIT" for _, other in code[first:i]):
            ends[first] = i
    innermost = [
        (first, last)
        for first, last in ends.items()
        if not any(first < other <= last for other in ends)
    ]
    return [_counted([text for _, text in code[a : b + 1]]) for a, b in sorted(innermost)]


def _counted(body: list[str]) -> Loop:
    names = [re.sub(r"^@!?U?P\w+\s+", "", text).split()[0] for text in body]

    def count(pattern: str) -> int:
        return sum(re.match(pattern, name) is not None for name in names)

    widths = [re.match(r"LDG\b.*\.(128|256)\b", name) for name in names]
    vector_loads, vector_stores = sum(map(bool, widths)), count(r"STG\b.*\.(128|256)\b")
    return Loop(
        len(body),
        count(r"BAR\b"),
        count(r"SHFL\b|REDUX\b"),
        vector_loads,
        count(r"LDG?\b") - vector_loads,
        vector_stores,
        count(r"STG?\b") - vector_stores,
        sum(int(width[1]) // 8 for width in widths if width),
        count(r"(LDL|STL)\b"),
    )


def logits_per_thread(launch: KernelLaunch, loop: Loop) -> int:
    """Logits that one thread handles in an iteration; more where iterations were unrolled."""
    block = math.prod(value for name, value in launch.constants if name.startswith("BLOCK"))
    return max(block // (32 * launch.num_warps), loop.loaded_bytes // _loaded(launch))


def _loaded(launch: KernelLaunch) -> int:
    return LOADED.get(launch.kernel, 4)


def problems_of(name: str, launch: KernelLaunch, loops: list[Loop], arch: str) -> list[str]:
    """Problems of the loops of the launch that has the budget `name`."""
    problems = [] if loops else ["no loop found"]
    for loop, budget in zip(loops, budgets_of(name, launch, loops, arch), strict=True):
        logits = logits_per_thread(launch, loop)
        if loop.instructions > budget * logits:
            per_logit = loop.instructions / logits
            problems.append(f"{per_logit:.1f} instructions per logit, of {budget:g}")
        if loop.barriers or loop.shuffles:
            problems.append(f"{loop.barriers} barriers and {loop.shuffles} shuffles in its loop")
        if loop.loaded_bytes < _loaded(launch) * logits:
            problems.append("logits that are not loaded in vectors")
        if loop.other_stores:
            problems.append(f"{loop.other_stores} stores in its loop that are not vectors")
    return [f"{name} ({launch.kernel}): {problem}, on {arch}" for problem in problems]


def rows_of(name: str, launch: KernelLaunch, loops: list[Loop], arch: str) -> list[str]:
    """The lines of the table; `HEADER` stands above them."""
    return [
        f"| {name} | {arch} | {loop.instructions} | {logits_per_thread(launch, loop)}"
        f" | {loop.instructions / logits_per_thread(launch, loop):.1f} | {budget:g}"
        f" | {loop.barriers} | {loop.shuffles} | {loop.vector_loads} | {loop.other_loads}"
        f" | {loop.vector_stores} | {loop.other_stores} |"
        for loop, budget in zip(loops, budgets_of(name, launch, loops, arch), strict=True)
    ]


HEADER = [
    "| innermost loop of | architecture | instructions | logits | per logit | budget | barriers "
    "| shuffles | vectors loaded | other loads | vectors stored | other stores |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|",
]

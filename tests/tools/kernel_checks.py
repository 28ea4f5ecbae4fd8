"""Small launches of the Triton kernels, compared with torch: what damaged kernels are shown by.

    python -m tests.tools.kernel_checks token_stats [--edit 'old=>new']     from their PTX
    TRITON_INTERPRET=1 python -m tests.tools.kernel_checks token_stats      interpreted

Prints one line of JSON: how far the results are off, and what the emulator found.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from collections.abc import Iterator

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    import triton  # noqa: F401  whose own functions the emulator would have compiled

from tests.ptx import EmulatedDriver, mark, mark_allocations  # noqa: E402

if not INTERPRETED:
    EmulatedDriver.activate(90, strict=False)

from grpo_kernels.backends import (  # noqa: E402
    Entries,
    LogitTransform,
    RowGrads,
    TokenStats,
    torch_backend,
    triton_backend,
)
from grpo_kernels.experimental import torch_column_scores, triton_column_scores  # noqa: E402
from tests.helpers.policy_losses import exact_policy_loss  # noqa: E402

PLAIN = LogitTransform()
COLUMN_SCORES = (triton_column_scores, torch_column_scores)
untouched = torch.empty
# Of the kernel, of torch, and the largest difference allowed, relative to the largest value.
Compared = Iterator[tuple[Tensor, Tensor, float]]


def rows(count: int, V: int, dtype: torch.dtype = torch.float32, pad: int = 0):
    x = (3 * torch.randn(count, V + pad)).to(dtype)[:, :V]
    return x, torch.randint(V, (count,))


def row_grads(count: int) -> RowGrads:
    some = torch.randn(5, count)
    return RowGrads(5 + some[0].abs(), some[1], some[1], some[2], some[3].abs(), some[4])


def some_entries(V: int, counts: list[int]) -> Entries:
    tokens = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    ids = torch.randint(0, V, (len(tokens),))
    offsets = torch.nn.functional.pad(torch.tensor(counts).cumsum(0), (1, 0))
    places = torch.zeros(len(counts), dtype=torch.int64)
    return Entries(ids, tokens, offsets, places, ids.argsort(stable=True))


def compared_stats(x: Tensor, y: Tensor, **options) -> Compared:
    truth = torch_backend.token_stats(x.clone(), y, PLAIN, entropy=True)
    stats = triton_backend.token_stats(x, y, PLAIN, entropy=True, **options)
    yield from ((mine, true, 1e-5) for mine, true in zip(stats[:3], truth[:3], strict=True))


def token_stats() -> Compared:
    """Rows that end where no block does, in wider memory."""
    yield from compared_stats(*rows(4, 1003, pad=5))
    yield from compared_stats(*rows(3, 5003, torch.bfloat16, pad=5))


def odd_rows() -> Compared:
    """Rows that begin at any element."""
    yield from compared_stats(*rows(5, 3001))


def second_sweep() -> Compared:
    """The first anchor is far below the row's maximum."""
    x, y = rows(4, 5000)
    x[:, 3000], y[:] = 200.0, 7
    yield from compared_stats(x, y)


def kept_exps(V: int = 5003, in_place: bool = False) -> Compared:
    x, y = rows(3, V)
    kept = torch.zeros(3, V)
    total = torch_backend.token_stats(x.clone(), y, PLAIN, entropy=True, exps=kept).total
    exps = x if in_place else mark(torch.empty(3, V, dtype=torch.bfloat16))
    stats = triton_backend.token_stats(x, y, PLAIN, entropy=True, exps=exps)
    # The scale of the exponentials is free.
    yield exps.float() / stats.total[:, None], kept / total[:, None], 1e-5 if in_place else 5e-3


def few_columns_in_place() -> Compared:
    yield from kept_exps(100, in_place=True)


def same_bits() -> Compared:
    """Statistics with and without exponentials, of what is to be invariant."""
    x, y = rows(6, 5003, pad=5)
    x.scatter_(1, y[:, None], 13.0)  # likely targets, whose log-probs show the last bits of sums
    half = torch.zeros(6, 5008, dtype=torch.bfloat16)[:, :5003]
    first, other = (
        triton_backend.token_stats(x, y, PLAIN, entropy=True, exps=exps, invariant=True)
        for exps in (None, half)
    )
    yield from ((a, b, 0.0) for a, b in zip(first[:3], other[:3], strict=True))


def logit_grads() -> Compared:
    for V, dtype, pad in ((1003, torch.float32, 5), (4096, torch.bfloat16, 64)):
        x, y = rows(5, V, dtype, pad)
        grads, expected = row_grads(5), torch.zeros(5, V)
        torch_backend.logit_grads_(x.float(), y, PLAIN, grads, expected)
        out = mark(torch.empty(5, V + pad, dtype=dtype))[:, :V]
        triton_backend.logit_grads_(x, y, PLAIN, grads, out)
        yield out, expected, 1e-5 if dtype == torch.float32 else 5e-3


def banned() -> Compared:
    """Entries at -inf under a softcap: some, all of a row's first block, and a target."""
    capped = LogitTransform(softcap=8.0)
    x, y = rows(4, 5003)
    x[:, ::3], x[1, :3000], x[2, y[2]] = -math.inf, -math.inf, -math.inf
    results = []
    for backend in (triton_backend, torch_backend):
        exps, out = torch.zeros(4, 5003), torch.zeros(4, 5003)
        stats = backend.token_stats(x.clone(), y, capped, entropy=True, exps=exps)
        backend.logit_grads_(x.clone(), y, capped, row_grads_of(stats), out)
        results.append((*stats[:3], exps / stats.total[:, None], out))
    yield from ((mine, true, 1e-5) for mine, true in zip(*results, strict=True))


def row_grads_of(stats: TokenStats) -> RowGrads:
    some = torch.linspace(-1.0, 2.0, len(stats.logps))
    return RowGrads.of(stats, some, some.flip(0))


def rows_move_up() -> Compared:
    """The gradient of row r goes where row r - 1 was: right if programs run one by one."""
    x, y = rows(7, 1003)
    grads, expected = row_grads(6), torch.zeros(6, 1003)
    torch_backend.logit_grads_(x[1:].clone(), y[1:], PLAIN, grads, expected)
    triton_backend.logit_grads_(x[1:], y[1:], PLAIN, grads, x[:-1])
    yield x[:-1], expected, 1e-5


def policy_loss(nan: bool = False) -> Compared:
    N = 1000
    logps, entropy = -torch.rand(N) - 0.5, torch.rand(N)
    mask = torch.rand(N) < 0.7
    if nan:
        logps[mask.nonzero()[7]] = float("nan")
    given = {
        "advantages": torch.randn(N), "weights": mask / mask.sum(), "count": mask.sum().float(),
        "mask": mask, "old_logps": -torch.rand(N) - 0.5,
        "surrogate": "clip", "low": 0.8, "high": 1.2, "entropy_coef": 0.01,
    }  # fmt: skip
    mine = triton_backend.policy_loss(logps, entropy, grad=True, **given)
    truth = exact_policy_loss(logps, entropy, **given)
    yield from ((a, b, 1e-5) for a, b in zip(mine, truth, strict=True))


def policy_loss_of_nan() -> Compared:
    yield from policy_loss(nan=True)


def column_scores() -> Compared:
    x, y = rows(33, 2500, torch.bfloat16, 12)
    grads, blocks = row_grads(33), [slice(i, min(i + 16, 33)) for i in range(0, 33, 16)]
    both = (m.column_scores(x, y, PLAIN, grads, blocks) for m in COLUMN_SCORES)
    yield from ((mine, true, 1e-5) for mine, true in zip(*both, strict=True))


def column_level() -> Compared:
    norms, allowed = torch.rand(2 * 5000)[::2], torch.tensor(100.0)
    mine, true = (m.column_level(norms, allowed, 2) for m in COLUMN_SCORES)
    yield mine, true, 1e-5


def entries() -> Compared:
    chosen = some_entries(40, [0, 200, 1, *torch.randint(0, 9, (20,)).tolist(), 700])
    x, W = (torch.randn(n, 103)[:, :50] for n in (24, 40))
    begin, factors = torch.randn(len(chosen)), torch.randn(len(chosen))
    out = begin.clone()
    triton_backend.entry_dots(x, W, chosen, out)
    yield out, begin.double() + (x[chosen.tokens] * W[chosen.ids]).double().sum(1), 1e-5
    added = factors[:, None] * W[chosen.ids]
    for into in (None, torch.randn(24, 103)[:, :50]):
        sums = torch.zeros(24, 50) if into is None else into.clone()
        sums.index_add_(0, chosen.tokens, added)
        given = (factors, chosen.ids, chosen.offsets, W, torch.float32, into)
        yield triton_backend.segment_sums(*given), sums, 1e-5
    stats = [TokenStats(*torch.zeros(3, 24)) for _ in range(2)]
    logits = 3 * torch.randn(len(chosen))
    for backend, into in zip((triton_backend, torch_backend), stats, strict=True):
        backend.entry_stats(logits, chosen, PLAIN, into)
    yield from ((mine, true, 1e-5) for mine, true in zip(stats[0][:3], stats[1][:3], strict=True))


def choose(programs: list[tuple[int, ...]]) -> None:
    EmulatedDriver.settings.blocks = lambda grid: torch.tensor(programs).numpy()


def real_size() -> Compared:
    """The chunk of a big model, of which some programs run: memory is taken by their rows alone."""
    N, V = 16_384, 151_936
    some = torch.tensor([0, 14_134, N - 1])
    x, out = (untouched(N, V, dtype=torch.bfloat16) for _ in range(2))
    y, grads = torch.randint(V, (N,)), row_grads(N)
    x[some] = (3 * torch.randn(len(some), V)).bfloat16()
    choose([(row, 0, 0) for row in some.tolist()])
    truth = torch_backend.token_stats(x[some], y[some], PLAIN, entropy=True)
    stats = triton_backend.token_stats(x, y, PLAIN, entropy=True)
    yield stats.logps[some], truth.logps, 1e-5
    expected = torch.zeros(len(some), V)
    torch_backend.logit_grads_(x[some].float(), y[some], PLAIN, grads.at(some), expected)
    triton_backend.logit_grads_(x, y, PLAIN, grads, out)
    yield out[some], expected, 5e-3
    blocks, last = [slice(i, i + 16) for i in range(0, N, 16)], slice(N - 16, N)
    x[last] = (3 * torch.randn(16, V)).bfloat16()
    choose([(3, len(blocks) - 1, 0)])
    sums = triton_column_scores.column_scores(x, y, PLAIN, grads, blocks)[1]
    true = torch_column_scores.column_scores(
        x[last], y[last], PLAIN, grads.at(last), [slice(0, 16)]
    )[1]
    yield sums[-1, 3072:4096], true[0, 3072:4096], 1e-5


def real_entries() -> Compared:
    """Sums to tokens beyond 2^31 elements."""
    N, K, E = 300_000, 8192, 4
    out, W = untouched(N, K, dtype=torch.bfloat16), torch.randn(9, K)
    offsets = torch.zeros(N + 1, dtype=torch.int64)
    offsets[-1] = E
    ids, factors = torch.randint(9, (E,)), torch.randn(E)
    choose([(N - 1, tile, 0) for tile in range(K // 1024)])
    out[-1] = 0.0
    triton_backend.segment_sums(factors, ids, offsets, W, torch.bfloat16, out)
    yield out[-1], (factors[:, None] * W[ids]).sum(0), 5e-3


CHECKS = (
    token_stats, odd_rows, second_sweep, kept_exps, few_columns_in_place, same_bits, logit_grads,
    banned, rows_move_up, policy_loss, policy_loss_of_nan, column_scores, column_level, entries,
    real_size, real_entries,
)  # fmt: skip


def off_by(mine: Tensor, true: Tensor) -> float:
    """The largest difference, relative to the largest value; inf where one alone is finite."""
    a, b = mine.double(), true.double()
    if a.isfinite().ne(b.isfinite()).any():
        return math.inf
    finite = b.isfinite()
    return float((a - b)[finite].abs().max() / b[finite].abs().max()) if finite.any() else 0.0


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.kernel_checks", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("check", choices=[check.__name__ for check in CHECKS])
    parser.add_argument("--edit", help="a pattern of the PTX, => and what replaces it once")
    parser.add_argument("--at", type=int, default=0, help="which match is replaced (default: 0)")
    args = parser.parse_args(argv)
    edits = 0

    def edit(ptx: str) -> str:
        nonlocal edits
        old, new = args.edit.split("=>")
        places = list(re.finditer(old, ptx, flags=re.M))[args.at :]
        edits += bool(places)
        for place in places[:1]:
            ptx = ptx[: place.start()] + place.expand(new) + ptx[place.end() :]
        return ptx

    settings = EmulatedDriver.settings
    settings.edit = edit if args.edit else None
    torch.manual_seed(0)
    if not args.check.startswith("real_"):
        mark_allocations()  # that would touch all of a tensor
    check = next(check for check in CHECKS if check.__name__ == args.check)
    wrong, raised = 0.0, ""
    try:
        for mine, true, allowed in check():
            off = off_by(mine, true)
            wrong = max(wrong, off if not off <= allowed else 0.0)
    except Exception as error:  # what a damage may come to
        raised = type(error).__name__
    if args.edit and not edits:
        raise ValueError(f"--edit: expected {args.edit!r} to fit a kernel's PTX")
    found = sorted({finding.kind for finding in settings.findings})
    print(json.dumps({"off": wrong, "raised": raised, "found": found}))


if __name__ == "__main__":
    main()

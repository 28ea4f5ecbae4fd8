"""Barriers of the emitted PTX, removed one by one: nearly all removals are found to be races."""

import re
from functools import partial

import pytest
import torch

from grpo_kernels.backends import LogitTransform, RowGrads, triton_backend
from grpo_kernels.experimental import triton_column_scores
from tests.ptx import EmulatedDriver, Settings
from tests.tools.kernel_checks import some_entries

BARRIER = re.compile(r"^\s*bar\.(?:warp\.)?sync\b[^;]*;.*$", re.M)
PLAIN = LogitTransform()


def launches():
    x, y = 3 * torch.randn(3, 5003), torch.randint(5003, (3,))
    far = x.clone()
    far[1, 3000] = 200.0  # out of the first anchor's reach: a second sweep
    half, some = torch.zeros(3, 5003, dtype=torch.bfloat16), torch.randn(6, 3)
    grads = RowGrads(5 + some[0].abs(), some[1], some[1], some[2], some[3].abs(), some[4])
    entries, W, h = some_entries(9, [200, 3, 0, 40]), torch.randn(9, 50), torch.randn(4, 50)
    stats = partial(triton_backend.token_stats, targets=y, transform=PLAIN, entropy=True)

    def in_place():
        z = far.clone()
        return *stats(z, exps=z), z

    def dots():
        out = torch.zeros(len(entries))
        triton_backend.entry_dots(h, W, entries, out)
        return (out,)

    def sums(dtype):
        torch.manual_seed(1)
        factors = torch.randn(len(entries))
        return (triton_backend.segment_sums(
            factors, entries.ids, entries.offsets, W.to(dtype), dtype, None),)  # fmt: skip

    def to_half():
        out = torch.zeros_like(half)
        triton_backend.logit_grads_(x, y, PLAIN, grads, out)
        return (out,)

    def loss():
        return triton_backend.policy_loss(
            some[0].repeat(100), None, advantages=some[1].repeat(100), weights=some[2].repeat(100),
            count=torch.tensor(3.0), grad=True, surrogate="clip", low=0.8, high=1.2,
        )  # fmt: skip

    return {
        "token_stats": lambda: stats(far),
        "token_stats, exps in bf16": lambda: (*stats(far, exps=half), half.clone()),
        "token_stats, invariant": lambda: stats(far, invariant=True),
        "token_stats, in place": in_place,
        "logit_grads": to_half,
        "policy_loss": loss,
        "column_scores": lambda: triton_column_scores.column_scores(
            x, y, PLAIN, grads, [slice(0, 3)]
        ),
        "column_level": lambda: (
            triton_column_scores.column_level(x[0].abs(), torch.tensor(9.0), 2),
        ),
        "entry_dots": dots,
        "segment_sums": lambda: sums(torch.float32),
        "segment_sums, bf16": lambda: sums(torch.bfloat16),
    }  # fmt: skip


class Without:
    """Edits PTX: barrier `number`, from 0, is a comment; counts them all."""

    def __init__(self, number):
        self.number, self.count, self.line = number, 0, 0

    def __call__(self, ptx):
        found = list(BARRIER.finditer(ptx))
        # A call may launch several kernels, whose barriers are numbered through.
        place = self.number - self.count
        self.count += len(found)
        if not 0 <= place < len(found):
            return ptx
        start = found[place].start()
        self.line = ptx.count("\n", 0, start) + 1
        return f"{ptx[:start]}//{ptx[start:]}"


def bits(results):
    return [x.clone().contiguous().view(torch.uint8) for x in results if x is not None and x.dim()]


@pytest.mark.slow
def test_barriers_that_are_missing_are_seen(monkeypatch):
    torch.manual_seed(0)
    barriers, unseen = 0, []
    for name, call in launches().items():
        # Threads of one warp are ordered by barriers alone.
        settings = Settings(strict=False, strict_warps=name.startswith("segment_sums"))
        monkeypatch.setattr(EmulatedDriver, "settings", settings)
        settings.edit = Without(-1)
        expected = bits(call())
        assert not settings.findings, name
        count = settings.edit.count
        for number in range(count):
            settings.edit = Without(number)
            call()
            if not settings.findings:
                unseen.append((name, number, settings.edit.line))
                # Nothing needs it: the results are the same, whichever warp is first.
                for order in ("rising", "falling", 3):
                    settings.order = order
                    pairs = zip(bits(call()), expected, strict=True)
                    assert all(torch.equal(a, b) for a, b in pairs), (name, number, order)
                settings.order = "together"
            settings.findings.clear()
        settings.edit = None
        barriers += count
        print(f"{name}: {count} barriers")
    print(f"{len(unseen)} of {barriers} are not needed: {unseen}")
    assert barriers > 60 and len(unseen) <= 0.05 * barriers

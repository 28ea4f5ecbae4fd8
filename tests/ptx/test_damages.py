"""The emitted PTX is damaged, and each of its barriers removed: findings, or other results."""

import re
from functools import partial

import pytest
import torch
import triton

from grpo_kernels.kernels import Entries, LogitTransform, RowGrads, triton_backend
from tests.helpers.policy_losses import exact_policy_loss
from tests.ptx import EmulatedDriver, Settings

BARRIER = re.compile(r"^\s*bar\.(?:warp\.)?sync\b[^;]*;.*$", re.M)
PLAIN = LogitTransform()


def some_entries(V, counts):
    tokens = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    ids = torch.randint(0, V, (len(tokens),))
    offsets = torch.nn.functional.pad(torch.tensor(counts).cumsum(0), (1, 0))
    places = torch.zeros(len(counts), dtype=torch.int64)
    return Entries(ids, tokens, offsets, places, ids.argsort(stable=True))


def launches(pad=0):
    """Calls of every kernel; rows of 5,003 logits are loaded in vectors if `pad` is 5."""
    x, far = ((3 * torch.randn(3, 5003 + pad))[:, :5003] for _ in range(2))
    y = torch.randint(5003, (3,))
    far[1, 3010] = 200.0  # out of the first anchor's reach: a second sweep
    half = torch.zeros(3, 5003 + pad, dtype=torch.bfloat16)[:, :5003]
    some = torch.randn(6, 3)
    grads = RowGrads(5 + some[0].abs(), some[1], some[2], some[3].abs(), some[4])
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
            factors, entries.ids, entries.offsets, W.to(dtype), dtype),)  # fmt: skip

    def to_half():
        triton_backend.logit_grads_(x, y, PLAIN, grads, half.zero_())
        return (half.clone(),)

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
        "entry_dots": dots,
        "segment_sums": lambda: sums(torch.float32),
        "segment_sums, bf16": lambda: sums(torch.bfloat16),
    }  # fmt: skip


# Others may guard no store to shared memory, or find a maximum without shuffles.
WRITTEN_FOR = ("3.7.1", 90)
# fault: (launch, pattern in its PTX, replacement, index of the match)
DAMAGES = {
    "a sum's shuffle has the wrong distance": (
        "token_stats", r"(shfl\.sync\.bfly.*), 16, 31(?=(?:.*\n){1,5}.*add\.)", r"\1, 8, 31", 0),
    "a maximum's shuffle has the wrong distance": (
        "token_stats", r"(shfl\.sync\.bfly.*), 16, 31(?=(?:.*\n){1,5}.*max\.)", r"\1, 8, 31", 2),
    "a barrier is for some threads only": (
        "token_stats", r"(@%p\d+) (st\.shared.*\n(?:.*\n){0,3}?\s*)(bar\.sync.*)",
        r"\1 \2\1 bra $L_past;\n\3\n$L_past:", 0),
    "a store to shared memory is 4 bytes off": (
        "token_stats", r"(st\.shared\.\S+\s+\[ ?%r\d+)( \+ 0)?", r"\1 + 4", 0),
    "a load of shared memory is 4 bytes off": (
        "token_stats", r"(ld\.shared\S+\s+%r\d+, \[(global_smem|%r\d+))\]", r"\1+4]", 2),
    "a store to shared memory is dropped": (
        "token_stats", r"^\s*@?\S* ?st\.shared.*$", "", 0),
    "the guard of a store to shared memory is dropped": (
        "token_stats", r"@%p\d+ (st\.shared)", r"\1", 1),
    "a vector is stored 4 bytes off": (
        "logit_grads", r"(st\.global\.v4\.b32 \[ %rd\d+) \+ 0", r"\1 + 4", 0),
    "a vector is loaded 16 bytes off": (
        "token_stats", r"(ld\.global\.v4\.b32 \{[^}]*\}, \[ %rd\d+) \+ 0", r"\1 + 16", 2),
    "the guard of a store is dropped": ("logit_grads", r"@%p\d+ (st\.global)", r"\1", 0),
    "the guard of a load is dropped": ("policy_loss", r"@%p\d+ (ld\.global)", r"\1", 1),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGES)
def test_damages_are_seen(what, monkeypatch, request):
    name, pattern, new, at = DAMAGES[what]
    settings, edited = Settings(strict=False), []

    def edit(ptx):
        for place in list(re.finditer(pattern, ptx, re.M))[at : at + 1]:
            edited.append(what)
            return ptx[: place.start()] + place.expand(new) + ptx[place.end() :]
        return ptx

    monkeypatch.setattr(EmulatedDriver, "settings", settings)
    torch.manual_seed(0)
    call = launches(pad=5)[name]
    expected = bits(call())
    assert not settings.findings
    settings.edit = edit
    same = all(torch.equal(a, b) for a, b in zip(bits(call()), expected, strict=True))
    compiler = triton.__version__, request.config.getoption("--ptx-arch")
    if not edited and compiler != WRITTEN_FOR:
        pytest.skip(f"nothing like it is in the PTX of {compiler}")
    assert edited and (settings.findings or not same)


class Without:
    """Edits PTX: barrier `number`, from 0, is a comment; counts them all."""

    def __init__(self, number):
        self.number, self.count, self.line = number, 0, 0

    def __call__(self, ptx):
        barriers = list(BARRIER.finditer(ptx))
        # A call may launch several kernels, whose barriers are numbered through.
        place = self.number - self.count
        self.count += len(barriers)
        if not 0 <= place < len(barriers):
            return ptx
        start = barriers[place].start()
        self.line = ptx.count("\n", 0, start) + 1
        return f"{ptx[:start]}//{ptx[start:]}"


def bits(results):
    return [x.clone().contiguous().view(torch.uint8) for x in results if x is not None and x.dim()]


def test_a_policy_loss_of_nan():
    """A minimum or a maximum that hides NaN would train on it."""
    torch.manual_seed(0)
    N = 300
    logps, entropy, mask = -torch.rand(N) - 0.5, torch.rand(N), torch.rand(N) < 0.7
    logps[mask.nonzero()[7]] = float("nan")
    kwargs = {
        "advantages": torch.randn(N), "weights": mask / mask.sum(), "count": mask.sum().float(),
        "mask": mask, "old_logps": -torch.rand(N) - 0.5,
        "surrogate": "clip", "low": 0.8, "high": 1.2, "entropy_coef": 0.01,
    }  # fmt: skip
    result = triton_backend.policy_loss(logps, entropy, grad=True, **kwargs)
    truth = exact_policy_loss(logps, entropy, **kwargs)
    for a, b in zip(result, truth, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-5, atol=1e-5, equal_nan=True)


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

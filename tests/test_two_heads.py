"""Divergences of two models where digits run out: equal, sure, far apart, banned ids, no numbers.

Formulas, and the calls beside every option, are in `test_pairs.py`.
"""

import pytest
import torch

from grpo_kernels import Reference, fused_distillation_loss
from grpo_kernels.kernels import LogitTransform, pairs, triton_pairs
from grpo_kernels.kernels.divergences import DIVERGENCES
from grpo_kernels.kernels.pair_stats import PairStats

BACKENDS = {"torch": pairs, "triton": triton_pairs}
NAN, INF = float("nan"), float("inf")
NONE = LogitTransform()


def truth(z, t, kind, beta):
    """Divergence of each row, and its gradient by z, in float64."""
    z, t = z.double().requires_grad_(), t.double()
    s, t = z.log_softmax(1), t.log_softmax(1)

    def kl(a, b):
        return (a.exp() * (a - b).masked_fill(a == -INF, 0.0)).sum(1)

    m = (beta * t.exp() + (1 - beta) * s.exp()).log()
    divergence = {
        "reverse": lambda: kl(s, t),
        "forward": lambda: kl(t, s),
        "jsd": lambda: beta * kl(t, m) + (1 - beta) * kl(s, m),
    }[kind]()
    return divergence.detach(), torch.autograd.grad(divergence.sum(), z)[0]


def on_kernels(module, z, t, kind, transforms=(NONE, NONE), targets=None, merged=False):
    """Statistics, and the gradient by the raw logits.

    Statistics that ranks have `merged` lack digits of the shift and of the anchors.
    """
    targets = torch.zeros(len(z), dtype=torch.int64) if targets is None else targets
    divergence, stats, out = DIVERGENCES[kind](0.3), PairStats.empty(z), torch.empty_like(z)
    module.pair_stats(z, t, targets, *transforms, stats)
    if merged:
        stats.shift.copy_(stats.logsumexp - stats.ref_logsumexp)
        module.set_anchors(stats)
    module.divergences(z, t, *transforms, stats, divergence=divergence)
    rest = stats, None, torch.ones(len(z)), out
    module.pair_grads_(z.clone(), t, targets, *transforms, *rest, divergence=divergence)
    return stats, out


every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_kind = pytest.mark.parametrize("kind", DIVERGENCES)


def logits(apart, rows=6, V=1203):
    """Two models' peaked logits, `apart` from each other: a number, or one per row."""
    g = torch.Generator().manual_seed(0)
    z = 4 * torch.randn(rows, V, generator=g)
    z[:, 5] += 9
    return z, z + apart * torch.randn(rows, V, generator=g)


def peaked(peaks, V=1500):
    """Flat logits of two models, a row per pair of peaks, of `(column, height)`; None: flat."""
    both = torch.randn(2, len(peaks), V, generator=torch.Generator().manual_seed(3))
    for row, pair in enumerate(peaks):
        for x, peak in zip(both, pair, strict=True):
            if peak is not None:
                x[row, peak[0]] += peak[1]
    return both


def errors_of(d, gradient):
    return (d - gradient).norm(dim=1) / gradient.norm(dim=1)


def expect_divergence(stats, divergence, rtol=1e-5):
    torch.testing.assert_close(stats.divergence.double(), divergence, rtol=rtol, atol=0.0)


@pytest.mark.parametrize(
    ("backend", "V", "limit"),
    # Of 151,936 probabilities float32 has three digits fewer for a part of 1e-4.
    (("triton", 1203, 3e-5), ("torch", 151_936, 3e-4)),
)
@every_kind
def test_models_that_agree_keep_their_digits(kind, backend, V, limit):
    """Rows that agree lie beside rows that do not."""
    apart = torch.tensor([3.0, 1e-3, 0.3, 1e-2, 1e-4, 1.0, 2.0])[:, None]
    z, t = logits(apart, rows=7, V=V)
    divergence, gradient = truth(z, t, kind, 0.3)
    stats, d = on_kernels(BACKENDS[backend], z, t, kind)
    expect_divergence(stats, divergence, 1e-4)
    errors = errors_of(d, gradient)
    assert errors.max() <= limit and errors[[0, 2, 5, 6]].max() <= 3e-5, errors


def ruled_out_by_one():
    """The reference alone rules an entry out, of which float32 has no probability."""
    z, t = logits(0.5, rows=2)
    z[0, 7], t[0, 7] = -120.0, -INF
    return z, t


def banned_in_the_first_block():
    """The policy alone bans the first block, and in a row the reference another id."""
    z, t = peaked([(None, (1200, 57))] * 4)
    z[:, :1024], z[:, 1024:] = -INF, z[:, 1024:] - 55
    t[0, 1300] = -INF
    return z, t


# Both models' logits, and the divergences that are finite as computed.
EXTREMES = {
    # Peaks in one model, in both, at different ids: sums that differ by up to e^70.
    "peaks": (lambda: peaked([
        ((1200, 12), None), ((1200, 15), None), (None, (1200, 12)), (None, (1200, 15)),
        ((1200, 25), (5, 10)), ((5, 10), (1200, 25)), ((1200, 50), (1300, 50)),
        ((1200, 70), (1300, 14)), ((5, 12), (1300, 70)), ((700, 8), (1300, 12)),
        ((1200, 14), (1200, 8)), ((1200, 8), (1200, 14)), ((1200, 500), (1300, 500)),
    ]), tuple(DIVERGENCES)),
    "large": (lambda: [x + 1000.0 for x in logits(2.0, V=300)], ("jsd",)),
    # The sum of the forward KL runs over the teacher; all but e^-48 of the student is elsewhere.
    "late": (lambda: peaked([((9000, 60), (5, 10))], V=9109), ("forward",)),
    "ruled_out": (ruled_out_by_one, ("reverse",)),
    "banned": (banned_in_the_first_block, ("reverse",)),
}  # fmt: skip


@every_backend
@pytest.mark.parametrize(
    ("case", "kind", "merged"),
    [
        (case, kind, merged)
        for case, (_, kinds) in EXTREMES.items()
        for kind in kinds
        for merged in ((False, True) if (case, kind) == ("peaks", "jsd") else (False,))
    ],
)
def test_models_that_are_far_apart(case, kind, merged, backend):
    z, t = EXTREMES[case][0]()
    divergence, gradient = truth(z, t if case == "banned" else t.clamp(min=-120.0), kind, 0.3)
    stats, d = on_kernels(BACKENDS[backend], z, t, kind, merged=merged)
    expect_divergence(stats, divergence)
    finite = divergence.isfinite()
    limit = 1e-4 if kind == "reverse" and case != "peaks" else 2e-5
    rounding = 4e-6 * divergence[finite].clamp(min=1.0)  # of h
    errors, norms = (d - gradient)[finite].norm(dim=1), gradient[finite].norm(dim=1)
    assert (errors <= limit * norms + rounding).all(), errors


@every_backend
@every_kind
def test_students_that_are_nearly_certain(kind, backend, temperature=0.7):
    """The likely id's gradient is the small difference of h and its mean, each rounded alike."""
    z, t = temperature * peaked([((5, 18), None)] * 3 + [((1200, 18), None)] * 2)
    t = z + 0.5 * t
    for rows, place in ((slice(3), 5), (slice(3, 5), 1200)):
        t[rows, place] -= 2 * temperature
    transforms = (LogitTransform(temperature=temperature),) * 2
    divergence, gradient = truth(z / temperature, t / temperature, kind, 0.3)
    assert divergence.min() > 1e-9 and divergence.max() < 0.02
    stats, d = on_kernels(BACKENDS[backend], z, t, kind, transforms=transforms)
    expect_divergence(stats, divergence, 1e-4)
    errors = errors_of(d * temperature, gradient)
    assert errors.max() <= 1e-3 and errors.median() <= 3e-5, errors


@every_backend
@every_kind
def test_equal_models(kind, backend):
    z, _ = logits(0.0)
    stats, d = on_kernels(BACKENDS[backend], z, z, kind)
    # Compiled, the one's products may be fused with its sums, and the other's not.
    assert stats.divergence.max() <= 1e-13 and d.abs().max() <= 3e-7
    assert backend == "triton" or not (stats.divergence.any() or d.any())


@every_backend
@every_kind
def test_limits(kind, backend, temperature=0.5):
    """-inf in both, in the policy, in the reference: exact, infinite where it is, never NaN."""
    z, t = logits(0.5, rows=4)
    z[1:3, 7] = t[1, 7] = t[3, 7] = -INF
    if kind == "reverse":  # beside an infinite mean
        z[3, 9] = -INF
    transforms = LogitTransform(temperature=temperature), NONE
    stats, d = on_kernels(BACKENDS[backend], z * temperature, t, kind, transforms=transforms)
    d, infinite = d * temperature, {"reverse": 3, "forward": 2}.get(kind)
    assert not d.isnan().any()
    near = [x.masked_fill(x == -INF, -60.0) for x in (z, t)]
    for entropy, x in zip((stats.entropy, stats.ref_entropy), near, strict=True):
        p = x.double().softmax(1)
        torch.testing.assert_close(entropy.double(), -(p * p.log()).sum(1), rtol=1e-4, atol=1e-5)
    divergence, gradient = truth(*near, kind, 0.3)
    if infinite is not None:
        divergence[infinite] = INF
    expect_divergence(stats, divergence, 3e-5)
    if kind == "reverse":  # towards the entry, away from all others
        signs = torch.where(torch.arange(1203) == 7, INF, -INF)
        assert (d[3] == signs)[z[3] > -20].all()
    elif kind == "forward":
        gradient[2] = z[2].softmax(0) - t[2].softmax(0)
    finite = [row for row in range(4) if kind != "reverse" or row != 3]
    assert errors_of(d[finite], gradient[finite]).max() <= 1e-4


@every_backend
@every_kind
def test_logits_that_are_no_numbers(kind, backend):
    """A loss of NaN has a gradient of NaN: otherwise an optimizer would step on it."""
    z, t = logits(1.0, rows=6)
    divergence, gradient = truth(z, t, kind, 0.3)
    z[1, 700] = t[2, 700] = NAN
    z[3, 700] = t[4, 700] = INF
    stats, d = on_kernels(BACKENDS[backend], z, t, kind)
    assert stats.divergence[1:5].isnan().all() and not d[1:5].isfinite().any()
    torch.testing.assert_close(stats.divergence[::5].double(), divergence[::5], rtol=1e-5, atol=0)
    assert errors_of(d[::5], gradient[::5]).max() <= 1e-4


@every_backend
def test_statistics(backend):
    """Both models' log-probs, entropies and likeliest ids; rows far from their first block."""
    z, t = logits(0.3, rows=5, V=2500)
    z[1, 2400] += 150.0  # beyond the reach of the first anchor
    t[2, 2400] += 150.0
    targets = torch.tensor([5, 2400, 9, 1, -1])
    stats, _ = on_kernels(BACKENDS[backend], z, t, "reverse", targets=targets)
    for x, model_stats in ((z, stats.policy_stats), (t, stats.reference_stats)):
        log_p = x.double().log_softmax(1)
        target_logps = log_p.gather(1, targets.clamp(min=0)[:, None])[:, 0]
        target_logps[4] = -INF
        torch.testing.assert_close(model_stats.logps.double(), target_logps, rtol=1e-5, atol=1e-5)
        lse = x.double().logsumexp(1)
        torch.testing.assert_close(model_stats.logsumexp.double(), lse, rtol=1e-6, atol=1e-5)
        entropy = -(log_p.exp() * log_p).sum(1)
        torch.testing.assert_close(model_stats.entropy.double(), entropy, rtol=1e-4, atol=1e-5)
    agrees = z.argmax(1) == t.argmax(1)
    assert ((stats.ref_at_peak == stats.ref_peak) == agrees).all() and 0 < agrees.sum() < 5


# The calls


@pytest.mark.parametrize(("shape", "num_items"), (((2, 3), torch.zeros(())), ((3, 0), None)))
def test_no_tokens(shape, num_items):
    """Loss, metrics and gradients are 0, also where the denominator is; a reference has none."""
    sizes = ((*shape, 4), (9, 4), (*shape, 3), (9, 3))
    hidden, weight, *other = (torch.randn(x, requires_grad=True) for x in sizes)
    reference = Reference(*other)
    mask = torch.zeros(shape)
    out = fused_distillation_loss(hidden, weight, reference, mask, num_items=num_items)
    out.loss.backward()
    assert out.loss == 0 and not any(out.metrics.values())
    assert not hidden.grad.any() and not weight.grad.any()
    assert all(x.grad is None for x in other)

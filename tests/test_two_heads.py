"""Two models' heads in one pass: divergences, the exact KL of the loss, and what they refuse."""

import pytest
import torch

from grpo_kernels import (
    Execution,
    GRPOLossConfig,
    LMHead,
    Reference,
    fused_distillation_loss,
    fused_grpo_loss,
    grpo_loss,
    linear_logprobs,
)
from grpo_kernels import reference as exact
from grpo_kernels.kernels import LogitTransform, RowGrads, StatGrads, pairs, triton_pairs
from grpo_kernels.kernels.divergences import DIVERGENCES, Divergence
from grpo_kernels.kernels.pair_stats import PairStats
from tests.helpers.batches import make_batch, relative_error

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


def on_kernels(module, z, t, kind, beta=0.3, transforms=(NONE, NONE), targets=None, grads=None):
    """Statistics, and the gradient by the raw logits."""
    targets = torch.zeros(len(z), dtype=torch.int64) if targets is None else targets
    z, t, stats = z.clone(), t.clone(), PairStats.empty(z)
    divergence = DIVERGENCES[kind](beta)
    module.pair_stats(z, t, targets, *transforms, stats, divergence=divergence)
    out, ones = torch.empty_like(z), torch.ones(len(z))
    grads = None if grads is None else grads(stats)
    module.pair_grads_(
        z.clone(), t, targets, *transforms, stats, grads, ones, out, divergence=divergence
    )
    again = PairStats.empty(z)
    if module.pair_stats(
        z, t, targets, *transforms, again, divergence=divergence, store_slopes=True
    ):
        torch.testing.assert_close(again.values, stats.values, equal_nan=True)
        stored = t * pairs.slope_factors(transforms[0], ones, divergence)[:, None]
        if grads is not None:
            rest = transforms[0], grads, ones, stored
            module.stored_grads_(z, t, targets, *rest, divergence=divergence)
        torch.testing.assert_close(stored, out, rtol=1e-4, atol=1e-6, equal_nan=True)
    return stats, out


def logits(apart, rows=6, V=1203, seed=0):
    """Two models' peaked logits, `apart` from each other: a number, or one per row."""
    g = torch.Generator().manual_seed(seed)
    z = 4 * torch.randn(rows, V, generator=g)
    z[:, 5] += 9
    return z, z + apart * torch.randn(rows, V, generator=g)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("apart", [3.0, 1e-2, 1e-4])
def test_models_that_agree_keep_their_digits(kind, apart, backend):
    z, t = logits(apart)
    divergence, gradient = truth(z, t, kind, 0.3)
    stats, d = on_kernels(BACKENDS[backend], z, t, kind)
    torch.testing.assert_close(stats.divergence.double(), divergence, rtol=1e-4, atol=0.0)
    assert max(map(relative_error, d, gradient)) <= 3e-5


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_vocabulary_of_a_model(kind):
    """Rows that agree lie beside rows that do not."""
    apart = torch.tensor([3.0, 1e-3, 0.3, 1e-2, 1e-4, 1.0, 2.0])[:, None]
    z, t = logits(apart, rows=7, V=151_936)
    stats, d = on_kernels(pairs, z, t, kind)
    value, grad = truth(z, t, kind, 0.3)
    torch.testing.assert_close(stats.divergence.double(), value, rtol=1e-4, atol=0.0)
    errors = (d - grad).norm(dim=1) / grad.norm(dim=1)
    assert errors.max() <= 3e-4, errors  # float32 has three digits fewer for a part of 1e-4
    assert errors[[0, 2, 5, 6]].max() <= 3e-5, errors


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_student_that_is_certain_of_a_late_id(backend):
    """The sum of the forward KL runs over the teacher, whose mass is far from the student's."""
    g = torch.Generator().manual_seed(2)
    z, t = (torch.randn(1, 100_109, generator=g) for _ in range(2))
    z[:, 100_000] += 60.0  # all but e^-48 of the student's mass
    t[:, 5] += 10.0
    divergence, gradient = truth(z, t, "forward", 0.3)
    assert divergence > 40
    for call in (on_kernels, on_ranks):
        stats, d = call(BACKENDS[backend], z, t, "forward")
        torch.testing.assert_close(stats.divergence.double(), divergence, rtol=1e-5, atol=0.0)
        assert relative_error(d, gradient) <= 3e-5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_confident_models(kind, backend):
    """A KL of 1e-9, of two models that put all but a billionth on the same token."""
    z = torch.randn(3, 700, generator=torch.Generator().manual_seed(1))
    z[:, 3] += 27
    t = z.clone()
    t[0, :3] += 1.0
    t[1, 3] += 0.5
    t[2, 9] += 3.0
    divergence, gradient = truth(z, t, kind, 0.3)
    assert divergence.max() < 1e-8 and divergence.min() > 1e-13
    stats, d = on_kernels(BACKENDS[backend], z, t, kind)
    torch.testing.assert_close(stats.divergence.double(), divergence, rtol=1e-4, atol=0.0)
    # Entries with hardly any probability; the likely entry's error is its rounding.
    other_ids = torch.arange(700) != 3
    assert relative_error(d[:, other_ids], gradient[:, other_ids]) <= 1e-3
    assert (d[:, 3] - gradient[:, 3]).abs().max() <= 1e-7


def peaked(*peaks, rows=4, V=1500):
    """Two models' flat logits, with a peak of `(column, height)` in each; None: flat."""
    g = torch.Generator().manual_seed(3)
    both = [torch.randn(rows, V, generator=g) for _ in peaks]
    for x, peak in zip(both, peaks, strict=True):
        if peak is not None:
            x[:, peak[0]] += peak[1]
    return both


def on_ranks(module, z, t, kind):
    """Results like those of `of_kernels`, by the way of ranks: from merged statistics."""
    targets, stats, out = torch.zeros(len(z), dtype=torch.int64), PairStats.empty(z), z.clone()
    divergence = DIVERGENCES[kind](0.3)
    module.pair_stats(z, t, targets, NONE, NONE, stats, divergence=None)
    stats.shift.copy_(stats.logsumexp - stats.ref_logsumexp)
    stats.set_zero_anchors()
    module.divergences(z, t, NONE, NONE, stats, divergence=divergence)
    ones = torch.ones(len(z))
    rest = stats, None, ones, out
    module.pair_grads_(out, t, targets, NONE, NONE, *rest, divergence=divergence)
    return stats, out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("call", [on_kernels, on_ranks])
def test_peaks_beyond_the_first_block(call, kind, backend):
    """Peaks in one model, in both, at different ids: sums that differ by up to e^70."""
    for peaks in (
        ((1200, 12), None), ((1200, 15), None), (None, (1200, 12)), (None, (1200, 15)),
        ((1200, 25), (5, 10)), ((5, 10), (1200, 25)), ((1200, 50), (1300, 50)),
        ((1200, 70), (1300, 14)), ((5, 12), (1300, 70)), ((700, 8), (1300, 12)),
        ((1200, 14), (1200, 8)), ((1200, 8), (1200, 14)),
    ):  # fmt: skip
        z, t = peaked(*peaks)
        divergence, gradient = truth(z, t, kind, 0.3)
        stats, d = call(BACKENDS[backend], z, t, kind)
        torch.testing.assert_close(stats.divergence.double(), divergence, rtol=1e-5, atol=0.0)
        errors = (d - gradient).norm(dim=1)
        rounding = 4e-6 * divergence.clamp(min=1.0)  # of h
        assert (errors <= 2e-5 * gradient.norm(dim=1) + rounding).all(), (peaks, errors)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("place", [5, 1200])
def test_students_that_are_nearly_certain(place, temperature, kind, backend):
    """The likely id's gradient is the small difference of h and its mean, each rounded alike."""
    z, t = (temperature * x for x in peaked((place, 18), None, rows=16))
    t = z + 0.5 * t
    t[:, place] -= 2 * temperature
    transform = LogitTransform(temperature=temperature)
    divergence, gradient = truth(z / temperature, t / temperature, kind, 0.3)
    assert divergence.min() > 1e-9 and divergence.max() < 0.02
    stats, d = on_kernels(BACKENDS[backend], z, t, kind, transforms=(transform, transform))
    torch.testing.assert_close(stats.divergence.double(), divergence, rtol=1e-4, atol=0.0)
    errors = (d * temperature - gradient).norm(dim=1) / gradient.norm(dim=1)
    assert errors.max() <= 1e-3 and errors.median() <= 3e-5, errors


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_equal_models(kind, backend):
    z, _ = logits(0.0)
    stats, d = on_kernels(BACKENDS[backend], z, z, kind)
    # Compiled, the one's products may be fused with its sums, and the other's not.
    assert stats.divergence.max() <= 1e-13 and d.abs().max() <= 3e-7
    assert backend == "triton" or not (stats.divergence.any() or d.any())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])  # of the policy; 1 of the reference
def test_limits(temperature, kind, backend):
    """-inf in both, in the policy, in the reference: exact, infinite where it is, never NaN."""
    z, t = logits(0.5, rows=4)
    z[1:3, 7] = t[1, 7] = t[3, 7] = -INF
    transforms = LogitTransform(temperature=temperature), NONE
    stats, d = on_kernels(BACKENDS[backend], z * temperature, t, kind, transforms=transforms)
    d = d * temperature
    infinite = {"reverse": 3, "forward": 2}.get(kind)
    for row in range(4):
        if row == infinite:
            assert stats.divergence[row] == INF
            if kind == "reverse":  # towards the entry, away from all others
                signs = torch.where(torch.arange(1203) == 7, INF, -INF)
                assert (d[row] == signs)[z[row] > -20].all()
            else:
                assert relative_error(d[row], z[row].softmax(0) - t[row].softmax(0)) <= 1e-4
            continue
        near = (x[row, None].masked_fill(x[row, None] == -INF, -60.0) for x in (z, t))
        divergence, gradient = truth(*near, kind, 0.3)
        torch.testing.assert_close(stats.divergence[row].double(), divergence[0], rtol=3e-5, atol=0)
        assert relative_error(d[row], gradient[0]) <= 1e-4
    assert not d.isnan().any() and not stats.divergence.isnan().any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_whose_quotient_is_no_float32(backend):
    """Infinite for a reason, or as what cancels is: the policy alone bans the first block."""
    z, t = peaked(None, (1200, 57))
    z[:, :1024], z[:, 1024:] = -INF, z[:, 1024:] - 55
    t[0, 1300] = -INF
    divergence, gradient = truth(z, t, "reverse", 0.3)
    stats, d = on_kernels(BACKENDS[backend], z, t, "reverse")
    assert stats.divergence[0] == divergence[0] == INF
    torch.testing.assert_close(stats.divergence.double(), divergence, rtol=1e-5, atol=0.0)
    assert max(map(relative_error, d[1:], gradient[1:])) <= 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("model", [0, 1])
def test_logits_that_are_no_numbers(model, value, kind, backend):
    """A loss of NaN has a gradient of NaN: otherwise an optimizer would step on it."""
    both = logits(1.0, rows=3)
    divergence, gradient = truth(*both, kind, 0.3)
    both[model][1, 700] = value
    stats, d = on_kernels(BACKENDS[backend], *both, kind)
    assert stats.divergence[1].isnan() and not d[1].isfinite().any()
    for row in (0, 2):
        torch.testing.assert_close(
            stats.divergence[row].double(), divergence[row], rtol=1e-5, atol=0
        )
        assert relative_error(d[row], gradient[row]) <= 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("softcap", [None, 25.0])
def test_gradients_add_up(softcap, kind, backend):
    """Gradients of log-prob, entropy, logsumexp and divergence add up, through every transform."""
    z, t = logits(0.5, V=803)
    T = torch.linspace(0.7, 1.3, 6)
    transforms = LogitTransform(1.2, softcap, T), LogitTransform(0.9, 40.0, 1.1)
    targets = torch.tensor([5, 0, 802, 77, 5, 9])
    g, e, q = (torch.randn(6, generator=torch.Generator().manual_seed(i)) for i in range(3))

    def grads(stats):
        return RowGrads.of(stats.policy_stats, StatGrads(g, e, q))

    _, d = on_kernels(BACKENDS[backend], z, t, kind, 0.3, transforms, targets, grads)
    raw = z.double().requires_grad_()
    x = 1.2 * raw if softcap is None else 25 * torch.tanh(1.2 * raw / 25)
    x = x / T[:, None].double()
    y = 40 * torch.tanh(0.9 * t.double() / 40) / 1.1
    s = x.log_softmax(1)
    _, by_divergence = truth(x.detach(), y, kind, 0.3)
    value = (g * s.gather(1, targets[:, None])[:, 0]).sum()
    value = value - (e * (s.exp() * s).sum(1)).sum() + (q * x.logsumexp(1)).sum()
    value = value + (by_divergence * x).sum()
    (expected,) = torch.autograd.grad(value, raw)
    assert relative_error(d, expected) <= 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("call", [on_kernels, on_ranks])
def test_an_entry_that_float32_has_no_probability_for(call, backend):
    """The reference alone rules it out: the KL is finite as computed, and so is its gradient."""
    z, t = logits(0.5, rows=2)
    z[0, 7], t[0, 7] = -120.0, -INF
    divergence, gradient = truth(z, t.masked_fill(t == -INF, -120.0), "reverse", 0.3)
    stats, d = call(BACKENDS[backend], z, t, "reverse")
    torch.testing.assert_close(stats.divergence.double(), divergence, rtol=1e-5, atol=0.0)
    assert max(map(relative_error, d, gradient)) <= 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_divergence_without_formulas(backend):
    """Nothing stands in for what it lacks."""

    class Unknown(Divergence):
        name = "unknown"

    z, t = logits(1.0)
    targets, stats = torch.zeros(len(z), dtype=torch.int64), PairStats.empty(z)
    module, pair = BACKENDS[backend], (NONE, NONE, stats)
    error, message = {
        "torch": (NotImplementedError, "Unknown.terms"),
        "triton": (TypeError, "divergence: expected one with .*, ReverseKL, .*; got Unknown: add"),
    }[backend]
    for call in (
        lambda x: module.pair_stats(z, t, targets, *pair, divergence=x),
        lambda x: module.divergences(z, t, *pair, divergence=x),
        lambda x: module.pair_grads_(z, t, targets, *pair, None, z[:, 0], z, divergence=x),
    ):
        with pytest.raises(error, match=message):
            call(Unknown())


# The calls


def two_models(B=4, T=9, H=32, V=503, seed=0):
    batch = make_batch(B=B, T=T, H=H, V=V, seed=seed)
    g = torch.Generator().manual_seed(9)
    weight = torch.cat([batch.weight, 0.1 * torch.randn(V, 12, generator=g)], 1)
    states = torch.cat([batch.hidden, torch.randn(B, T, 12, generator=g)], -1)
    return batch, Reference(states.masked_fill(~batch.mask[..., None], NAN), 1.1 * weight)


def gradients(call, batch):
    leaves = [x.detach().clone().requires_grad_() for x in (batch.hidden, batch.weight)]
    out = call(*leaves)
    out.loss.backward()
    return out, [x.grad for x in leaves]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_banned_ids(kind, backend):
    """Ids that both ban, and one that the divergence lets one model ban."""
    batch, other = two_models()
    hidden, states = batch.hidden.nan_to_num(), other.hidden.nan_to_num()
    bias, ref_bias = torch.zeros(2, 503)
    bias[400:] = ref_bias[400:] = bias[0] = ref_bias[0] = -INF
    if kind != "forward":
        bias[7] = -INF
    if kind != "reverse":
        ref_bias[9] = -INF

    def gradients_in(dtype, call):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (hidden, batch.weight)]
        teacher = Reference(states.to(dtype), LMHead(other.head.to(dtype), ref_bias.to(dtype)))
        loss = call(leaves[0], LMHead(leaves[1], bias.to(dtype)), teacher, batch.mask)
        loss.backward()
        return [loss.detach(), *(x.grad for x in leaves)]

    expected = gradients_in(
        torch.float64,
        lambda *x: exact.divergence(*x, kind=kind, beta=0.3).sum() / batch.mask.sum(),
    )
    actual = gradients_in(
        torch.float32,
        lambda *x: (
            fused_distillation_loss(
                *x, kind=kind, beta=0.3, execution=Execution(backend=backend)
            ).loss
        ),
    )
    assert all(x.isfinite().all() for x in expected)
    for x, y in zip(actual, expected, strict=True):
        assert relative_error(x, y) <= 1e-5


def test_parts_of_a_step_add_up():
    batch, other = two_models()

    def full(hidden, weight):
        return fused_distillation_loss(hidden, weight, other, batch.mask)

    def parts(hidden, weight):
        each = [
            fused_distillation_loss(
                hidden[i], weight, Reference(other.hidden[i], other.head), batch.mask[i],
                num_items=batch.mask.sum(),
            )
            for i in (slice(0, 1), slice(1, 4))
        ]  # fmt: skip
        return each[0]._replace(loss=sum(x.loss for x in each))

    (one, full_grads), (some, part_grads) = gradients(full, batch), gradients(parts, batch)
    torch.testing.assert_close(some.loss, one.loss)
    for x, y in zip(part_grads, full_grads, strict=True):
        assert relative_error(x, y) <= 1e-6


def test_a_reference_has_no_gradient():
    batch, other = two_models()
    other = Reference(*(x.clone().requires_grad_() for x in other))
    hidden = batch.hidden.clone().requires_grad_()
    fused_distillation_loss(hidden, batch.weight, other, batch.mask).loss.backward()
    assert hidden.grad is not None and other.hidden.grad is None and other.head.grad is None


def test_an_estimate_is_that_of_its_log_probs():
    """A loss with `reference` equals a loss with the reference model's log-probs as `ref_logps`."""
    batch, other = two_models()
    args, config = (batch.targets, batch.advantages, batch.mask), GRPOLossConfig(beta=0.2)
    logps = linear_logprobs(*other, batch.targets, batch.mask).logps
    during = gradients(lambda *x: fused_grpo_loss(*x, *args, reference=other, config=config), batch)
    before = gradients(lambda *x: fused_grpo_loss(*x, *args, ref_logps=logps, config=config), batch)
    assert during[0].loss == before[0].loss
    assert all(torch.equal(x, y) for x, y in zip(during[1], before[1], strict=True))


def test_the_exact_kl_is_what_its_estimates_estimate():
    """Over targets that the policy samples the mean of k1 comes to it."""
    batch, other = two_models(B=1, T=3, V=53)
    states = Reference(other.hidden.nan_to_num(), other.head)
    hidden, mask = batch.hidden.nan_to_num(), None
    config = GRPOLossConfig(beta=0.1, kl_estimator="exact")
    kl = fused_grpo_loss(
        hidden, batch.weight, batch.targets.clamp(min=0), batch.advantages, mask,
        reference=states, config=config,
    ).metrics["kl"]  # fmt: skip
    every = torch.arange(53)[:, None].expand(53, 3)
    logps, ref_logps = (
        linear_logprobs(x.expand(53, -1, -1), w, every).logps.double()
        for x, w in ((hidden, batch.weight), states)
    )
    expected = (logps.exp() * (logps - ref_logps)).sum().item() / 3
    assert kl.item() == pytest.approx(expected, rel=1e-4)


def test_memory_that_runs_out(monkeypatch):
    batch, other = two_models(B=24)
    tried = []
    original = torch.mm

    def full(*args, **options):
        tried.append(len(args[0]))
        if len(args[0]) > 30:
            raise torch.OutOfMemoryError("none left")
        return original(*args, **options)

    monkeypatch.setattr(torch, "mm", full)
    with pytest.warns(UserWarning, match="memory ran out in the LM head"):
        out = fused_distillation_loss(batch.hidden, batch.weight, other, batch.mask)
    monkeypatch.undo()
    expected = fused_distillation_loss(batch.hidden, batch.weight, other, batch.mask)
    torch.testing.assert_close(out.loss, expected.loss)


def test_refused():
    batch, other = two_models()
    student = (batch.hidden, batch.weight)
    for call, error, message in (
        (lambda: fused_distillation_loss(*student, other.hidden), TypeError,
         r"reference: expected a Reference\(hidden, head\); got Tensor"),
        (lambda: fused_distillation_loss(*student, Reference(other.hidden, other.head[:500])),
         ValueError, r"reference: expected a head of 503 rows, .*; got 500.*weight\[:500\]"),
        (lambda: fused_distillation_loss(*student, other, kind="up"), ValueError,
         "kind: expected one of reverse, forward, jsd; got 'up'"),
        (lambda: exact.divergence(*student, other, kind="up"), ValueError,
         "kind: expected one of reverse, forward, jsd; got 'up'"),
        (lambda: fused_distillation_loss(*student, other, kind="jsd", beta=1.0), ValueError,
         r"beta: expected a number in \(0, 1\); got 1.0"),
        (lambda: fused_grpo_loss(*student, batch.targets, batch.advantages, batch.mask,
                                 config=GRPOLossConfig(beta=0.1, kl_estimator="exact")),
         ValueError, "kl_estimator='exact' needs .*: pass reference="),
        (lambda: fused_grpo_loss(*student, batch.targets, batch.advantages, batch.mask,
                                 ref_logps=batch.ref_logps, reference=other),
         ValueError, "ref_logps does not work with a reference"),
        (lambda: grpo_loss(batch.old_logps, batch.advantages, batch.mask,
                           ref_logps=batch.ref_logps,
                           config=GRPOLossConfig(beta=0.1, kl_estimator="exact")),
         ValueError, "kl_estimator='exact' needs .*: pass reference="),
        (lambda: GRPOLossConfig(beta=0.1, kl_estimator="exact", kl_clamp=1.0), ValueError,
         "kl_clamp=1.0 does not work with kl_estimator='exact'"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()
    leaf = batch.hidden.clone().requires_grad_()
    out = fused_distillation_loss(leaf, batch.weight, other, batch.mask)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(out.loss, leaf, create_graph=True)


STATES, ROWS = torch.randn(2, 5, 3), torch.randn(7, 3)
COLD = torch.ones(2, 5).index_fill(1, torch.tensor(2), 0.0)
# Wrong references for 2 x 5 tokens, and the error.
WRONG_REFERENCES = {
    "a token less": (Reference(STATES[:, :4], ROWS),
        r"reference.hidden: expected shape \[2, 5, 3\]; got \[2, 4, 3\]"),
    "a sequence more": (Reference(torch.randn(3, 5, 3), ROWS),
        r"reference.hidden: expected shape \[2, 5, 3\]; got \[3, 5, 3\]"),
    "packed": (Reference(STATES.flatten(0, 1), ROWS),
        r"reference.hidden: expected shape \[2, 5, 3\]; got \[10, 3\]"),
    "one number": (
        Reference(STATES[0, 0, 0], ROWS), r"reference.hidden: expected shape .*got \[\]"
    ),
    "elsewhere": (Reference(STATES.to("meta"), ROWS),
        "reference.hidden: expected a tensor on cpu; got one on meta"),
    "float64": (Reference(STATES.double(), ROWS),
        "reference.hidden: expected dtype float32, bfloat16, float16; got float64: cast it"),
    "a head in float64": (Reference(STATES, ROWS.double()),
        "reference.head.weight: expected dtype float32, bfloat16, float16; got float64"),
    "a head of another size": (Reference(STATES, ROWS[:, :2]),
        r"reference.head.weight: expected shape \[V, 3\]; got \[7, 2\]"),
    "a module": (Reference(STATES, torch.nn.Linear(3, 7)),
        r"reference.head: expected a weight \[V, H\] or an LMHead; got Linear"),
    "temperatures of other tokens": (Reference(STATES, LMHead(ROWS, temperature=torch.ones(2, 4))),
        r"reference.head.temperature: expected shape \[2, 5\]; got \[2, 4\]"),
    "a temperature of 0": (Reference(STATES, LMHead(ROWS, temperature=COLD)),
        r"reference.head.temperature: expected finite numbers > 0; got others \(2 of them\)"),
}  # fmt: skip


@pytest.mark.parametrize("call", ("distillation", "log-probs", "exact"))
@pytest.mark.parametrize("wrong", WRONG_REFERENCES)
def test_what_is_wrong_with_a_reference(wrong, call):
    """The reference is named, whose own arguments are right."""
    reference, message = WRONG_REFERENCES[wrong]
    student = torch.randn(2, 5, 4), torch.randn(7, 4)
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        if call == "distillation":
            fused_distillation_loss(*student, reference)
        else:
            estimator = "exact" if call == "exact" else "k3"
            fused_grpo_loss(
                *student, torch.zeros(2, 5, dtype=torch.long), torch.ones(2), reference=reference,
                config=GRPOLossConfig(beta=0.1, kl_estimator=estimator),
            )  # fmt: skip


def test_padded_states_are_no_reference_of_packed_ones():
    with pytest.raises(
        ValueError, match=r"^reference.hidden: expected shape \[10, 3\]; got \[2, 5"
    ):
        fused_distillation_loss(torch.randn(10, 4), torch.randn(7, 4), Reference(STATES, ROWS))

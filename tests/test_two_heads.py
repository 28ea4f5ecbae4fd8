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
    divergence, stats, out = DIVERGENCES[kind](beta), PairStats.empty(z), torch.empty_like(z)
    module.pair_stats(z, t, targets, *transforms, stats)
    module.divergences(z, t, *transforms, stats, divergence=divergence)
    rest = stats, None if grads is None else grads(stats), torch.ones(len(z)), out
    module.pair_grads_(z.clone(), t, targets, *transforms, *rest, divergence=divergence)
    return stats, out


def on_ranks(module, z, t, kind):
    """The same from merged statistics, which lack digits of the shift and of the anchors."""
    targets, stats, out = torch.zeros(len(z), dtype=torch.int64), PairStats.empty(z), z.clone()
    divergence = DIVERGENCES[kind](0.3)
    module.pair_stats(z, t, targets, NONE, NONE, stats)
    stats.shift.copy_(stats.logsumexp - stats.ref_logsumexp)
    module.set_anchors(stats)
    module.divergences(z, t, NONE, NONE, stats, divergence=divergence)
    rest = stats, None, torch.ones(len(z)), out
    module.pair_grads_(out, t, targets, NONE, NONE, *rest, divergence=divergence)
    return stats, out


every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_kind = pytest.mark.parametrize("kind", DIVERGENCES)
every_call = pytest.mark.parametrize("call", (on_kernels, on_ranks))


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
    (("torch", 1203, 3e-5), ("triton", 1203, 3e-5), ("torch", 151_936, 3e-4)),
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


@every_backend
@every_kind
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
    expect_divergence(stats, divergence, 1e-4)
    # Entries with hardly any probability; the likely entry's error is its rounding.
    other_ids = torch.arange(700) != 3
    assert relative_error(d[:, other_ids], gradient[:, other_ids]) <= 1e-3
    assert (d[:, 3] - gradient[:, 3]).abs().max() <= 1e-7


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
    # The sum of the forward KL runs over the teacher; all but e^-48 of the student is elsewhere.
    "late": (lambda: peaked([((100_000, 60), (5, 10))], V=100_109), ("forward",)),
    "ruled_out": (ruled_out_by_one, ("reverse",)),
    "banned": (banned_in_the_first_block, ("reverse",)),
}  # fmt: skip


@every_backend
@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize(("offset", "apart"), ((1000.0, 2.0), (0.0, 1e-3)), ids=("large", "close"))
def test_neither_large_logits_nor_close_models_cost_digits(offset, apart, kind, backend):
    """Neither p and q, nor a sum of terms that nearly cancel, lose more than a float32 holds."""
    g = torch.Generator().manual_seed(0)
    z, noise = (torch.randn(6, 300, generator=g) * 2 for _ in range(2))
    teacher, eye = z + offset + apart * noise, torch.eye(300)
    leaves = [(z + offset).requires_grad_() for _ in range(2)]
    leaves[1] = leaves[1].detach().double().requires_grad_()
    how = {"kind": kind, "beta": 0.3}
    out = fused_distillation_loss(
        leaves[0], eye, Reference(teacher, eye), execution=Execution(backend=backend), **how
    )
    out.loss.backward()
    truth = exact.divergence(
        leaves[1], eye.double(), Reference(teacher.double(), eye.double()), **how
    )
    truth.mean().backward()
    torch.testing.assert_close(out.divergence.double(), truth.detach(), rtol=3e-6, atol=0.0)
    assert leaves[1].grad.norm() > 0
    assert relative_error(leaves[0].grad, leaves[1].grad) <= 3e-6


@every_backend
@every_call
@pytest.mark.parametrize(
    ("case", "kind"), [(case, kind) for case, (_, kinds) in EXTREMES.items() for kind in kinds]
)
def test_models_that_are_far_apart(case, kind, call, backend):
    z, t = EXTREMES[case][0]()
    divergence, gradient = truth(z, t if case == "banned" else t.clamp(min=-120.0), kind, 0.3)
    stats, d = call(BACKENDS[backend], z, t, kind)
    expect_divergence(stats, divergence)
    finite = divergence.isfinite()
    limit = 1e-4 if kind == "reverse" and case != "peaks" else 2e-5
    rounding = 4e-6 * divergence[finite].clamp(min=1.0)  # of h
    errors, norms = (d - gradient)[finite].norm(dim=1), gradient[finite].norm(dim=1)
    assert (errors <= limit * norms + rounding).all(), errors


@every_backend
@every_kind
@pytest.mark.parametrize("temperature", (1.0, 0.7))
def test_students_that_are_nearly_certain(temperature, kind, backend):
    """The likely id's gradient is the small difference of h and its mean, each rounded alike."""
    z, t = temperature * peaked([((5, 18), None)] * 8 + [((1200, 18), None)] * 8)
    t = z + 0.5 * t
    for rows, place in ((slice(8), 5), (slice(8, 16), 1200)):
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
@pytest.mark.parametrize("temperature", (1.0, 0.5, 2.0))  # of the policy; 1 of the reference
def test_limits(temperature, kind, backend):
    """-inf in both, in the policy, in the reference: exact, infinite where it is, never NaN."""
    z, t = logits(0.5, rows=4)
    z[1:3, 7] = t[1, 7] = t[3, 7] = -INF
    transforms = LogitTransform(temperature=temperature), NONE
    stats, d = on_kernels(BACKENDS[backend], z * temperature, t, kind, transforms=transforms)
    d, infinite = d * temperature, {"reverse": 3, "forward": 2}.get(kind)
    assert not d.isnan().any()
    near = [x.masked_fill(x == -INF, -60.0) for x in (z, t)]
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
@pytest.mark.parametrize("value", (NAN, INF))
def test_logits_that_are_no_numbers(value, kind, backend):
    """A loss of NaN has a gradient of NaN: otherwise an optimizer would step on it."""
    both = logits(1.0, rows=4)
    divergence, gradient = truth(*both, kind, 0.3)
    both[0][1, 700] = both[1][2, 700] = value
    stats, d = on_kernels(BACKENDS[backend], *both, kind)
    assert stats.divergence[1:3].isnan().all() and not d[1:3].isfinite().any()
    torch.testing.assert_close(stats.divergence[::3].double(), divergence[::3], rtol=1e-5, atol=0)
    assert errors_of(d[::3], gradient[::3]).max() <= 1e-4


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


@every_backend
@every_kind
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


@every_backend
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
        lambda x: module.divergences(z, t, *pair, divergence=x),
        lambda x: module.pair_grads_(z, t, targets, *pair, None, z[:, 0], z, divergence=x),
    ):
        with pytest.raises(error, match=message):
            call(Unknown())


# The calls


def two_models(B=4, T=9, V=503):
    batch, g = make_batch(B=B, T=T, H=32, V=V), torch.Generator().manual_seed(9)
    weight = torch.cat([batch.weight, 0.1 * torch.randn(V, 12, generator=g)], 1)
    states = torch.cat([batch.hidden, torch.randn(B, T, 12, generator=g)], -1)
    return batch, Reference(states.masked_fill(~batch.mask[..., None], NAN), 1.1 * weight)


def gradients(call, batch):
    leaves = [x.detach().clone().requires_grad_() for x in (batch.hidden, batch.weight)]
    out = call(*leaves)
    out.loss.backward()
    return out, [x.grad for x in leaves]


@every_backend
@every_kind
def test_banned_ids(kind, backend):
    """Ids that both ban, and one that the divergence lets one model ban."""
    batch, other = two_models()
    bias, ref_bias = torch.zeros(2, 503)
    bias[400:] = ref_bias[400:] = bias[0] = ref_bias[0] = -INF
    if kind != "forward":
        bias[7] = -INF
    if kind != "reverse":
        ref_bias[9] = -INF
    results, how = [], {"kind": kind, "beta": 0.3}
    for dtype in (torch.float64, torch.float32):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (batch.hidden, batch.weight)]
        ref_head = LMHead(other.head.to(dtype), ref_bias.to(dtype))
        reference = Reference(other.hidden.to(dtype), ref_head)
        args = leaves[0], LMHead(leaves[1], bias.to(dtype)), reference, batch.mask
        if dtype == torch.float64:
            loss = exact.divergence(*args, **how).sum() / batch.mask.sum()
        else:
            loss = fused_distillation_loss(*args, execution=Execution(backend=backend), **how).loss
        loss.backward()
        results.append([loss.detach(), *(x.grad for x in leaves)])
    for expected, actual in zip(*results, strict=True):
        assert expected.isfinite().all() and relative_error(actual, expected) <= 1e-5


def test_parts_of_a_step_add_up():
    batch, other = two_models()

    def parts(hidden, weight):
        each = [
            fused_distillation_loss(
                hidden[i], weight, Reference(other.hidden[i], other.head), batch.mask[i],
                num_items=batch.mask.sum(),
            )
            for i in (slice(0, 1), slice(1, 4))
        ]  # fmt: skip
        return each[0]._replace(loss=sum(x.loss for x in each))

    full, full_grads = gradients(
        lambda *head: fused_distillation_loss(*head, other, batch.mask), batch
    )
    out, part_grads = gradients(parts, batch)
    torch.testing.assert_close(out.loss, full.loss)
    assert max(map(relative_error, part_grads, full_grads)) <= 1e-6


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
    (during, its_grads), (before, grads) = (
        gradients(lambda *head, how=how: fused_grpo_loss(*head, *args, config=config, **how), batch)
        for how in ({"reference": other}, {"ref_logps": logps})
    )
    assert during.loss == before.loss and all(map(torch.equal, its_grads, grads))


def test_the_exact_kl_is_what_its_estimates_estimate():
    """Over targets that the policy samples the mean of k1 comes to it."""
    batch, other = two_models(B=1, T=3, V=53)
    policy = batch.hidden.nan_to_num(), batch.weight
    reference = Reference(other.hidden.nan_to_num(), other.head)
    out = fused_grpo_loss(
        *policy, batch.targets.clamp(min=0), batch.advantages, reference=reference,
        config=GRPOLossConfig(beta=0.1, kl_estimator="exact"),
    )  # fmt: skip
    logps, ref_logps = (
        linear_logprobs(x.expand(53, -1, -1), w, torch.arange(53)[:, None].expand(53, 3)).logps
        for x, w in (policy, reference)
    )
    expected = (logps.exp() * (logps - ref_logps)).sum().item() / 3
    assert out.metrics["kl"].item() == pytest.approx(expected, rel=1e-4)


STATES, ROWS = torch.randn(2, 5, 3), torch.randn(7, 3)
STUDENT, REFERENCE = (torch.randn(2, 5, 4), torch.randn(7, 4)), Reference(STATES, ROWS)
POLICY = *STUDENT, torch.zeros(2, 5, dtype=torch.long), torch.ones(2)
EXACT = GRPOLossConfig(beta=0.1, kl_estimator="exact")
# A call that is refused, and its error.
REFUSED = {
    "no reference": (lambda: fused_distillation_loss(*STUDENT, STATES),
        r"reference: expected a Reference\(hidden, head\); got Tensor"),
    "fewer rows": (
        lambda: fused_distillation_loss(*STUDENT, Reference(STATES, ROWS[:5])),
        r"reference: expected a head of 7 rows, .*; got 5.*weight\[:5\]"),
    "kind": (lambda: fused_distillation_loss(*STUDENT, REFERENCE, kind="up"),
        "kind: expected one of reverse, forward, jsd; got 'up'"),
    "exact kind": (lambda: exact.divergence(*STUDENT, REFERENCE, kind="up"),
        "kind: expected one of reverse, forward, jsd; got 'up'"),
    "beta": (lambda: fused_distillation_loss(*STUDENT, REFERENCE, kind="jsd", beta=1.0),
        r"beta: expected a number in \(0, 1\); got 1.0"),
    "exact KL alone": (lambda: fused_grpo_loss(*POLICY, config=EXACT),
        "kl_estimator='exact' needs .*: pass reference="),
    "both": (
        lambda: fused_grpo_loss(*POLICY, ref_logps=torch.zeros(2, 5), reference=REFERENCE),
        "ref_logps does not work with a reference"),
    "exact KL of log-probs": (
        lambda: grpo_loss(torch.zeros(2, 5), torch.ones(2), config=EXACT),
        "kl_estimator='exact' needs .*: pass reference="),
    "clamp": (lambda: GRPOLossConfig(beta=0.1, kl_estimator="exact", kl_clamp=1.0),
        "kl_clamp=1.0 does not work with kl_estimator='exact'"),
    "padded states": (
        lambda: fused_distillation_loss(torch.randn(10, 4), ROWS.new_zeros(7, 4), REFERENCE),
        r"reference.hidden: expected shape \[10, 3\]; got \[2, 5"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, message = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        call()


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
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        if call == "distillation":
            fused_distillation_loss(*STUDENT, reference)
        else:
            config = EXACT if call == "exact" else GRPOLossConfig(beta=0.1)
            fused_grpo_loss(*POLICY, reference=reference, config=config)

"""Divergences over some ids per token, against dense formulas in float64."""

import math

import pytest
import torch

from grpo_kernels import linear_logprobs, topk_kl
from grpo_kernels.kernels.divergences import DIVERGENCES
from tests.helpers.batches import make_batch, relative_error
from tests.helpers.head_options import exact_and_actual

V = 211


def divergence(s, t, direction, beta):
    """Returns the divergence of full distributions from log-probs."""
    m = (beta * t.exp() + (1 - beta) * s.exp()).log()

    def kl(p, q):
        return (p.exp() * (p - q)).sum(-1)

    return {
        "forward": lambda: kl(t, s), "reverse": lambda: kl(s, t),
        "jsd": lambda: beta * kl(t, m) + (1 - beta) * kl(s, m),
    }[direction]()  # fmt: skip


every_direction = pytest.mark.parametrize("direction", DIVERGENCES)
both_forms = pytest.mark.parametrize("form", ("targets", "support"))


@every_direction
def test_sets_of_all_sizes(direction):
    """The teacher's logits are enough; sets of one id have no divergence."""
    g, counts = torch.Generator().manual_seed(0), [1, 40, 7, 1, 12]
    policy, teacher = (torch.randn(sum(counts), generator=g, dtype=torch.float64) for _ in range(2))
    policy.requires_grad_()
    sets = [x.log_softmax(0) for x in policy.split(counts)]
    weights, teachers = torch.rand(5, generator=g), teacher.split(counts)
    offsets = torch.tensor([0, *counts]).cumsum(0)
    kl = topk_kl(torch.cat(sets).float(), teacher.float(), offsets, direction=direction, beta=0.3)
    expected = [
        divergence(s, t.log_softmax(0), direction, 0.3) for s, t in zip(sets, teachers, strict=True)
    ]
    expected = torch.stack(expected)
    torch.testing.assert_close(kl.double(), expected, rtol=1e-5, atol=1e-6)
    actual, truth = (
        torch.autograd.grad((x * weights).sum(), policy, retain_graph=True)[0]
        for x in (kl, expected)
    )
    assert truth.norm() > 0 and relative_error(actual, truth) < 1e-5


def test_topk_kl_under_a_graph_and_functional_transforms():
    g, more = torch.Generator().manual_seed(6), (torch.tensor([0, 5, 12]),)
    s, t = torch.randn(2, 12, generator=g).log_softmax(-1) - 0.3
    leaf, compiled = s.clone().requires_grad_(), s.clone().requires_grad_()
    topk_kl(leaf, t, *more).sum().backward()
    full_graph = torch.compile(topk_kl, backend="aot_eager", fullgraph=True)
    full_graph(compiled, t, *more).sum().backward()
    func_grad = torch.func.grad(lambda x: topk_kl(x, t, *more).sum())(s)
    for actual in (func_grad, compiled.grad):
        torch.testing.assert_close(actual, leaf.grad)
    assert leaf.grad.norm() > 0
    assert topk_kl(s.new_zeros(2, 0), s.new_zeros(2, 0)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("sharp", (1.0, 12.0), ids=("flat", "sharp"))
def test_many_targets_that_repeat(sharp):
    """Each is given the gradient of all that are its id, also where one has all probability."""
    batch, g = make_batch(B=2, T=5, H=24, V=V), torch.Generator().manual_seed(5)
    hidden = sharp * batch.hidden.nan_to_num()
    ids = torch.randint(0, 40, (2, 5, 200), generator=g)
    ids[0, 0], ids[0, 1, 7:] = 3, 11  # of one id alone, and nearly
    likeliest = (hidden @ batch.weight.T).argmax(-1, keepdim=True)
    ids[1] = torch.where(torch.rand(5, 200, generator=g) < 0.3, likeliest[1], ids[1])
    weights = torch.randn(2, 5, 200, generator=g)

    def loss(package, *head):
        return (package.linear_logprobs(*head, ids).logps * weights).sum()

    for truth, actual in zip(*exact_and_actual(loss, hidden, batch.weight), strict=True):
        assert truth.norm() > 0 and relative_error(actual, truth) < 2e-5


@both_forms
@every_direction
def test_ids_that_both_ban_have_no_part(direction, form):
    """Value and gradient are as without these ids."""
    g = torch.Generator().manual_seed(4)
    s, t = torch.randn(2, 3, 5, generator=g, dtype=torch.float64).log_softmax(-1) - 0.5
    banned = torch.tensor([False, True, False, True, False])

    def of(s, t):
        s = s.detach().requires_grad_()
        count, args = s.shape[1], (s, t)
        if form == "support":
            args = s.flatten(), t.flatten(), torch.arange(0, 3 * count + 1, count)
        kl = topk_kl(*args, direction=direction, beta=0.3)
        (kl * torch.arange(1, 4)).sum().backward()
        return kl.detach(), s.grad

    value, gradient = of(*(x.masked_fill(banned, -torch.inf) for x in (s, t)))
    expected, expected_grad = of(s[:, ~banned], t[:, ~banned])
    torch.testing.assert_close(value, expected)
    assert expected_grad.norm() > 0.1 and not gradient[:, banned].any()
    torch.testing.assert_close(gradient[:, ~banned], expected_grad)


@both_forms
@pytest.mark.parametrize("rest", (1e-2, 1e-9))
@every_direction
def test_the_tail_of_a_confident_model(direction, rest, form):
    """1 - p of the likeliest id has its digits, however near p is to 1; of all ids it is 0."""
    z = torch.zeros(2, 50, dtype=torch.float64)
    z[:, 0] = math.log((1 - rest) / rest * 49)
    z[1] = z[1].roll(2)
    z.requires_grad_()
    teacher = torch.linspace(3, 0, 50, dtype=torch.float64).log_softmax(-1).expand(2, -1)
    s, t = z.log_softmax(-1), teacher
    with_tail = [torch.cat([x[:, :3], x[:, 3:].logsumexp(1, keepdim=True)], 1) for x in (s, t)]
    expected = divergence(*with_tail, direction, 0.3)
    kl = topk_kl(s[:, :3].float(), t[:, :3].float(), direction=direction, beta=0.3)
    if form == "support":
        offsets, expected = torch.tensor([0, 50, 100]), divergence(s, t, direction, 0.3)
        args = z.float().flatten(), t.float().flatten(), offsets
        kl = topk_kl(*args, direction=direction, beta=0.3)
    torch.testing.assert_close(kl.double(), expected, rtol=1e-4, atol=1e-6)
    actual, truth = (torch.autograd.grad(x.sum(), z, retain_graph=True)[0] for x in (kl, expected))
    assert truth.norm() > 0 and relative_error(actual, truth) < 1e-3
    without_tail = topk_kl(s, t, direction=direction, beta=0.3)
    torch.testing.assert_close(without_tail, divergence(s, t, direction, 0.3), rtol=0, atol=1e-12)


@pytest.mark.parametrize("entropy", (False, True))
def test_one_of_several_targets_is_a_target_bit_for_bit(entropy):
    batch = make_batch(V=V, H=24)
    results = []
    for targets in (batch.targets, batch.targets[..., None]):
        hidden, weight = (x.clone().requires_grad_() for x in (batch.hidden, batch.weight))
        out = linear_logprobs(hidden, weight, targets, batch.mask, entropy=entropy)
        out.logps.square().sum().backward()
        results.append((out.logps.detach().flatten(), hidden.grad, weight.grad))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)

"""Compositions of public calls, as the docs show them, against the float64 reference."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import grpo_kernels
from grpo_kernels import Execution, LMHead, gather_tokens, per_token_kl, reference
from tests.helpers.batches import config, make_batch, packed, relative_error
from tests.helpers.head_options import BACKENDS
from tests.helpers.supports import make_support, with_logps_of
from tests.helpers.tiers import in_turn

SMALL = {"B": 4, "T": 5, "H": 24, "V": 61}
BACKEND = pytest.mark.parametrize("backend", BACKENDS)


def calls_of(backend):
    """The calls of a backend, by the names that `reference` has for them."""
    of_a_head, plain = {"execution": Execution(backend=backend)}, {"backend": backend}
    return SimpleNamespace(
        fused_grpo_loss=partial(grpo_kernels.fused_grpo_loss, **of_a_head),
        linear_logprobs=partial(grpo_kernels.linear_logprobs, **of_a_head),
        grpo_loss=partial(grpo_kernels.grpo_loss, **plain),
        selective_log_softmax=partial(grpo_kernels.selective_log_softmax, **plain),
    )


def run(compose, calls, batch, *more):
    """The loss that `compose` makes of hidden states, weight and bias, and its gradients."""
    tensors = (batch.hidden, batch.weight, batch.bias, *more)
    dtype = torch.float64 if calls is reference else torch.float32
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in tensors]
    loss = compose(calls, *leaves)
    loss.backward()
    return loss.detach(), *(x.grad for x in leaves)


def expect_equal(actual, expected, tolerance=2e-5):
    """Values and gradients: zeros are off by 1, those of the other sign by 2."""
    for ours, exact in zip(actual, expected, strict=True):
        assert exact.norm() > 0
        assert relative_error(ours, exact) <= tolerance


def plain_loss(batch, cfg, mask=None, rows=..., **options):
    """The off-policy loss of some `rows` of the tokens."""
    mask = batch.mask if mask is None else mask

    def compose(calls, hidden, weight, bias):
        out = calls.fused_grpo_loss(
            hidden[rows], LMHead(weight, bias), batch.targets[rows], batch.advantages, mask[rows],
            old_logps=batch.old_logps[rows], config=cfg, **options,
        )  # fmt: skip
        return out.loss

    return compose


# docs/support.md: the KL of the whole policy beside a truncated one


@pytest.mark.parametrize(
    ("loss_type", "without", "backend"),
    in_turn(("dapo", "gspo", "vespo"), (0.0, 0.3), BACKENDS),
)
def test_a_truncated_policy_with_the_kl_of_the_whole_one(loss_type, without, backend):
    batch, cfg = make_batch(**SMALL), config(loss_type=loss_type)
    support = make_support(batch, without=without, most=9)
    # Reference log-probs are over the full vocabulary, old ones over the truncated one.
    batch.old_logps = with_logps_of(batch, support, bias=True).old_logps

    def compose(calls, hidden, weight, bias):
        args = (hidden, LMHead(weight, bias), batch.targets, batch.mask)
        truncated = calls.linear_logprobs(*args, support=support).logps
        full = calls.linear_logprobs(*args).logps
        out = calls.grpo_loss(
            truncated, batch.advantages, batch.mask, old_logps=batch.old_logps, config=cfg
        )
        kl = per_token_kl(full, batch.ref_logps, batch.mask)
        return out.loss + 0.1 * kl.sum() / batch.mask.sum()

    expected = run(compose, reference, batch)
    expect_equal(run(compose, calls_of(backend), batch), expected)
    # The two terms, each of its own policy.
    truncated = plain_loss(batch, cfg, support=support)
    kl_alone = config(loss_type="reinforce", beta=0.1, use_bias_correction_kl=False)
    none = replace(batch, advantages=0 * batch.advantages)
    kl = plain_loss(none, kl_alone, ref_logps=batch.ref_logps)
    terms = zip(run(truncated, reference, batch), run(kl, reference, none), strict=True)
    expect_equal([a + b for a, b in terms], expected)


# docs/support.md: logits of one's own


@BACKEND
@pytest.mark.parametrize("temperature", (1.0, 0.7))
def test_masked_logits(temperature, backend):
    g = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(4, 6, 61, generator=g)
    targets = torch.randint(61, (4, 5), generator=g)
    allowed = torch.rand(4, 5, 61, generator=g) < 0.2
    allowed.scatter_(-1, targets[..., None], True)
    factors = torch.randn(4, 5, generator=g)
    results = []
    for calls, dtype in ((calls_of(backend), torch.float32), (reference, torch.float64)):
        x = logits.to(dtype, copy=True).requires_grad_()
        masked = x[:, :-1].masked_fill(~allowed, -torch.inf)
        logps = calls.selective_log_softmax(masked, targets, temperature=temperature)
        (factors * logps).sum().backward()
        assert not x.grad[:, :-1][~allowed].any()
        results.append((logps.detach(), x.grad))
    ours, exact = results
    expect_equal(ours, exact)
    # By definition: the token's log-prob over the full vocabulary minus that of the set.
    full = (logits[:, :-1].double() / temperature).log_softmax(-1)
    set_logsumexp = full.masked_fill(~allowed, -torch.inf).logsumexp(-1)
    expect_equal((ours[0],), (full.gather(-1, targets[..., None])[..., 0] - set_logsumexp,))


# docs/design.md: rows of the head that are padding, tokens that are left out


@BACKEND
@pytest.mark.parametrize("options", ({"entropy_coef": 0.1}, {"loss_type": "gspo"}), ids=str)
def test_rows_beyond_the_vocabulary(options, backend):
    """A slice of the head is the head without them, and their gradient is 0."""
    batch, V, cfg = make_batch(**SMALL), 61, config(**options)
    g = torch.Generator().manual_seed(0)
    lora = [0.3 * torch.randn(*shape, generator=g) for shape in ((4, 5, 3), (V, 3))]

    def compose(calls, hidden, weight, bias, a_out, lora_b):
        head = LMHead(weight[:V], bias[:V], (a_out, lora_b[:V]))
        return calls.fused_grpo_loss(
            hidden, head, batch.targets, batch.advantages, batch.mask,
            old_logps=batch.old_logps, config=cfg,
        ).loss  # fmt: skip

    expected = run(compose, reference, batch, *lora)
    wide = [torch.cat([x, 5 + x[:14]]) for x in (batch.weight, batch.bias, lora[1])]
    padded = replace(batch, weight=wide[0], bias=wide[1])
    loss, *gradients = run(compose, calls_of(backend), padded, lora[0], wide[2])
    for place in (1, 2, 4):
        assert len(gradients[place]) == V + 14 and not gradients[place][V:].any()
        gradients[place] = gradients[place][:V]
    expect_equal((loss, *gradients), expected)


@BACKEND
@pytest.mark.parametrize("loss_type", ("grpo", "dapo", "luspo", "dr_grpo", "gspo", "vespo"))
def test_a_smaller_mask_with_the_whole_denominator(loss_type, backend):
    """Without sequences of advantage 0: loss and gradients are those of all."""
    batch, cfg = make_batch(), config(loss_type=loss_type)
    mask = batch.mask & (batch.advantages != 0)[:, None]
    assert 0 < mask.sum() < batch.mask.sum()
    by_tokens = cfg.effective_aggregation in ("dapo", "bnpo")
    num_items = batch.mask.sum() if by_tokens else len(batch.mask)
    smaller = plain_loss(batch, cfg, mask, num_items=num_items)
    expected = run(plain_loss(batch, cfg), reference, batch)
    expect_equal(run(smaller, calls_of(backend), batch), expected)


# docs/distributed.md, as far as one process shows it; `tests/ranks/test_sequences.py` has two


@BACKEND
@pytest.mark.parametrize("quantile", (1.0, 0.45))
def test_parts_of_a_batch_with_its_denominator(quantile, backend):
    """Losses and gradients of the parts add up, by the whole's threshold of entropies, too."""
    batch = make_batch(**SMALL)
    full, threshold = config(top_entropy_quantile=quantile), None
    if quantile < 1:
        head = (batch.hidden.double(), LMHead(batch.weight.double(), batch.bias.double()))
        entropy = reference.linear_logprobs(*head, batch.targets, batch.mask).entropy
        threshold = entropy[batch.mask].quantile(1 - quantile).item()
    cfg = replace(full, entropy_threshold=threshold)
    assert cfg.one_pass
    parts = [
        run(
            plain_loss(batch, cfg, rows=(slice(None), columns), num_items=batch.mask.sum()),
            calls_of(backend), batch,
        )
        for columns in (slice(0, 2), slice(2, 5))
    ]  # fmt: skip
    expected = run(plain_loss(batch, full), reference, batch)
    expect_equal([sum(part) for part in zip(*parts, strict=True)], expected)


@BACKEND
@pytest.mark.parametrize("layout", ("padded", "packed"))
@pytest.mark.parametrize("loss_type", ("gspo", "vespo"))
def test_tokens_of_all_ranks(loss_type, layout, backend, one_rank):
    batch = make_batch(**SMALL)
    batch = packed(batch) if layout == "packed" else batch
    cfg, calls = config(loss_type=loss_type), calls_of(backend)

    def gathered(_, hidden, weight, bias):
        local = calls.linear_logprobs(hidden, LMHead(weight, bias), batch.targets, batch.mask)
        logps, mask, old_logps = (
            gather_tokens(x, one_rank) for x in (local.logps, batch.mask, batch.old_logps)
        )
        return calls.grpo_loss(
            logps, batch.advantages, mask, old_logps=old_logps, config=cfg,
            cu_seqlens=batch.cu_seqlens,
        ).loss  # fmt: skip

    plain = plain_loss(batch, cfg, cu_seqlens=batch.cu_seqlens)
    expect_equal(run(gathered, calls, batch), run(plain, reference, batch))

"""What composes from public calls, as the documentation shows it, against the float64 reference."""

from dataclasses import replace
from itertools import chain

import pytest
import torch

from grpo_kernels import (
    batch_support,
    fused_grpo_loss,
    grpo_loss,
    linear_logprobs,
    per_token_kl,
    reference,
    selective_log_softmax,
)
from tests.support.batches import config, make_batch, relative_error, run_fused, with_padding
from tests.support.head_options import BACKENDS, objective_options
from tests.support.supports import make_support, with_logps_of

SMALL = {"B": 4, "T": 5, "H": 24, "V": 61}
WORDS = 47  # of 61 rows; the others are padding


def leaves_of(batch, dtype):
    """Hidden states, weight and bias, which require a gradient."""
    tensors = (batch.hidden.nan_to_num(), batch.weight, batch.bias)
    return [x.to(dtype, copy=True).requires_grad_() for x in tensors]


def assert_close(actual, expected, tolerance=2e-5):
    """Values first, then gradients, none of which is 0 throughout."""
    for mine, exact in zip(actual, expected, strict=True):
        assert exact.norm() > 0
        assert relative_error(mine, exact) <= tolerance


# The whole vocabulary's KL beside a truncated policy


def truncated_with_whole_kl(scores, loss_of, batch, support, cfg, dtype, **options):
    """The loss over a support, and beta times the KL to the reference over all words."""
    hidden, weight, bias = leaves_of(batch, dtype)
    head = (hidden, weight, batch.targets)
    given = {"bias": bias, "mask": batch.mask, **options}
    policy = scores(*head, support=support, **given).logps
    whole = scores(*head, **given).logps
    old_logps, ref_logps = batch.old_logps.to(dtype), batch.ref_logps.to(dtype)
    out = loss_of(policy, batch.advantages, batch.mask, old_logps=old_logps, config=cfg)
    kl = per_token_kl(whole, ref_logps, mask=batch.mask)
    loss = out.loss + 0.1 * kl.sum() / batch.mask.sum()
    loss.backward()
    return loss.detach(), hidden.grad, weight.grad, bias.grad


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("without", (0.0, 0.3), ids=("all", "mixed"))
@pytest.mark.parametrize("loss_type", ("dapo", "gspo", "vespo"))
def test_a_truncated_policy_with_the_kl_of_the_whole_one(loss_type, without, backend):
    batch, cfg = make_batch(**SMALL), config(loss_type=loss_type)
    support = make_support(batch, without=without, most=9)
    # The reference's log-probs are of the whole softmax, the old ones of the truncated one.
    batch.old_logps = with_logps_of(batch, support, bias=True).old_logps
    given = (batch, support, cfg)
    mine = truncated_with_whole_kl(
        linear_logprobs, grpo_loss, *given, torch.float32, backend=backend
    )
    exact = truncated_with_whole_kl(
        reference.linear_logprobs, reference.grpo_loss, *given, torch.float64
    )
    assert_close(mine, exact)


# Logits of the caller's own, truncated


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", (1.0, 0.7))
def test_masked_logits(temperature, backend):
    g = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(4, 6, 61, generator=g)
    targets = torch.randint(61, (4, 5), generator=g)
    kept = torch.rand(4, 5, 61, generator=g) < 0.2
    kept.scatter_(-1, targets[..., None], True)
    factors = torch.randn(4, 5, generator=g)
    results = []
    for call, dtype, options in (
        (selective_log_softmax, torch.float32, {"backend": backend}),
        (reference.selective_log_softmax, torch.float64, {}),
    ):
        x = logits.to(dtype, copy=True).requires_grad_()
        masked = x[:, :-1].masked_fill(~kept, -torch.inf)
        logps = call(masked, targets, temperature=temperature, **options)
        (factors.to(dtype) * logps).sum().backward()
        assert not x.grad[:, :-1][~kept].any()
        results.append((logps.detach(), x.grad))
    # That of the set alone, in the words of its definition.
    mine, exact = results
    z = (logits[:, :-1] / temperature).double()
    among = z.masked_fill(~kept, -torch.inf).logsumexp(-1)
    assert_close((mine[0],), (z.gather(-1, targets[..., None])[..., 0] - among,))
    assert_close(mine, exact)


# Sets without their target


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("objective", ("kl_old_delta", "gspo"))
def test_sets_that_lack_their_target_are_emptied(objective, backend):
    """Their tokens are then scored over the whole vocabulary; unless emptied they are refused."""
    batch = make_batch(**SMALL)
    B, T = batch.mask.shape
    g = torch.Generator().manual_seed(1)
    completions, sets, lacking = [], [], 0
    for targets in batch.targets.clamp(min=0):
        words = [torch.randperm(61, generator=g)[:7].tolist() for _ in range(T)]
        for i, target in enumerate(targets.tolist()):
            if i % 2:
                words[i] = [target, *(w for w in words[i] if w != target)]
            lacking += target not in words[i]
            sets.append(words[i] if target in words[i] else [])
        counts = torch.tensor([0, *map(len, words)])
        completions.append((torch.tensor([*chain(*words)]), counts.cumsum(0)))
    batch.mask = torch.ones_like(batch.mask)
    batch.hidden, batch.targets = batch.hidden.nan_to_num(), batch.targets.clamp(min=0)
    assert 0 < lacking < B * T
    support = batch_support(completions, T, targets=batch.targets)
    assert support[1].diff().tolist() == [len(words) for words in sets]
    assert support[0].tolist() == [*chain(*sets)]

    options = objective_options(objective)
    names = ("old_logps", "ref_logps", "sampling_logps")
    batch = replace(batch, **{name: getattr(batch, name).nan_to_num(-3, -3, -3) for name in names})
    exact = run_fused(batch, exact=True, support=support, **options)
    mine = run_fused(batch, exact=False, support=support, backend=backend, **options)
    assert_close((mine.loss, mine.logps), (exact.loss, exact.logps))
    assert_close(mine.gradients.values(), exact.gradients.values())
    with pytest.raises(
        ValueError, match=r"support: expected the target .*batch_support\(..., targets="
    ):
        run_fused(batch, exact=False, support=batch_support(completions, T), **options)


# Rows of the head beyond the vocabulary


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("objective", ("everything", "gspo"))
def test_rows_beyond_the_vocabulary(objective, backend):
    """`weight[:V]`: padding has no part in the softmax, and its gradient is 0."""
    batch = with_padding(make_batch(**SMALL), WORDS)
    options = objective_options(objective)
    del options["bias"]
    g = torch.Generator().manual_seed(0)
    lora = (0.3 * torch.randn(4, 5, 3, generator=g), 0.3 * torch.randn(61, 3, generator=g))
    logps = linear_logprobs(
        batch.hidden, batch.weight[:WORDS], batch.targets, mask=batch.mask,
        bias=batch.bias[:WORDS], low_rank=(lora[0], lora[1][:WORDS]),
    ).logps  # fmt: skip
    names = ("old_logps", "ref_logps", "sampling_logps")
    tensors = {
        name: logps + 0.2 * torch.randn(logps.shape, generator=g)
        for name in names if options.pop(name, False)
    }  # fmt: skip
    results = []
    for call, dtype, more in (
        (fused_grpo_loss, torch.float32, {"backend": backend}),
        (reference.fused_grpo_loss, torch.float64, {}),
    ):
        hidden, weight, bias = leaves_of(batch, dtype)
        a_out, lora_b = (x.to(dtype, copy=True).requires_grad_() for x in lora)
        out = call(
            hidden, weight[:WORDS], batch.targets, batch.advantages, batch.mask,
            bias=bias[:WORDS], low_rank=(a_out, lora_b[:WORDS]), **options, **more,
            **{name: x.to(dtype) for name, x in tensors.items()},
        )  # fmt: skip
        out.loss.backward()
        assert weight.grad.shape == (61, 24) and not weight.grad[WORDS:].any()
        assert not bias.grad[WORDS:].any() and not lora_b.grad[WORDS:].any()
        results.append(
            (out.loss.detach(), hidden.grad, weight.grad, bias.grad, a_out.grad, lora_b.grad)
        )
    assert_close(*results)


# Tokens that have no gradient, left out


def left_out(batch, cfg):
    """The mask without sequences of advantage 0, and the denominator with them."""
    trained = batch.advantages != 0
    by_tokens = cfg.effective_aggregation in ("dapo", "bnpo")
    num_items = batch.mask.sum() if by_tokens else len(batch.mask)
    return batch.mask & trained[:, None], num_items


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("loss_type", ("grpo", "dapo", "luspo", "dr_grpo", "gspo", "vespo"))
def test_a_smaller_mask_with_the_whole_denominator(loss_type, backend):
    """The loss and the gradients are those of all tokens."""
    batch, cfg = make_batch(), config(loss_type=loss_type)
    mask, num_items = left_out(batch, cfg)
    assert 0 < mask.sum() < batch.mask.sum()
    options = {"config": cfg, "old_logps": True, "bias": True}
    exact = run_fused(batch, exact=True, **options)
    mine = run_fused(
        replace(batch, mask=mask), exact=False, num_items=num_items, backend=backend, **options
    )
    assert_close((mine.loss,), (exact.loss,))
    assert_close(mine.gradients.values(), exact.gradients.values())
    left = batch.mask & ~mask
    assert not mine.logps[left].any() and exact.logps[left].all()

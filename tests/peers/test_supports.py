"""What sampling kept, through each integration: what masked rows of logits give."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra 'test'")

from grpo_kernels import GRPOLossConfig
from grpo_kernels.head import Support
from grpo_kernels.integrations.liger import FusedLinearGRPOLoss
from grpo_kernels.integrations.transformers import Objective, attach_fused_head
from grpo_kernels.integrations.verl import linear_cross_entropy
from tests.helpers.batches import make_batch, relative_error
from tests.helpers.masked_logits import masked_logps
from tests.helpers.model_families import family_model
from tests.helpers.supports import make_support
from tests.helpers.tiny_models import V

pytestmark = pytest.mark.usefixtures("real_memory")
B, T = 4, 9


def wide(*tensors):
    return [x.detach().double().requires_grad_() for x in tensors]


def dapo(logps, old_logps, advantages, mask, ref_logps=None, beta=0.0):
    """The clipped loss, a mean over tokens."""
    ratio = (logps - old_logps).exp()
    surrogate = torch.min(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    kl = (ref_logps - logps).exp() - (ref_logps - logps) - 1 if beta else 0.0
    return ((beta * kl - surrogate) * mask).sum() / mask.sum()


def batch_with_support():
    batch = make_batch(B=B, T=T, H=16, V=101)
    batch.hidden, batch.targets = batch.hidden.nan_to_num(), batch.targets.clamp(0, 100)
    return batch, make_support(batch, most=20)


@pytest.mark.parametrize("reduction", ("none", "mean"))
def test_verl(reduction):
    batch, support = batch_with_support()
    hidden, weight = (x.clone().requires_grad_() for x in (batch.hidden, batch.weight))
    logps, entropy = linear_cross_entropy(
        hidden, weight, batch.targets, 0.7, reduction, support=support, mask=batch.mask
    )
    exact = wide(hidden, weight)
    logits = exact[0] @ exact[1].T / 0.7
    wanted, wanted_entropy = masked_logps(logits, batch.targets, support, batch.mask)
    wanted = wanted if reduction == "none" else wanted.mean()
    torch.testing.assert_close(logps.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), wanted_entropy, rtol=1e-5, atol=1e-5)
    for values in ((logps, entropy), (wanted, wanted_entropy)):
        (values[0].sum() + 0.3 * (values[1] * torch.arange(T)).sum()).backward()
    for mine, theirs in zip((hidden, weight), exact, strict=True):
        assert relative_error(mine.grad, theirs.grad) < 1e-4


@pytest.mark.parametrize("reference", ("logps", "head"))
def test_liger(reference):
    batch, support = batch_with_support()
    g = torch.Generator().manual_seed(5)
    ref_hidden = batch.hidden + 0.1 * torch.randn(batch.hidden.shape, generator=g)
    hidden, weight = (x.clone().requires_grad_() for x in (batch.hidden, batch.weight))
    exact = wide(hidden, weight)

    def exact_logps(states):
        return masked_logps(states @ exact[1].T / 0.7, batch.targets, support, batch.mask)[0]

    with torch.no_grad():
        old_logps = exact_logps(exact[0]) + 0.3 * torch.randn(B, T, generator=g)
        ref_logps = exact_logps(ref_hidden.double())
    given = {"ref_per_token_logps": ref_logps.float()}
    if reference == "head":
        given = {"ref_input": ref_hidden, "ref_weight": batch.weight}
    grpo = FusedLinearGRPOLoss(beta=0.1, loss_type="dapo", temperature=0.7)
    loss, (kl, clipped) = grpo(
        hidden, weight, batch.targets, batch.mask, batch.advantages,
        old_per_token_logps=old_logps.float(), support=support, **given,
    )  # fmt: skip
    wanted = dapo(
        exact_logps(exact[0]), old_logps, batch.advantages, batch.mask, ref_logps, beta=0.1
    )
    assert float(loss) == pytest.approx(float(wanted), rel=1e-4)
    assert kl > 0 and 0 < clipped < 1
    loss.backward()
    wanted.backward()
    for mine, theirs in zip((hidden, weight), exact, strict=True):
        assert relative_error(mine.grad, theirs.grad) < 1e-4


def model_with_labels():
    """Padding on both sides, and prompts of two lengths."""
    model = family_model("qwen2")
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(5, V, (3, 11), generator=g)
    attention_mask = torch.ones_like(ids)
    attention_mask[0, :2] = attention_mask[1, -2:] = 0
    labels = ids.masked_fill(attention_mask == 0, -100)
    labels[:, :5] = -100
    labels[2, :7] = -100
    return model, {"input_ids": ids, "attention_mask": attention_mask}, labels


@pytest.mark.parametrize("labels_as", ("labels", "kept", "shifted"))
@pytest.mark.parametrize("asked", ("logps", "loss"))
def test_transformers(asked, labels_as):
    model, inputs, labels = model_with_labels()
    logits = model(**inputs, use_cache=False).logits[:, :-1]
    targets, own_mask = labels[:, 1:].clamp(min=0), torch.ones(3, 10, dtype=torch.bool)
    call = {"labels": labels}
    if labels_as == "kept":
        logits, targets, own_mask = (x[:, -6:] for x in (logits, targets, own_mask))
        call["logits_to_keep"] = 6
    elif labels_as == "shifted":
        call = {"shift_labels": torch.cat([labels[:, 1:], torch.full((3, 1), -100)], 1)}
        logits, targets, own_mask = (
            torch.cat([x, x[:, -1:]], 1) for x in (logits, targets, own_mask)
        )
    own_mask = own_mask.clone()
    own_mask[1, -4] = False  # a tool's token
    mask = torch.nn.functional.pad(labels[:, 1:] != -100, (0, 1))[:, : targets.shape[1]]
    if labels_as == "kept":
        mask = labels[:, -6:] != -100
    mask = mask & own_mask
    support = make_support(SimpleNamespace(weight=range(V), targets=targets, mask=mask))
    wanted, wanted_entropy = masked_logps(logits / 0.7, targets, support, mask)

    attach_fused_head(model, temperature=0.7)
    given = {"mask": own_mask, "support": support}
    if asked == "loss":
        g = torch.Generator().manual_seed(1)
        advantages = torch.randn(3, generator=g)
        old_logps = wanted.detach() + 0.3 * torch.randn(wanted.shape, generator=g)
        config = GRPOLossConfig(loss_type="dapo")
        objective = Objective(advantages, old_logps=old_logps, config=config, **given)
        wanted_loss = dapo(wanted, old_logps, advantages, mask)
    else:
        objective = Objective(**given)
        wanted_loss = (wanted * torch.arange(targets.shape[1])).sum() + wanted_entropy.sum()
    expected = torch.autograd.grad(wanted_loss, [*model.parameters()])
    out = model(**inputs, **call, fused_head=objective)
    torch.testing.assert_close(out.logps, wanted.detach(), rtol=1e-4, atol=1e-4, check_dtype=False)
    torch.testing.assert_close(out.entropy, wanted_entropy, rtol=1e-4, atol=1e-4)
    loss = out.loss
    if asked == "logps":
        loss = (out.logps * torch.arange(targets.shape[1])).sum() + out.entropy.sum()
    loss.backward()
    assert float(loss) == pytest.approx(float(wanted_loss), rel=1e-4, abs=1e-5)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        if gradient.norm() > 1e-7:
            assert relative_error(parameter.grad, gradient) < 2e-4


@pytest.mark.parametrize("integration", ("transformers", "liger", "verl"))
def test_targets_that_are_out(integration):
    """An error where the kept set lacks the target."""
    batch, _ = batch_with_support()
    mask = torch.ones_like(batch.mask)
    wrong = (batch.targets.flatten() + 1) % 101
    support = Support(wrong, torch.arange(len(wrong) + 1))
    with pytest.raises(ValueError, match="support"):
        if integration == "verl":
            linear_cross_entropy(batch.hidden, batch.weight, batch.targets, support=support)
        elif integration == "liger":
            FusedLinearGRPOLoss(beta=0.1, loss_type="grpo")(
                batch.hidden, batch.weight, batch.targets, mask, torch.zeros(B),
                ref_input=batch.hidden, ref_weight=batch.weight, support=support,
            )  # fmt: skip
        else:
            model, inputs, labels = model_with_labels()
            attach_fused_head(model)
            wrong = (labels[:, 1:].clamp(min=0).flatten() + 1) % V
            objective = Objective(support=Support(wrong, torch.arange(len(wrong) + 1)))
            model(**inputs, labels=labels, fused_head=objective)

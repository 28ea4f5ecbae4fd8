"""An objective of the user's own: a callable on per-token tensors in place of a loss type."""

import pytest
import torch

from grpo_kernels import GRPOLossConfig, grpo_loss
from tests.support.batches import config, make_batch, packed, relative_error, run_fused


def clipped(tokens):
    A = tokens.advantages
    return -torch.minimum(tokens.ratio * A, tokens.ratio.clamp(0.8, 1.2) * A)


def sequence_clipped(tokens):
    ratio = tokens.sequence_mean(tokens.log_ratio).exp()
    A = tokens.advantages
    return -torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A)


def entropy_scaled(tokens):
    return -tokens.advantages * tokens.logps * tokens.entropy.detach() - 0.1 * tokens.entropy


@pytest.mark.parametrize("layout", ("padded", "packed"))
@pytest.mark.parametrize("aggregation", ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"))
@pytest.mark.parametrize(
    ("own", "built_in"), ((clipped, "dapo"), (sequence_clipped, "gspo")), ids=("token", "sequence")
)
def test_equals_the_built_in_one(own, built_in, aggregation, layout):
    batch = make_batch(B=6, T=11)
    batch = packed(batch) if layout == "packed" else batch
    shared = {"beta": 0.1, "is_correction": "token_truncate", "entropy_coef": 0.01}
    tensors = dict.fromkeys(("old_logps", "ref_logps", "sampling_logps"), True)
    mine = config(loss_type=own, aggregation=aggregation, **shared)
    if built_in == "dapo":
        theirs = config(loss_type=aggregation, **shared)
    else:
        theirs = config(loss_type="gspo", aggregation=aggregation, **shared)
        # The KL of the callable's config is corrected by the token's ratio.
        mine, theirs = (
            type(x)(**{**vars(x), "use_bias_correction_kl": False}) for x in (mine, theirs)
        )
    a = run_fused(batch, exact=False, config=mine, **tensors)
    b = run_fused(batch, exact=True, config=theirs, **tensors)
    assert a.loss.item() == pytest.approx(b.loss.item(), rel=1e-5)
    for name in ("hidden", "weight"):
        assert relative_error(a.gradients[name], b.gradients[name]) <= 2e-5


@pytest.mark.parametrize("own", (clipped, sequence_clipped, entropy_scaled))
def test_against_reference(own):
    """Also where it takes the gradient of the entropy."""
    batch, cfg = make_batch(B=6, T=11), GRPOLossConfig(loss_type=own)
    expected = run_fused(batch, exact=True, config=cfg, old_logps=True)
    actual = run_fused(batch, exact=False, config=cfg, old_logps=True)
    assert actual.metrics.keys() == expected.metrics.keys()
    for name in ("hidden", "weight"):
        assert relative_error(actual.gradients[name], expected.gradients[name]) <= 2e-5


def test_masked_tokens_are_zeros_and_stay_out():
    seen = []

    def objective(tokens):
        seen.append(tokens)
        # 0 where masked: its logarithm is -inf, its square root has an infinite slope.
        return tokens.logps * (1 + (-tokens.old_logps).log().detach())

    batch = make_batch()
    old = -batch.old_logps.abs()
    logps = old.masked_fill(~batch.mask, 0.0).requires_grad_()
    cfg = GRPOLossConfig(loss_type=objective)
    out = grpo_loss(logps, batch.advantages, batch.mask, old_logps=old, config=cfg)
    out.loss.backward()
    assert out.loss.isfinite() and logps.grad.isfinite().all()
    flat = ~batch.mask.flatten()
    for x in (seen[0].logps, seen[0].old_logps, seen[0].advantages, seen[0].mask):
        assert x.shape == flat.shape and (x[flat] == 0).all()


@pytest.mark.parametrize(
    ("own", "error", "message"),
    (
        (lambda t: t.logps.sum(), ValueError, r"loss_type: expected .*\[36\]; got \[\]"),
        (lambda t: 1.0, TypeError, "loss_type: expected the callable .* a tensor .*; got float"),
        (lambda t: t.advantages, ValueError, "with a gradient for tokens.logps or .*; got none"),
    ),
)  # fmt: skip
def test_refuses(own, error, message):
    batch = make_batch()
    cfg = GRPOLossConfig(loss_type=own)
    with pytest.raises(error, match=message):
        run_fused(batch, exact=False, config=cfg)


def test_sequences_need_cu_seqlens():
    cfg = GRPOLossConfig(loss_type=sequence_clipped)
    with pytest.raises(ValueError, match="cu_seqlens: expected offsets"):
        grpo_loss(torch.zeros(5, requires_grad=True), torch.ones(5), config=cfg)

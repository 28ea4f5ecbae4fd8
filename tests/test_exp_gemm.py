"""The GEMM that leaves exponentials of logits: its kernels, and calls that take it."""

import pytest
import torch
import triton

from grpo_kernels import (
    Execution,
    GRPOLossConfig,
    LMHead,
    Reference,
    fused_grpo_loss,
    linear_logprobs,
)
from grpo_kernels.kernels import LogitTransform, TokenStats
from grpo_kernels.kernels.triton_exp_gemm import TILES, Tile, exp_gemm
from tests.helpers.batches import make_batch
from tests.helpers.tiers import INTERPRETED

TAKEN = Execution(backend="triton", exp_gemm=True)
SMALL = Tile(16, 32, 16, warps=4)


def operands(M, V, H, scale=0.3, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(M, H, generator=g).bfloat16()
    weight = (scale * torch.randn(V, H, generator=g)).bfloat16()
    return hidden.to(dtype), weight.to(dtype), torch.randint(V, (M,), generator=g)


def left(hidden, weight, targets, transform, tile=SMALL, dtype=torch.float32):
    """Statistics, and the exponentials as probabilities; NaN where nothing was written."""
    out = TokenStats.empty(hidden, entropy=True, total=True)
    for x in out:
        x.fill_(torch.nan)
    exps = torch.full((len(hidden), len(weight)), torch.nan, dtype=dtype)
    exp_gemm(hidden, weight, targets, transform, out, exps=exps, tile=tile)
    return out, exps.double() / out.total[:, None]


def expected(hidden, weight, targets, transform):
    """Log-probs, logsumexp and entropy, and p with p - 1 at the target, in float64."""
    z = hidden.double() @ weight.double().T * transform.logit_scale / transform.per_row
    log_p = z.log_softmax(1)
    logps = log_p.gather(1, targets[:, None])
    p = log_p.exp().scatter(1, targets[:, None], logps.expm1())
    return logps[:, 0], z.logsumexp(1), -(log_p.exp() * log_p).sum(1), p


TRANSFORMS = {
    "plain": LogitTransform(),
    "scaled": LogitTransform(1.3, None, 0.7),
    "temperatures": LogitTransform(1.0, None, torch.linspace(0.6, 1.4, 37)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("V, H", [(203, 40), (64, 16), (31, 33)])
def test_values(V, H, transform):
    """Rows, columns and inner sizes that no tile divides."""
    hidden, weight, targets = operands(37, V, H)
    given = (hidden, weight, targets, TRANSFORMS[transform])
    found, p = left(*given)
    logps, logsumexp, entropy, probs = expected(*given)
    assert (found.logps - logps).abs().max() <= 2e-5
    assert (found.logsumexp - logsumexp).abs().max() <= 2e-5
    assert (found.entropy - entropy).abs().max() <= 2e-5
    assert (p - probs).abs().max() <= 2e-6
    # From the target's logit, so by the GEMM: no row was computed again.
    assert (found.total.double().log() + logps).abs().max() <= 2e-5


def test_parts_of_a_tile():
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    given = (*operands(40, 150, 40, dtype=dtype), LogitTransform())
    found, p = left(*given, tile=Tile(32, 128, 16, warps=2, parts=2))
    assert (found.logps - expected(*given)[0]).abs().max() <= 2e-5
    assert (p - expected(*given)[3]).abs().max() <= 2e-6


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tile", [SMALL, Tile(32, 64, 32, warps=4)])
def test_half_precision(tile, dtype):
    """From the kernel's PTX, with tensor cores; X in bf16, whose range e^(z - a) needs."""
    hidden, weight, targets = operands(37, 203, 72, dtype=dtype)
    given = (hidden, weight, targets, LogitTransform())
    found, p = left(*given, tile=tile, dtype=torch.bfloat16)
    logps, logsumexp, entropy, probs = expected(*given)
    assert (found.logps - logps).abs().max() <= 2e-5
    assert (found.logsumexp - logsumexp).abs().max() <= 2e-5
    assert (found.entropy - entropy).abs().max() <= 2e-5
    assert ((p - probs).abs() <= 2**-8 * probs.abs() + 1e-7).all()


@pytest.mark.compiled
def test_the_tile_of_a_gpu():
    """On an A100 as it is launched there; larger ones take instructions that nothing here runs."""
    arch = triton.runtime.driver.active.get_current_target().arch
    if arch != 80:
        pytest.skip(f"the tile of sm_80, not of sm_{arch}")
    given = (*operands(150, 400, 200, dtype=torch.bfloat16), LogitTransform())
    found, p = left(*given, tile=TILES[(8,)], dtype=torch.bfloat16)
    logps, _, entropy, probs = expected(*given)
    assert (found.logps - logps).abs().max() <= 2e-5
    assert (found.entropy - entropy).abs().max() <= 2e-5
    assert ((p - probs).abs() <= 2**-8 * probs.abs() + 1e-7).all()


def test_rows_out_of_reach():
    """Targets of log-probs down to -500: e^(z - a) has no place in float32."""
    given = (*operands(21, 203, 40, scale=9.0), LogitTransform())
    found, p = left(*given)
    logps, logsumexp, entropy, probs = expected(*given)
    assert (logps < -100).sum() > 5 and (logps > -60).any()
    torch.testing.assert_close(found.logps.double(), logps, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found.logsumexp.double(), logsumexp, rtol=1e-5, atol=0.0)
    assert (found.entropy - entropy).abs().max() <= 1e-4
    assert (p - probs).abs().max() <= 1e-4


def test_a_row_depends_on_no_other():
    hidden, weight, targets = operands(37, 203, 40)
    whole, p = left(hidden, weight, targets, LogitTransform())
    order = torch.randperm(37, generator=torch.Generator().manual_seed(1))[:19]
    some, of_some = left(hidden[order], weight, targets[order], LogitTransform())
    for x, y in zip((*whole, p), (*some, of_some), strict=True):
        torch.testing.assert_close(x[order], y, rtol=1e-6, atol=1e-6)


def test_operands_may_have_any_strides():
    hidden, weight, targets = operands(21, 70, 24)
    given = (hidden, weight, targets, LogitTransform())
    across = (hidden.t().contiguous().t(), weight.t().contiguous().t(), *given[2:])
    for x, y in zip(left(*across)[0], left(*given)[0], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        found, expected = (linear_logprobs(*x[:3], execution=TAKEN).logps for x in (across, given))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_nan_stays_in_its_row():
    hidden, weight, targets = operands(5, 70, 20)
    hidden[2, 3] = torch.nan
    found, p = left(hidden, weight, targets, LogitTransform())
    others = [0, 1, 3, 4]
    assert found.logps[2].isnan() and p[2].isnan().all()
    assert found.logps[others].isfinite().all() and p[others].isfinite().all()


NEEDS_LOGITS = {
    "with a softcap": {"head": {"softcap": 20.0}},
    "with operands of two dtypes": {"dtype": torch.bfloat16},
    "with a bias or a LoRA": {"head": {"bias": torch.zeros(203)}},
    "where torch computes": {"execution": {"backend": "torch"}},
    "with batch_invariant": {"execution": {"batch_invariant": True}},
    "with a matmul": {"execution": {"matmul": torch.mm}},
    "where the gradient takes a second sweep": {"config": {"entropy_coef": 0.1}},
    "with a reference whose KL is exact": {
        "config": {"kl_estimator": "exact", "beta": 0.1}, "reference": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("reason", NEEDS_LOGITS)
def test_what_needs_logits_is_refused_or_has_them(reason):
    batch, options = make_batch(B=2, T=5, H=24, V=203), NEEDS_LOGITS[reason]
    hidden = batch.hidden.clone().requires_grad_()
    head = LMHead(batch.weight.to(options.get("dtype", torch.float32)), **options.get("head", {}))
    given = {"config": GRPOLossConfig(**options.get("config", {}))}
    if "reference" in options:
        given["reference"] = Reference(batch.hidden, batch.weight)
    execution = {"backend": "triton"} | options.get("execution", {})

    def call(taken):
        return fused_grpo_loss(
            hidden, head, batch.targets, batch.advantages, batch.mask,
            execution=Execution(**execution, exp_gemm=taken), **given,
        )  # fmt: skip

    with pytest.raises(ValueError, match=f"exp_gemm: expected False or None {reason}; got True"):
        call(True)
    assert torch.equal(call(None).loss, call(False).loss)


def test_no_card_is_measured():
    """Today's path on any card that nobody has measured."""
    batch = make_batch(B=2, T=5, H=24, V=203)
    given = (batch.hidden, batch.weight, batch.targets, batch.mask)
    asked = [linear_logprobs(*given, execution=Execution(exp_gemm=x)).logps for x in (None, False)]
    assert torch.equal(*asked)

"""Logits as the model's head has them: rounded to its dtype; -inf where a bias bans an entry."""

import pytest
import torch

import grpo_kernels
from grpo_kernels import (
    Execution,
    GRPOLossConfig,
    LMHead,
    Support,
    fused_grpo_loss,
    linear_logprobs,
    reference,
)
from tests.helpers.batches import (
    config,
    exact_batch,
    make_batch,
    relative_error,
    run_fused,
)
from tests.helpers.half_gemms import imitate
from tests.helpers.head_options import BACKENDS, CHUNK, OPTIONS, expect_equal, objective_options
from tests.helpers.supports import csr

ROUNDED = {"logits_dtype": "model"}


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=("bf16", "fp16"))
@pytest.mark.parametrize("option", ("old_logps", "entropy", "everything"))
def test_gemms_in_half_precision_round_their_own_result(option, dtype, monkeypatch):
    imitate(monkeypatch, dtype)
    config_options, options = OPTIONS[option]
    head = {**options.get("head", {}), **ROUNDED}
    options = {**options, "head": head, "config": config(**config_options), "scale": 4.0}
    batch = exact_batch(dtype, B=8, T=16)
    how = Execution(chunk_bytes=24 * 1003 * 5)
    expect_equal(batch, options, tolerance=5e-3, execution=how)


def test_log_probs_are_those_of_an_eager_head_in_bf16():
    batch = make_batch().to("cpu", torch.bfloat16)
    hidden = torch.where(batch.mask[..., None], batch.hidden, 0.0)
    targets = batch.targets.clamp(min=0)
    logits = torch.nn.functional.linear(hidden, batch.weight)
    assert logits.dtype == torch.bfloat16
    eager = logits.float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    ours = linear_logprobs(hidden, LMHead(batch.weight, **ROUNDED), targets).logps
    unrounded = linear_logprobs(hidden, batch.weight, targets).logps
    # A sum that lies between two bf16 numbers may go the other way.
    gaps = (ours - eager).abs()
    assert gaps.median() < 1e-5 and gaps.mean() < 0.05 * (unrounded - eager).abs().mean()


def test_nothing_is_rounded_in_float32():
    batch = make_batch()
    hidden, *args = batch.hidden, batch.targets, batch.advantages, batch.mask
    heads = batch.weight, LMHead(batch.weight, **ROUNDED)
    assert torch.equal(*(fused_grpo_loss(hidden, head, *args).logps for head in heads))


def test_autocast_says_what_the_model_s_dtype_is():
    batch = exact_batch()
    hidden, head = batch.hidden.float(), LMHead(batch.weight.float(), **ROUNDED)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = linear_logprobs(hidden, head, batch.targets, batch.mask).logps
    head = LMHead(batch.weight, **ROUNDED)
    half = linear_logprobs(batch.hidden, head, batch.targets, batch.mask).logps
    assert torch.equal(ours, half)


BANNED = 40


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("softcap", (None, 6.0), ids=("plain", "softcap"))
@pytest.mark.parametrize("objective", ("old_logps", "entropy", "is_sequence_on_policy"))
def test_a_bias_of_minus_infinity_bans_an_entry(objective, softcap, backend):
    """A banned entry has no probability and no gradient, as if the head lacked the row."""
    batch = make_batch()
    batch.targets = torch.where(batch.targets < BANNED, batch.targets + BANNED, batch.targets)
    batch.targets = batch.targets.masked_fill(~batch.mask, -100)
    batch.bias[:BANNED] = -torch.inf
    how = Execution(backend=backend, chunk_bytes=CHUNK)
    options = {**objective_options(objective), "execution": how}
    if softcap is not None:
        options["head"] |= {"softcap": softcap, "temperature": True, "logit_scale": 0.8}
    banned = expect_equal(batch, options)
    fewer = make_batch()
    for name in ("weight", "bias"):
        setattr(fewer, name, getattr(batch, name)[BANNED:].contiguous())
    fewer.targets = batch.targets - BANNED
    without = run_fused(fewer, exact=False, **options)
    assert abs(banned.loss - without.loss) < 1e-6
    assert not banned.gradients["weight"][:BANNED].any() and without.gradients["weight"].any()
    for name in ("weight", "bias"):
        assert relative_error(banned.gradients[name][BANNED:], without.gradients[name]) < 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lift", (-124.0, 124.0, 200.0))
@pytest.mark.parametrize("call", ("loss", "entropy", "logprobs", "several", "entries"))
def test_a_softcap_keeps_the_digits_of_its_slope_where_it_is_flat(call, lift, backend):
    """Logits of 124 under a cap of 30, which models reach; the slope there is 1e-3, then 6e-6."""
    batch = exact_batch(V=211)
    hidden, targets, mask = batch.hidden.nan_to_num(), batch.targets, batch.mask
    results = []
    for module, dtype in ((reference, torch.float64), (grpo_kernels, torch.float32)):
        leaves = [
            x.to(dtype, copy=True).requires_grad_()
            for x in (hidden, batch.weight, batch.bias + lift)
        ]
        head = LMHead(*leaves[1:], softcap=30.0, temperature=0.8)
        how = {} if module is reference else {"execution": Execution(backend=backend)}
        if call in ("loss", "entropy"):
            cfg = GRPOLossConfig(entropy_coef=0.1 * (call == "entropy"))
            advantages = batch.advantages.to(dtype)
            module.fused_grpo_loss(
                leaves[0], head, targets, advantages, mask, config=cfg, **how
            ).loss.backward()
        else:
            ids = targets.clamp(min=0)
            several = torch.stack([ids, (ids * 7 + 1) % 211, ids], -1)
            if call == "entries":
                ids, several = None, several[..., :2]
                offsets = torch.arange(mask.numel() + 1) * 2
                how |= {"support": Support(several.flatten(), offsets), "entries": True}
            target_ids = several if call == "several" else ids
            logps = module.linear_logprobs(leaves[0], head, target_ids, **how).logps
            (logps * (torch.arange(logps.numel()) % 5).view(logps.shape)).sum().backward()
        results.append([x.grad for x in leaves])
    for truth, actual in zip(*results, strict=True):
        assert truth.norm() > 0 and relative_error(actual, truth) < 2e-5


@pytest.mark.parametrize("softcap", (None, 6.0), ids=("plain", "softcap"))
def test_a_banned_entry_of_a_kept_set(softcap):
    batch = make_batch(B=1, T=4)
    mask, targets = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[5, 6, 7, 8]])
    batch.bias[:2] = -torch.inf
    support = csr([[5, 0, 9], [6, 1], [7, 300], [8]])
    results = []
    for module, dtype in ((reference, torch.float64), (grpo_kernels, torch.float32)):
        tensors = (batch.hidden.nan_to_num(), batch.weight, batch.bias)
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in tensors]
        entropy = {} if module is reference else {"entropy": True}
        head = LMHead(*leaves[1:], softcap=softcap)
        out = module.linear_logprobs(leaves[0], head, targets, mask, support=support, **entropy)
        (out.logps.sum() + out.entropy.sum()).backward()
        results.append([out.logps, out.entropy, *(x.grad for x in leaves)])
    for truth, actual in zip(*results, strict=True):
        assert (actual - truth).norm() <= 1e-5 * truth.norm() > 0

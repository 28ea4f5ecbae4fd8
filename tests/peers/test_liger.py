"""Liger's class and ours on batches that hypothesis draws; the reference where Liger is wrong."""

import inspect
import sys
from types import ModuleType
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.batches import clean, make_batch, relative_error
from tests.helpers.head_options import watch_products

pytest.importorskip("liger_kernel", reason="needs the extra 'test'")
from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss

from grpo_kernels import GRPOLossConfig, fused_grpo_loss
from grpo_kernels.head.execution import Execution
from grpo_kernels.head.products import INVARIANT_ROWS
from grpo_kernels.integrations.liger import FusedLinearGRPOLoss, patch_liger
from grpo_kernels.integrations.verl import linear_cross_entropy

# Options of Liger 0.8.5; older versions have fewer.
_SOURCE = inspect.getsource(inspect.getmodule(LigerFusedLinearGRPOLoss))
_OPTIONS = inspect.signature(LigerFusedLinearGRPOLoss.__init__).parameters
_ARGUMENTS = inspect.signature(LigerFusedLinearGRPOLoss.forward).parameters
ALL_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")

LOSS_TYPES = tuple(name for name in ALL_LOSS_TYPES if f'"{name}"' in _SOURCE)


OPTIONS = {
    "loss_type": LOSS_TYPES, "importance_sampling_level": ("token", "sequence"),
    "beta": (0.0, 0.04, 0.3), "use_bias_correction_kl": (False, True), "epsilon_low": (0.1, 0.2),
    "epsilon_high": (0.2, 0.28, 1.2), "delta": (None, 1.3, 2.0), "temperature": (1.0, 0.7),
    "use_ref_model": (False, True),
}  # fmt: skip
CALL = {
    "reference": ("logps", "head"), "old": (False, True),
    "ratio": (None, "token", "sequence", "flat"), "num_items": (None, 31), "bias": (False, True),
    "B": range(1, 6), "T": range(2, 10), "seed": range(10_000),
}  # fmt: skip
CASE = {
    "reference": "logps", "old": True, "ratio": None, "num_items": None, "bias": True, "B": 3,
    "T": 6, "seed": 1,
}  # fmt: skip


def drawn(table):
    return st.fixed_dictionaries({name: st.sampled_from(values) for name, values in table.items()})


def arguments_of(options, case):
    B, T = case["B"], case["T"]
    batch = make_batch(B=B, T=T, H=16, V=101, seed=case["seed"])
    mask = batch.mask
    if not mask.any():
        mask[0, 0] = True
    g = torch.Generator().manual_seed(case["seed"])
    old = clean(batch.old_logps, mask).float()
    call = {"old_per_token_logps": old if case["old"] else None}
    if options["use_ref_model"]:
        if case["reference"] == "logps":
            call["ref_per_token_logps"] = old + 0.3 * torch.randn(old.shape, generator=g)
        else:
            # A policy that has moved away from its reference, not another model.
            hidden, weight = batch.hidden.nan_to_num(), batch.weight
            call["ref_input"] = hidden + 0.1 * torch.randn(hidden.shape, generator=g)
            call["ref_weight"] = weight + 0.1 * torch.randn(weight.shape, generator=g)
            call["ref_bias"] = batch.bias if case["bias"] else None
    if case["ratio"] is not None and "vllm_is_ratio" in _ARGUMENTS:
        ratio = torch.rand(B, T if case["ratio"] == "token" else 1, generator=g) + 0.3
        # Tokens that the sampler's correction masks have ratio 0.
        ratio = torch.where(torch.rand(ratio.shape, generator=g) < 0.2, 0.0, ratio)
        # TRL passes 1 where the mask is 0.
        call["vllm_is_ratio"] = torch.where(mask, ratio, 1.0) if ratio.shape[1] == T else ratio
        if case["ratio"] == "flat":
            call["vllm_is_ratio"] = ratio[:, 0]
    if options["loss_type"] in ("dapo", "cispo", "vespo") and "num_items_in_batch" in _ARGUMENTS:
        call["num_items_in_batch"] = case["num_items"]
    head = {
        "hidden": batch.hidden.nan_to_num(), "weight": batch.weight,
        "bias": batch.bias if case["bias"] else None,
    }  # fmt: skip
    return batch, head, call


def run(module, batch, head, call):
    leaves = {k: None if x is None else x.clone().requires_grad_() for k, x in head.items()}
    loss, metrics = module(
        leaves["hidden"], leaves["weight"], batch.targets.clamp(min=0), batch.mask.float(),
        batch.advantages, bias=leaves["bias"], **call,
    )  # fmt: skip
    (2.0 * loss).backward()
    return loss, metrics, {k: x.grad for k, x in leaves.items() if x is not None}


@given(drawn(OPTIONS), drawn(CALL))
def test_the_same_as_liger(options, case):
    loss_type = options["loss_type"]
    # Older versions weight the KL of luspo by the length as well.
    old_luspo = loss_type == "luspo" and "num_items_in_batch" not in _ARGUMENTS
    if loss_type in ("cispo", "sapo", "vespo") or old_luspo:
        options["importance_sampling_level"] = "token"
    if loss_type == "dr_grpo":
        options["max_completion_length"] = 13
    options = {k: v for k, v in options.items() if k in _OPTIONS}
    batch, head, call = arguments_of(options, case)
    # Liger's luspo counts padding, so there is none.
    if loss_type == "luspo":
        batch.mask = torch.ones_like(batch.mask)
    loss, metrics, ours = run(FusedLinearGRPOLoss(**options), batch, head, call)
    expected, expected_metrics, theirs = run(
        LigerFusedLinearGRPOLoss(compiled=False, **options), batch, head, call
    )
    torch.testing.assert_close(loss, expected, rtol=3e-5, atol=3e-5)
    assert len(metrics) == len(expected_metrics) == 1 + bool(options["beta"])
    for metric, other in zip(metrics, expected_metrics, strict=True):
        torch.testing.assert_close(metric, other, rtol=1e-4, atol=1e-5, check_dtype=False)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        # Differences of large terms have fewer digits.
        floor = 1e-2 * float(head[name].norm()) / head[name].numel() ** 0.5
        assert relative_error(ours[name], gradient, floor) < 1e-3, name


def test_where_liger_is_wrong():
    """Liger splits advantages per token wrongly, and counts padding in luspo."""
    batch = make_batch(B=4, T=9, H=16, V=101)
    head = {"hidden": batch.hidden.nan_to_num(), "weight": batch.weight, "bias": None}
    batch.advantages = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    old_logps = clean(batch.old_logps, batch.mask).float()
    args = batch.targets, batch.advantages, batch.mask
    for loss_type in ("grpo", "luspo"):
        module = FusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type=loss_type)
        loss, *_ = run(module, batch, head, {"old_per_token_logps": old_logps})
        config = GRPOLossConfig(loss_type=loss_type)
        expected = fused_grpo_loss(
            head["hidden"], head["weight"], *args, old_logps=old_logps, config=config
        )
        torch.testing.assert_close(loss, expected.loss)


@pytest.mark.parametrize("loss_type", ("dapo", "vespo"))
@pytest.mark.parametrize("masked", ("a sequence", "all"))
def test_masked_positions_may_hold_anything(masked, loss_type):
    """NaN there gives what zeros give, and a sequence without tokens gives nothing."""
    options = {"use_ref_model": True, "loss_type": loss_type}
    batch, head, call = arguments_of(options, CASE | {"ratio": "sequence"})
    batch.mask[2 if masked == "a sequence" else 0 :] = False
    assert masked == "all" or batch.mask.any()
    level, results = "sequence" if loss_type == "dapo" else "token", []
    for filler in (0.0, torch.nan):
        states = head["hidden"].masked_fill(~batch.mask[..., None], filler)
        names = ("old_per_token_logps", "ref_per_token_logps")
        filled = {name: call[name].masked_fill(~batch.mask, filler) for name in names}
        clip = {"epsilon_low": 0.01, "epsilon_high": 0.01}
        module = FusedLinearGRPOLoss(importance_sampling_level=level, **clip, **options)
        results.append(run(module, batch, {**head, "hidden": states}, call | filled))
    torch.testing.assert_close(*results, rtol=0, atol=0)
    loss, metrics, grads = results[0]
    if masked == "all":
        assert not any(x.any() for x in (loss, *metrics, *grads.values()))
    elif loss_type == "dapo":
        assert metrics[1] == 1  # the sequence is clipped


def test_half_precision_and_the_execution(monkeypatch):
    """Gradients are bf16's, near those of the same inputs in float32."""
    options = {"beta": 0.0, "use_ref_model": False}
    batch = make_batch(B=4, T=9)
    head = {"hidden": batch.hidden.nan_to_num().bfloat16(), "weight": batch.weight.bfloat16()}
    watch_products(monkeypatch, product := MagicMock(wraps=torch.mm))
    module = FusedLinearGRPOLoss(execution=Execution(batch_invariant=True), **options)
    _, (clipped,), grads = run(module, batch, {**head, "bias": None}, {})
    assert {len(call.args[0]) for call in product.mock_calls} == {INVARIANT_ROWS}
    assert clipped == 0 and grads["weight"].dtype == torch.bfloat16
    wide = {name: x.float() for name, x in head.items()}
    _, _, expected = run(FusedLinearGRPOLoss(**options), batch, {**wide, "bias": None}, {})
    assert relative_error(grads["weight"], expected["weight"]) < 3e-3


def test_options_may_change_between_calls():
    """A trainer's schedule may set them on the module."""
    batch, head, call = arguments_of({"use_ref_model": True, "loss_type": "dapo"}, CASE)
    changes = {
        "beta": 0.3, "epsilon_low": 0.01, "epsilon_high": 0.02, "temperature": 0.6,
        "loss_type": "bnpo", "importance_sampling_level": "sequence", "logits_dtype": "model",
    }  # fmt: skip
    head = {name: x.bfloat16() for name, x in head.items()}
    changing, seen = FusedLinearGRPOLoss(), []
    for name, value in changes.items():
        setattr(changing, name, value)
        constructed = FusedLinearGRPOLoss(**{k: getattr(changing, k) for k in changes})
        actual, expected = (run(module, batch, head, call) for module in (changing, constructed))
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        seen.append((*actual[1], actual[2]["weight"].norm()))
    assert len(set(seen)) == len(seen)


@pytest.mark.skipif("num_items_in_batch" not in _ARGUMENTS, reason="an older Liger")
@pytest.mark.parametrize("num_items", (None, 31, torch.tensor(31), 2, torch.tensor(2.0)), ids=str)
def test_the_tokens_of_several_ranks(num_items, monkeypatch):
    """Three ranks with the same tokens; the divisor is at least 1."""
    ranks = {
        "is_initialized": lambda: True, "get_world_size": lambda *_: 3,
        "all_reduce": lambda x, **_: x.mul_(4),
    }  # fmt: skip
    batch, head, call = arguments_of({"use_ref_model": False, "loss_type": "dapo"}, CASE)
    call["num_items_in_batch"] = num_items
    options = {"loss_type": "dapo", "use_ref_model": False, "beta": 0.0}
    for name, function in ranks.items():
        monkeypatch.setattr(torch.distributed, name, function)
    loss, _, ours = run(FusedLinearGRPOLoss(**options), batch, head, call)
    theirs = run(LigerFusedLinearGRPOLoss(compiled=False, **options), batch, head, call)
    torch.testing.assert_close(loss, theirs[0], rtol=1e-5, atol=0)
    assert relative_error(ours["weight"], theirs[2]["weight"]) < 1e-5


@pytest.mark.skipif("num_items_in_batch" not in _ARGUMENTS, reason="an older Liger")
def test_defaults_are_ligers():
    ours = inspect.signature(FusedLinearGRPOLoss).parameters
    names = ours.keys() & _OPTIONS.keys() - {"self"}
    assert len(names) > 15
    assert {x: ours[x].default for x in names} == {x: _OPTIONS[x].default for x in names}


def test_verl_s_reductions():
    """Reductions are those of the log-probs; the ranks' tests check gradients."""
    batch = make_batch()
    targets = batch.targets[batch.mask]
    args = (batch.hidden[batch.mask], batch.weight, targets, 0.8)
    logps, _ = linear_cross_entropy(*args, "none")
    for reduction in ("sum", "mean"):
        reduced, _ = linear_cross_entropy(*args, reduction)
        torch.testing.assert_close(reduced, getattr(logps, reduction)())


def test_who_constructs_ligers_class_has_ours():
    """Also a module that imported it before; undone, all have Liger's again."""
    from liger_kernel import chunked_loss
    from liger_kernel.chunked_loss import grpo_loss

    early = ModuleType("early")
    early.LigerFusedLinearGRPOLoss = LigerFusedLinearGRPOLoss
    places = (early, chunked_loss, grpo_loss)
    sys.modules["early"] = early
    try:
        with patch_liger(execution=Execution(batch_invariant=True), logits_dtype="model"):
            for place in places:
                loss = place.LigerFusedLinearGRPOLoss(beta=0.0, loss_type="grpo", compiled=False)
                assert isinstance(loss, FusedLinearGRPOLoss) and loss.loss_type == "grpo"
                assert loss.execution.batch_invariant
                assert loss.logits_dtype == "model"
        assert all(x.LigerFusedLinearGRPOLoss is LigerFusedLinearGRPOLoss for x in places)
    finally:
        del sys.modules["early"]
    patch = patch_liger()
    patch.undo()
    patch.undo()
    assert chunked_loss.LigerFusedLinearGRPOLoss is LigerFusedLinearGRPOLoss

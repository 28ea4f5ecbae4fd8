"""Liger's class and ours on batches that hypothesis draws; the reference where Liger is wrong."""

import inspect
import re
import sys
from importlib import metadata
from types import ModuleType
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.batches import clean, make_batch, relative_error
from tests.helpers.head_options import watch_products

pytest.importorskip("liger_kernel", reason="needs the extra 'test'")
from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss

from grpo_kernels import GRPOLossConfig, reference
from grpo_kernels.head.execution import Execution
from grpo_kernels.head.products import INVARIANT_ROWS
from grpo_kernels.integrations import patching
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


@pytest.mark.parametrize("loss_type", ("luspo", "grpo"))
def test_where_liger_is_wrong(loss_type):
    """Padding in luspo; advantages per token. The float64 reference decides."""
    if loss_type not in LOSS_TYPES:
        pytest.skip("this version of Liger does not have it")
    batch = make_batch(B=4, T=9, H=16, V=101)
    head = {"hidden": batch.hidden.nan_to_num(), "weight": batch.weight, "bias": None}
    if loss_type == "grpo":
        batch.advantages = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    call = {"old_per_token_logps": clean(batch.old_logps, batch.mask).float()}
    options = {"loss_type": loss_type, "beta": 0.0, "use_ref_model": False, "chunk_size": 2}
    hidden, weight = (head[k].double().requires_grad_() for k in ("hidden", "weight"))
    reference.fused_grpo_loss(
        hidden, weight, batch.targets, batch.advantages, batch.mask, old_logps=batch.old_logps,
        config=GRPOLossConfig(loss_type=loss_type),
    ).loss.mul(2.0).backward()  # fmt: skip
    _, _, ours = run(FusedLinearGRPOLoss(**options), batch, head, call)
    assert relative_error(ours["weight"], weight.grad) < 1e-4
    _, _, theirs = run(LigerFusedLinearGRPOLoss(compiled=False, **options), batch, head, call)
    assert relative_error(theirs["weight"], weight.grad) > 1e-2


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


def test_log_probs_win_over_states_of_the_reference():
    batch = make_batch(B=4, T=9)
    states, weight = batch.hidden.nan_to_num(), batch.weight
    logps = torch.randn(4, 9) - 3
    call = (states, weight, batch.targets.clamp(min=0), batch.mask, batch.advantages)
    module = FusedLinearGRPOLoss(beta=0.3)
    expected, _ = module(*call, ref_per_token_logps=logps)
    with pytest.warns(UserWarning, match="Using ref_per_token_logps"):
        loss, _ = module(*call, ref_per_token_logps=logps, ref_input=states, ref_weight=weight)
    assert torch.equal(loss, expected)


@pytest.mark.parametrize("real", (np.float32, np.array))
def test_numbers_of_numpy(real):
    batch = make_batch(B=4, T=9)
    head = {"hidden": batch.hidden.nan_to_num(), "weight": batch.weight, "bias": None}
    options = {"epsilon_low": 0.25, "epsilon_high": 0.5, "delta": 1.75, "temperature": 0.5}
    modules = (
        FusedLinearGRPOLoss(beta=beta, use_ref_model=False, **numbers)
        for beta, numbers in ((0.0, options), (real(0.0), {k: real(x) for k, x in options.items()}))
    )
    expected, actual = (run(module, batch, head, {}) for module in modules)
    assert torch.equal(actual[0], expected[0]) and expected[0] != 0
    assert torch.equal(actual[2]["weight"], expected[2]["weight"])
    args = head["hidden"], batch.weight, batch.targets.clamp(min=0)
    assert torch.equal(*(linear_cross_entropy(*args, x)[0] for x in (0.5, real(0.5))))


def test_advantages_are_numbers():
    batch = make_batch(B=4, T=9)
    call = (batch.hidden.nan_to_num(), batch.weight, batch.targets.clamp(min=0), batch.mask)
    with pytest.raises(ValueError, match=r"^advantages: expected finite numbers at unmasked"):
        FusedLinearGRPOLoss(beta=0.0, use_ref_model=False)(
            *call, torch.tensor([1.0, -1.0, torch.nan, 0.5])
        )


def test_verl_s_reductions():
    """Reductions are those of the log-probs; the ranks' tests check gradients."""
    batch = make_batch()
    targets = batch.targets[batch.mask]
    args = (batch.hidden[batch.mask], batch.weight, targets, 0.8)
    logps, _ = linear_cross_entropy(*args, "none")
    for reduction in ("sum", "mean"):
        reduced, _ = linear_cross_entropy(*args, reduction)
        torch.testing.assert_close(reduced, getattr(logps, reduction)())
    with pytest.raises(ValueError, match="reduction: expected one of"):
        linear_cross_entropy(*args, "max")


STEP = {"use_ref_model": False}
# Options of the class, arguments of its call that are others, the error.
REFUSED = (
    ({"loss_type": "gapo"}, {}, "loss_type: expected one of"),
    ({"loss_type": "dr_grpo"}, {}, "max_completion_length: expected a positive int"),
    ({"loss_type": "sapo", "importance_sampling_level": "sequence"}, {},
     "Sequence-level importance sampling is not supported for loss_type='sapo'"),
    ({}, {}, "ref_per_token_logps: expected"),
    ({"temperature": 0.0}, {}, "temperature: expected a number > 0"),
    ({"execution": "torch"}, {}, "execution: expected an Execution; got 'torch'"),
    (STEP, {"ref_per_token_logps": torch.zeros(2, 5)}, "ref_per_token_logps does not work"),
    (STEP, {"attention_mask": None}, "attention_mask: expected a tensor; got NoneType"),
    (STEP, {"attention_mask": torch.ones(5)}, "attention_mask: expected shape"),
    (STEP, {"num_items_in_batch": -3}, "num_items_in_batch: expected a number >= 0; got -3"),
    (STEP, {"num_items_in_batch": torch.tensor(-3.0)}, "num_items: expected a finite number"),
    (STEP, {"num_items_in_batch": torch.tensor(float("inf"))}, "num_items: expected a finite"),
    (STEP, {"num_items_in_batch": float("inf")}, "num_items_in_batch: expected a finite"),
    (STEP, {"num_items_in_batch": "x"}, "num_items_in_batch: expected a number"),
    (STEP, {"vllm_is_ratio": torch.ones(2, 4)}, "vllm_is_ratio: expected shape"),
    (STEP, {"vllm_is_ratio": torch.ones(2), "advantages": None}, "advantages: expected a tensor"),
    (STEP, {"vllm_is_ratio": torch.ones(2), "old_per_token_logps": torch.ones(2)}, "old_per_token"),
)  # fmt: skip


@pytest.mark.parametrize(("options", "changed", "error"), REFUSED)
def test_what_is_refused_in_words(options, changed, error):
    kwargs = {
        "_input": torch.randn(2, 5, 8), "lin_weight": torch.randn(11, 8),
        "selected_token_ids": torch.zeros(2, 5, dtype=torch.long),
        "attention_mask": torch.ones(2, 5), "advantages": torch.ones(2),
    }  # fmt: skip
    with pytest.raises((TypeError, ValueError), match=error):
        FusedLinearGRPOLoss(**options)(**kwargs | changed)


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
            assert patch_liger.active()
            for place in places:
                loss = place.LigerFusedLinearGRPOLoss(beta=0.0, loss_type="grpo", compiled=False)
                assert isinstance(loss, FusedLinearGRPOLoss) and loss.config.loss_type == "grpo"
                assert loss.execution.batch_invariant
                assert loss.logits_dtype == "model"
            with pytest.raises(
                RuntimeError, match=r"patch_liger: .* patched already: call undo\(\)"
            ):
                patch_liger()
        assert not patch_liger.active()
        assert all(x.LigerFusedLinearGRPOLoss is LigerFusedLinearGRPOLoss for x in places)
    finally:
        del sys.modules["early"]
    patch = patch_liger()
    patch.undo()
    patch.undo()
    assert chunked_loss.LigerFusedLinearGRPOLoss is LigerFusedLinearGRPOLoss


@pytest.mark.parametrize(
    ("options", "message"),
    (
        ({"logits_dtype": "bf16"}, "logits_dtype: expected"),
        ({"execution": "torch"}, "execution: expected an Execution"),
    ),
)
def test_a_patch_of_liger_checks_its_options(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        patch_liger(**options)
    assert not patch_liger.active()


@pytest.mark.parametrize("installed", ("0.5.10", "none"))
def test_another_liger_is_named(installed, monkeypatch):
    missing = MagicMock(side_effect=metadata.PackageNotFoundError)
    version = missing if installed == "none" else lambda name: installed
    monkeypatch.setattr(patching.metadata, "version", version)
    message = f"expected liger-kernel>=0.6; got {installed}: pip install 'liger-kernel>=0.6'"
    with pytest.raises(ImportError, match=re.escape(message)):
        patch_liger()

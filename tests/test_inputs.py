"""Forms that inputs may have: numbers of NumPy, tensors of subclasses, values behind the mask."""

import contextlib
from functools import partial

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import grpo_kernels
from grpo_kernels import (
    Execution,
    GRPOLossConfig,
    LMHead,
    Reference,
    VocabRanks,
    grpo_loss,
    reference,
)
from grpo_kernels.explain import Thresholds, explain
from grpo_kernels.loss.losses import Clip
from grpo_kernels.training import TrainingConfig
from tests.helpers.batches import called
from tests.refusals.core import BANS_0, CALLS, IDS, INF, LOGPS, NAN, B, H, T, V, arguments_of


@pytest.mark.parametrize("name", ("fused_grpo_loss", "grpo_loss"))
@pytest.mark.parametrize("library", (grpo_kernels, reference), ids=lambda x: x.__name__)
def test_an_advantage_that_is_no_number_may_be_masked(library, name):
    """A sequence without an unmasked token counts for nothing, whatever its advantage is."""
    results = []
    for last in (0.0, NAN):
        arguments = arguments_of(name, mask=torch.tensor([[1, 1, 1], [0, 0, 0]]))
        first = next(iter(arguments.keys() & {"hidden", "logps"}))
        leaf = arguments[first] = arguments[first].clone().requires_grad_()
        arguments["advantages"] = torch.tensor([2.0, last])
        called(library, name, arguments).loss.backward()
        results.append(leaf.grad)
    assert torch.equal(*results) and results[0][0].abs().min() > 0


def numbers_of(options, integers=()):
    """The options as numbers of NumPy: scalars of two widths, and 0-d arrays."""
    for real, whole in ((np.float32, np.int64), (np.float64, np.int32), (np.array, np.array)):
        yield {k: (whole if k in integers else real)(x) for k, x in options.items()}


LOSS_NUMBERS = {"beta": 0.5, "epsilon": 0.25, "kl_clamp": 2.0, "max_completion_length": 3}
# Objects whose fields are numbers: their class, other options, numbers, and which are whole.
OBJECTS = {
    "GRPOLossConfig": (
        GRPOLossConfig, {"loss_type": "dr_grpo"}, LOSS_NUMBERS, {"max_completion_length"}
    ),
    "LMHead": (
        partial(LMHead, torch.ones(V, H)), {},
        {"logit_scale": 0.5, "softcap": 8.0, "temperature": 0.75}, (),
    ),
    "VocabRanks": (VocabRanks, {}, {"start": 4}, {"start"}),
    "Execution": (Execution, {}, {"chunk_bytes": 4096}, {"chunk_bytes"}),
    "Thresholds": (Thresholds, {}, {"long": 4.0, "tokens": 0.5}, ()),
    "TrainingConfig": (
        partial(TrainingConfig, model="m"), {"rewards": ["answer"]},
        {"steps": 3, "learning_rate": 0.5, "epsilon": 0.25, "temperature": 0.75, "top_k": 5},
        {"steps", "top_k"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OBJECTS)
def test_numbers_of_numpy_become_python_s(name):
    kind, chosen, options, integers = OBJECTS[name]
    expected = kind(**chosen, **options)
    for numbers in numbers_of(options, integers):
        actual = kind(**chosen, **numbers)
        for field, x in options.items():
            assert getattr(actual, field) == x and type(getattr(actual, field)) is type(x), field
        assert repr(actual) == repr(expected)
    for field in options:
        with pytest.raises((TypeError, ValueError), match=field):
            kind(**chosen, **options | {field: np.bool_(True)})


def test_numbers_of_numpy_in_lists_and_in_a_loss():
    config = TrainingConfig(
        model="m", rewards=["answer", "format"], reward_weights=[np.float32(0.5), np.array(2)]
    )
    assert repr(config.reward_weights) == "[0.5, 2]"
    loss = GRPOLossConfig(loss_type=Clip(epsilon=np.float32(0.25), delta=np.array(1.5))).loss
    assert repr([loss.epsilon, loss.delta]) == "[0.25, 1.5]"


LOGITS, REWARDS = torch.linspace(-2, 2, B * T * V).view(B, T, V), torch.tensor([1.0, 0.0, 3.0, 2.0])
# Calls with numbers: the call, its numbers, and which of them are whole.
WITH_NUMBERS = {
    "selective_log_softmax": (
        partial(grpo_kernels.selective_log_softmax, LOGITS, targets=IDS), {"temperature": 0.5}, ()
    ),
    "group_advantages": (
        partial(grpo_kernels.group_advantages, REWARDS), {"groups": 2, "eps": 0.25}, {"groups"}
    ),
    "per_token_kl": (
        partial(grpo_kernels.per_token_kl, LOGPS, 3 * LOGPS), {"clamp": 0.5}, ()
    ),
    "topk_kl": (
        partial(grpo_kernels.topk_kl, LOGPS, 2 * LOGPS, direction="jsd"), {"beta": 0.25}, ()
    ),
    "explain": (
        lambda **n: torch.tensor([x["group"] for x in explain(
            grpo_loss(LOGPS, torch.ones(B)), None, torch.ones(B), **n
        ).sequences]), {"groups": 1}, {"groups"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_a_call_takes_numbers_of_numpy(name):
    call, options, integers = WITH_NUMBERS[name]
    expected = call(**options)
    assert expected.abs().sum() > 0
    for numbers in numbers_of(options, integers):
        actual = call(**numbers)
        assert torch.equal(actual, expected) and actual.dtype == expected.dtype


class Plain(torch.Tensor):
    """A subclass whose operators are those of torch."""


@pytest.mark.parametrize(
    "kind", (Plain, torch.nn.Parameter, torch.nn.Buffer, lambda x: TwoTensor(x, x.clone()))
)
def test_subclasses_that_compute_as_tensors_do(kind):
    kwargs = arguments_of("linear_logprobs")
    expected = called(grpo_kernels, "linear_logprobs", kwargs).logps
    kwargs["weight"] = kind(kwargs["weight"])
    logps = called(grpo_kernels, "linear_logprobs", kwargs).logps
    assert torch.equal(torch.Tensor(logps.detach()), expected)


def test_masked_targets_may_be_anything():
    arguments = arguments_of("fused_grpo_loss", targets=IDS - 100, mask=0 * IDS, bias=BANS_0)
    assert called(grpo_kernels, "fused_grpo_loss", arguments).loss == 0


def test_a_target_that_a_reference_bans():
    """The target's log-prob enters the KL; the exact KL reads every id, and is infinite."""
    teacher = Reference(torch.randn(B, T, 2), LMHead(torch.randn(V, 2), BANS_0))
    arguments = arguments_of("fused_grpo_loss", reference=teacher)

    def loss(**options):
        options = {"config": GRPOLossConfig(beta=0.1, **options)}
        return called(grpo_kernels, "fused_grpo_loss", arguments | options)

    assert loss(kl_estimator="exact").metrics["kl"] == INF
    arguments["config"] = GRPOLossConfig()
    assert called(grpo_kernels, "fused_grpo_loss", arguments).loss.isfinite()


NUMBERS = (7, 7.0, np.int64(7), np.uint8(7), np.float32(7), torch.tensor(7),
           torch.tensor(7, dtype=torch.uint8), torch.tensor(7.0).double())  # fmt: skip


@pytest.mark.parametrize("call", [name for name, known in CALLS.items() if "num_items" in known])
def test_num_items(call):
    arguments = arguments_of(call)

    def loss(**changes):
        return called(grpo_kernels, call, arguments | changes).loss

    for number in NUMBERS:
        torch.testing.assert_close(loss(num_items=number), 6 / 7 * loss())
        assert torch.equal(loss(num_items=number), loss(num_items=7))
    for number in (0, torch.tensor(0), torch.tensor(0.0)):
        assert loss(mask=torch.zeros(B, T), num_items=number) == 0


@pytest.mark.gpu
def test_out_of_range_ids_raise_on_cuda_too():
    arguments = arguments_of("fused_grpo_loss", targets=torch.full((B, T), V))
    with pytest.raises(ValueError, match="targets: expected ids in"):
        called(grpo_kernels, "fused_grpo_loss", {name: x.cuda() for name, x in arguments.items()})


def test_a_number_on_the_cpu_serves_tensors_elsewhere(monkeypatch):
    """A trainer's `num_items` often is; reading it waits for nothing."""
    # The meta device stands for another one, and has no autocast.
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    config = GRPOLossConfig(top_entropy_quantile=0.5, entropy_threshold=0.5)
    logps = torch.zeros(2, 3, device="meta")
    out = grpo_loss(
        logps, torch.zeros(2, device="meta"), entropy=logps, num_items=torch.tensor(7),
        config=config,
    )  # fmt: skip
    assert out.loss.device.type == "meta"

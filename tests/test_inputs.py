"""Bad input gets an error that names the argument, what was expected and what came."""

import contextlib

import pytest
import torch

from grpo_kernels import GRPOLossConfig, grpo_loss, selective_log_softmax
from tests.helpers.flat_calls import fused_grpo_loss, linear_logprobs

B, T, H, V = 2, 3, 4, 7


def inputs(**changes):
    """Valid arguments of `fused_grpo_loss`, with changes; packed when `packed` is given."""
    good = {
        "hidden": torch.randn(B, T, H),
        "weight": torch.randn(V, H),
        "targets": torch.zeros(B, T, dtype=torch.long),
        "advantages": torch.ones(B),
        "mask": torch.ones(B, T),
    }
    if changes.pop("packed", False):
        good |= {
            "hidden": torch.randn(B * T, H),
            "targets": torch.zeros(B * T, dtype=torch.long),
            "advantages": torch.ones(B * T),
            "mask": None,
        }
    return good | changes


FUSED = {
    "hidden_type": ({"hidden": [1.0]}, TypeError, "hidden: expected a tensor; got list"),
    "hidden_dtype": (
        {"hidden": torch.zeros(B, T, H, dtype=torch.float64)},
        TypeError,
        "hidden: expected dtype float32, bfloat16, float16; got float64; float64 is for grpo_ker",
    ),
    "hidden_shape": (
        {"hidden": torch.zeros(H)},
        ValueError,
        r"hidden: expected shape \[B, T, H\] or \[N, H\]; got \[4\]",
    ),
    "weight_shape": (
        {"weight": torch.zeros(V, H + 1)},
        ValueError,
        r"weight: expected shape \[V, 4\]; got \[7, 5\]",
    ),
    "weight_sharded": (
        {"weight": torch.zeros(0)},
        ValueError,
        r"weight: expected shape \[V, H\]; got \[0\]; an empty weight is what ZeRO-3 shows",
    ),
    "weight_device": (
        {"weight": torch.zeros(V, H, device="meta")},
        ValueError,
        "weight: expected a tensor on cpu; got one on meta",
    ),
    "targets_shape": (
        {"targets": torch.zeros(B, T + 1, dtype=torch.long)},
        ValueError,
        r"targets: expected shape \[2, 3\]; got \[2, 4\]",
    ),
    "targets_dtype": (
        {"targets": torch.zeros(B, T)},
        TypeError,
        "targets: expected dtype int64, .*; got float32",
    ),
    "targets_too_large": (
        {"targets": torch.full((B, T), V)},
        ValueError,
        r"targets: expected ids in \[0, 7\) at unmasked positions; got ids outside \(6 of them\)",
    ),
    "targets_negative": (
        {"targets": torch.full((B, T), -100), "mask": None},
        ValueError,
        r"targets: expected ids in \[0, 7\); got ids outside \(6 of them\)",
    ),
    "advantages_shape": (
        {"advantages": torch.ones(B + 1)},
        ValueError,
        r"advantages: expected shape \[2\] or \[2, 3\]; got \[3\]",
    ),
    "advantages_packed": (
        {"packed": True, "advantages": torch.ones(B)},
        ValueError,
        r"advantages: expected shape \[6\], or one per sequence together with cu_seqlens; "
        r"got \[2\]",
    ),
    "advantages_packed_sequences": (
        {
            "packed": True,
            "advantages": torch.ones(3),
            "cu_seqlens": torch.tensor([0, 3, 6]),
        },
        ValueError,
        r"advantages: expected shape \[2\] \(one per sequence\) or \[6\]; got \[3\]",
    ),
    "advantages_in_doubt": (
        {
            "packed": True,
            "cu_seqlens": torch.tensor([0, 2, 2, 3, 4, 5, 6]),
        },
        ValueError,
        r"advantages: expected \[6\] to be one per sequence or one per token",
    ),
    "mask_shape": (
        {"mask": torch.ones(B)},
        ValueError,
        r"mask: expected shape \[2, 3\]; got \[2\]",
    ),
    "mask_values": (
        {"mask": torch.full((B, T), 0.5)},
        ValueError,
        r"mask: expected 0 or 1; got other values \(6 of them\)",
    ),
    "mask_type": ({"mask": [[1] * T] * B}, TypeError, "mask: expected a tensor; got list"),
    "old_logps_shape": (
        {"old_logps": torch.zeros(B)},
        ValueError,
        r"old_logps: expected shape \[2, 3\]; got \[2\]",
    ),
    "old_logps_dtype": (
        {"old_logps": torch.zeros(B, T, dtype=torch.long)},
        TypeError,
        "old_logps: expected dtype float32, .*; got int64",
    ),
    "ref_logps_missing": (
        {"config": GRPOLossConfig(beta=0.1)},
        ValueError,
        "ref_logps: expected the reference policy's log-probs, as config.beta = 0.1; got None",
    ),
    "ce_weights_shape": (
        {"ce_weights": torch.zeros(B)},
        ValueError,
        r"ce_weights: expected shape \[2, 3\]; got \[2\]",
    ),
    "ce_weights_shape_without_mask": (
        {"ce_weights": torch.zeros(B), "mask": None},
        ValueError,
        r"ce_weights: expected shape \[2, 3\]; got \[2\]",
    ),
    "ce_weights_type": (
        {"ce_weights": 0.1},
        TypeError,
        "ce_weights: expected a tensor; got float",
    ),
    "ce_weights_dtype": (
        {"ce_weights": torch.ones(B, T, dtype=torch.bool)},
        TypeError,
        "ce_weights: expected dtype float32, .*; got bool",
    ),
    "ce_weights_nan": (
        {"ce_weights": torch.tensor([[1.0, float("nan"), 0.0]] * B), "mask": torch.zeros(B, T)},
        ValueError,
        r"ce_weights: expected finite numbers; got NaN or inf \(2 of them\)",
    ),
    "ce_weights_infinite": (
        {"ce_weights": torch.full((B, T), -float("inf")), "mask": None},
        ValueError,
        r"ce_weights: expected finite numbers; got NaN or inf \(6 of them\)",
    ),
    "ce_weights_on_what_is_no_target": (
        {
            "ce_weights": torch.tensor([[0.1, 0.0, 0.0]] * B),
            "mask": torch.zeros(B, T),
            "targets": torch.full((B, T), -100),
        },
        ValueError,
        r"targets: expected ids in \[0, 7\) at unmasked positions; got ids outside \(2 of them\)",
    ),
    "mask_values_with_ce_weights": (
        {"ce_weights": torch.zeros(B, T), "mask": torch.full((B, T), 0.5)},
        ValueError,
        r"mask: expected 0 or 1; got other values \(6 of them\)",
    ),
    "bias_shape": (
        {"bias": torch.zeros(H)},
        ValueError,
        r"bias: expected shape \[7\]; got \[4\]",
    ),
    "config_type": (
        {"config": {"beta": 0.1}},
        TypeError,
        "config: expected a GRPOLossConfig; got dict",
    ),
    "num_items_negative_for_grpo": (
        {"config": GRPOLossConfig(loss_type="grpo"), "num_items": -5},
        ValueError,
        "num_items: expected a number >= 0; got -5",
    ),
    "num_items_negative": (
        {"num_items": -1},
        ValueError,
        "num_items: expected a number >= 0; got -1",
    ),
    "num_items_nan": (
        {"num_items": torch.tensor(float("nan"))},
        ValueError,
        "num_items: expected a number >= 0; got another",
    ),
    "num_items_type": (
        {"num_items": "5"},
        TypeError,
        "num_items: expected a number; got str '5'",
    ),
    "num_items_shape": (
        {"num_items": torch.ones(2)},
        ValueError,
        r"num_items: expected a 0-d tensor; got shape \[2\]",
    ),
    "cu_seqlens_padded": (
        {"cu_seqlens": torch.tensor([0, 3, 6])},
        ValueError,
        r"cu_seqlens: expected None with padded input \[B, T\]",
    ),
    "cu_seqlens_missing": (
        {"packed": True, "config": GRPOLossConfig(loss_type="grpo")},
        ValueError,
        r"cu_seqlens: expected offsets \[B \+ 1\], as loss_type='grpo' with these",
    ),
    "cu_seqlens_of_no_sequence": (
        {
            "packed": True,
            "cu_seqlens": torch.tensor([0]),
            "config": GRPOLossConfig(loss_type="grpo"),
        },
        ValueError,
        "cu_seqlens: expected to end at N = 6; got no sequence at all",
    ),
    "sampling_logps_missing": (
        {"config": GRPOLossConfig(is_correction="token_mask")},
        ValueError,
        "sampling_logps: expected the sampler's log-probs, as config.is_correction = 'token_mask'",
    ),
    "sampling_logps_shape": (
        {"sampling_logps": torch.zeros(B, T + 1)},
        ValueError,
        r"sampling_logps: expected shape \[2, 3\]; got \[2, 4\]",
    ),
    "gspo_packed_without_sequences": (
        {"packed": True, "config": GRPOLossConfig(loss_type="gspo", aggregation="dapo")},
        ValueError,
        "cu_seqlens: expected offsets .* tells sequences apart",
    ),
    "cu_seqlens_end": (
        {"packed": True, "cu_seqlens": torch.tensor([0, 3, 5])},
        ValueError,
        "cu_seqlens: expected to start at 0, never to decrease, and to end at N = 6",
    ),
    "cu_seqlens_decreasing": (
        {"packed": True, "cu_seqlens": torch.tensor([0, 5, 3, 6])},
        ValueError,
        "cu_seqlens: expected to start at 0, never to decrease",
    ),
    "cu_seqlens_dtype": (
        {"packed": True, "cu_seqlens": torch.tensor([0.0, 6.0])},
        TypeError,
        "cu_seqlens: expected dtype int64, int32; got float32",
    ),
    "cu_seqlens_shape": (
        {"packed": True, "cu_seqlens": torch.tensor(6)},
        ValueError,
        r"cu_seqlens: expected shape \[B \+ 1\]; got \[\]",
    ),
    "temperature_zero": (
        {"temperature": 0},
        ValueError,
        "temperature: expected a number > 0; got 0",
    ),
    "temperature_shape": (
        {"temperature": torch.ones(B)},
        ValueError,
        r"temperature: expected shape \[2, 3\]; got \[2\]",
    ),
    "temperature_values": (
        {"temperature": torch.tensor([[1.0, 0.0, -1.0], [1.0, float("nan"), 1.0]])},
        ValueError,
        r"temperature: expected numbers > 0; got others \(3 of them\)",
    ),
    "temperature_grad": (
        {"temperature": torch.ones(B, T, requires_grad=True)},
        ValueError,
        "temperature: expected a constant; got a tensor requiring grad",
    ),
    "softcap_negative": (
        {"softcap": -1.0},
        ValueError,
        "softcap: expected a number > 0, or None; got -1.0",
    ),
    "logit_scale_type": (
        {"logit_scale": None},
        TypeError,
        "logit_scale: expected a number; got NoneType None",
    ),
    "backend": (
        {"backend": "cuda"},
        ValueError,
        "backend: expected one of auto, triton, torch; got 'cuda'",
    ),
    "backward": (
        {"backward": "approximate"},
        TypeError,
        "backward: expected a grpo_kernels.experimental.Sampled, or None for the exact one; got",
    ),
    "chunk_bytes": (
        {"chunk_bytes": 0},
        ValueError,
        "chunk_bytes: expected a positive int, or None; got 0",
    ),
}


@pytest.mark.parametrize("case", FUSED)
def test_fused_grpo_loss(case):
    changes, error, message = FUSED[case]
    arguments = inputs(**changes)
    with pytest.raises(error, match=message):
        fused_grpo_loss(**arguments)


@pytest.mark.parametrize(
    "case",
    [
        c
        for c in FUSED
        if c.split("_")[0] in ("hidden", "weight", "targets", "bias", "softcap", "backward")
        or c
        in (
            "mask_shape",
            "mask_values",
            "temperature_zero",
            "temperature_values",
            "backend",
            "chunk_bytes",
        )
    ],
)
def test_linear_logprobs(case):
    changes, error, message = FUSED[case]
    arguments = inputs(**changes)
    arguments.pop("advantages")
    with pytest.raises(error, match=message):
        linear_logprobs(**arguments)


@pytest.mark.parametrize(
    "case",
    [
        c
        for c in FUSED
        if c.split("_")[0] in ("advantages", "mask", "old", "ref", "num", "cu", "config", "ce")
        and c != "ce_weights_on_what_is_no_target"
    ],
)
def test_grpo_loss(case):
    changes, error, message = FUSED[case]
    arguments = inputs(**changes)
    logps = torch.zeros(arguments.pop("targets").shape)
    del arguments["hidden"], arguments["weight"]
    with pytest.raises(error, match=message):
        grpo_loss(logps, **arguments)


def test_grpo_loss_needs_entropy_for_its_bonus():
    with pytest.raises(
        ValueError, match=r"entropy: expected the entropy of every token, as config"
    ):
        grpo_loss(torch.zeros(B, T), torch.ones(B), config=GRPOLossConfig(entropy_coef=0.1))
    with pytest.raises(ValueError, match=r"entropy: expected shape \[2, 3\]; got \[2\]"):
        grpo_loss(torch.zeros(B, T), torch.ones(B), entropy=torch.ones(B))


def test_grpo_loss_shape():
    with pytest.raises(ValueError, match=r"logps: expected shape \[B, T\] \(padded\) or \[N\]"):
        grpo_loss(torch.zeros(2, 3, 4), torch.ones(2))


def test_selective_log_softmax():
    logits, targets = torch.zeros(B, T, V), torch.zeros(B, T, dtype=torch.long)
    for arguments, error, message in (
        ((torch.zeros(V), targets), ValueError, r"logits: expected shape \[B, T, V\] or \[N, V\]"),
        ((logits.double(), targets), TypeError, "logits: expected dtype float32, .* got float64"),
        ((logits, targets[:1]), ValueError, r"targets: expected shape \[2, 3\]; got \[1, 3\]"),
        ((logits, targets - 1), ValueError, r"targets: expected ids in \[0, 7\); got ids outside"),
    ):
        with pytest.raises(error, match=message):
            selective_log_softmax(*arguments)


def test_triton_on_a_cpu_says_what_it_needs(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="backend: 'triton' needs a GPU, or TRITON_INTERPRET=1"):
        grpo_loss(torch.zeros(B, T), torch.ones(B), backend="triton")


def test_masked_targets_may_be_anything():
    arguments = inputs(targets=torch.full((B, T), -100), mask=torch.zeros(B, T))
    assert fused_grpo_loss(**arguments).loss == 0


@pytest.mark.gpu
def test_out_of_range_ids_raise_on_cuda_too():
    arguments = {
        k: v.cuda() if isinstance(v, torch.Tensor) else v
        for k, v in inputs(targets=torch.full((B, T), V)).items()
    }
    with pytest.raises(ValueError, match="targets: expected ids in"):
        fused_grpo_loss(**arguments)


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
    with pytest.raises(ValueError, match="num_items: expected a tensor on cpu; got one on meta"):
        grpo_loss(torch.zeros(2, 3), torch.zeros(2), num_items=torch.zeros((), device="meta"))

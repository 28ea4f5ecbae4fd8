"""Realistic batches, and the comparison of a call with the float64 reference.

Logits are peaked (an entropy of about two nats), old and reference log-probs lie around the
policy's own so that some ratios are clipped on either side, advantages have both signs and a
zero, sequences have lengths from nothing to full with a hole where a tool spoke, and whatever is
masked holds NaN, inf or an id that does not exist.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

import grpo_kernels
from grpo_kernels import Execution, GRPOLossConfig, LMHead, reference

NAN, INF = float("nan"), float("inf")


@dataclass
class Batch:
    hidden: Tensor  # [B, T, H] or [N, H]
    weight: Tensor  # [V, H]
    bias: Tensor  # [V]
    targets: Tensor
    advantages: Tensor
    mask: Tensor
    old_logps: Tensor
    ref_logps: Tensor
    sampling_logps: Tensor
    temperature: Tensor
    cu_seqlens: Tensor | None = None
    ce_weights: Tensor | None = None

    def to(self, device: str, dtype: torch.dtype) -> Batch:
        """The head's tensors in `dtype`, everything on `device`."""
        moved = {k: None if v is None else v.to(device) for k, v in vars(self).items()}
        for name in ("hidden", "weight", "bias"):
            moved[name] = moved[name].to(dtype)
        return Batch(**moved)


def make_batch(
    B: int = 4, T: int = 9, H: int = 48, V: int = 1003, seed: int = 0, logit_offset: float = 0.0
) -> Batch:
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(V, H, generator=g)
    # Likely targets, and some that the policy finds surprising.
    likely = torch.randint(0, V, (B, T), generator=g)
    hidden = (7.0 / H) * weight[likely] + (1.7 / H**0.5) * torch.randn(B, T, H, generator=g)
    surprising = torch.rand(B, T, generator=g) < 0.3
    targets = torch.where(surprising, torch.randint(0, V, (B, T), generator=g), likely)
    bias = 0.5 * torch.randn(V, generator=g) + logit_offset

    lengths = torch.randint(1, T + 1, (B,), generator=g) if T else torch.zeros(B, dtype=torch.long)
    if B > 2:
        lengths[0], lengths[1] = T, 0
    mask = torch.arange(T) < lengths[:, None]
    mask[:1, T // 2 : T // 2 + 2] = False
    advantages = torch.randn(B, generator=g)
    if B > 2:
        advantages[2], advantages[3 if B > 3 else 0] = 0.0, -0.9
    logps = reference.linear_logprobs(hidden.double(), weight.double(), targets).logps.float()
    old_logps = logps + 0.25 * torch.randn(B, T, generator=g)
    ref_logps = logps + 0.4 * torch.randn(B, T, generator=g)
    temperature = 0.6 + torch.rand(B, T, generator=g)
    sampling_logps = old_logps + 0.15 * torch.randn(B, T, generator=g)
    # The sampler could not score one token.
    sampling_logps[:1, :1] = NAN
    return Batch(
        hidden.masked_fill(~mask[..., None], NAN),
        weight,
        bias,
        targets.masked_fill(~mask, -100),
        advantages,
        mask,
        old_logps.masked_fill(~mask, NAN),
        ref_logps.masked_fill(~mask, INF),
        sampling_logps.masked_fill(~mask, -INF),
        temperature.masked_fill(~mask, NAN),
    )


def with_cross_entropy(batch: Batch) -> Batch:
    """The same batch with cross-entropy weights, of both signs, inside the mask and outside.

    What only the policy needs stays NaN outside the mask; most tokens outside it stay out.
    """
    g = torch.Generator().manual_seed(7)
    some = torch.rand(batch.mask.shape, generator=g) < torch.where(batch.mask, 0.4, 0.3)
    # Where a tool spoke, and in the sequence that has no token of the policy.
    some[:1] |= ~batch.mask[:1]
    some[1:2, :1] = True
    weights = 0.05 * torch.randn(batch.mask.shape, generator=g)
    (V, H), fresh = batch.weight.shape, some & ~batch.mask
    targets = torch.randint(V, batch.mask.shape, generator=g)
    noise = torch.randn(batch.hidden.shape, generator=g)
    hidden = (7.0 / H) * batch.weight[targets] + (1.7 / H**0.5) * noise
    temperature = 0.6 + torch.rand(batch.mask.shape, generator=g)
    return replace(
        batch,
        hidden=torch.where(fresh[..., None], hidden, batch.hidden),
        targets=torch.where(fresh, targets, batch.targets),
        temperature=torch.where(fresh, temperature, batch.temperature),
        ce_weights=weights.masked_fill(~some, 0.0),
    )


def exact_batch(dtype: torch.dtype = torch.bfloat16, **sizes: int) -> Batch:
    """A batch whose raw logits are sums without a rounding, in float32 as in float64.

    So that both round to the same neighbour in `dtype`.
    """
    batch = make_batch(**sizes)
    for name, steps in (("hidden", 16), ("weight", 16), ("bias", 64)):
        x = (getattr(batch, name) * steps).round() / steps
        setattr(batch, name, x.clamp(-4, 4))
    return batch.to("cpu", dtype)


def packed(batch: Batch) -> Batch:
    """The same sequences one after the other, each up to its last token that takes part."""
    B, T = batch.mask.shape
    rows = batch.mask if batch.ce_weights is None else batch.mask | (batch.ce_weights != 0)
    ends = (rows * torch.arange(1, T + 1)).amax(1) if T else torch.zeros(B, dtype=torch.long)
    keep = torch.arange(T) < ends[:, None]
    names = (
        "hidden", "targets", "mask", "old_logps", "ref_logps", "sampling_logps", "temperature",
        "ce_weights",
    )  # fmt: skip
    flat = {name: x[keep] for name in names if (x := getattr(batch, name)) is not None}
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), ends.cumsum(0)]).int()
    return replace(batch, **flat, cu_seqlens=cu_seqlens)


def clean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Makes masked values finite, as peers multiply by the mask."""
    return torch.where(mask, x.double(), 0.0)


# id: (config options, the tensors to pass besides the advantages). Every option of the objective
# is here at least once, token-local or not.
_OLD, _ALL = ("old_logps",), ("old_logps", "ref_logps", "sampling_logps")
_KL = ("old_logps", "ref_logps")
OBJECTIVES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "on_policy": ({}, ()),
    "old_logps": ({}, _OLD),
    "clip_asymmetric": ({"epsilon": 0.1, "epsilon_high": 0.28}, _OLD),
    "no_clip_range": ({"epsilon": 0.0}, _OLD),
    "delta": ({"delta": 1.1, "epsilon": 0.4}, _OLD),
    "dual_clip": ({"dual_clip": 1.1, "epsilon": 0.4}, _OLD),
    "luspo": ({"loss_type": "luspo"}, _OLD),
    "kl": ({"beta": 0.1}, ("ref_logps",)),
    "kl_metric_only": ({}, _KL),
    "kl_old_delta": ({"beta": 0.04, "delta": 1.4}, _KL),
    **{f"kl_{name}": ({"beta": 0.2, "kl_estimator": name}, _KL)
       for name in ("k1", "abs", "k2", "k1+", "k3+")},
    "kl_uncorrected": ({"beta": 0.2, "use_bias_correction_kl": False}, _KL),
    **{f"kl_clamp_{name}": ({"beta": 0.2, "kl_estimator": name, "kl_clamp": 0.05}, _KL)
       for name in ("k1", "abs", "k2", "k3", "k1+", "k3+")},
    "entropy": ({"entropy_coef": 0.05}, _OLD),
    "cispo": ({"loss_type": "cispo"}, _OLD),
    "cispo_sequence": ({"loss_type": "cispo", "importance_sampling_level": "sequence"}, _OLD),
    "sapo": ({"loss_type": "sapo"}, _OLD),
    "sapo_kl": ({"loss_type": "sapo", "beta": 0.1, "aggregation": "bnpo"}, _KL),
    "reinforce": ({"loss_type": "reinforce"}, _OLD),
    "reinforce_on_policy": ({"loss_type": "reinforce", "aggregation": "luspo"}, ()),
    "dppo_tv": (
        {"loss_type": "dppo_tv", "epsilon": 0.05, "epsilon_high": 0.02, "dppo_ratio_max": 1.1},
        _OLD,
    ),
    "dppo_kl": ({"loss_type": "dppo_kl", "epsilon": 0.005, "epsilon_high": 0.002}, _OLD),
    "sequence": ({"importance_sampling_level": "sequence", "beta": 0.1}, _KL),
    "gspo": ({"loss_type": "gspo", "epsilon": 0.05}, _OLD),
    "gspo_token": ({"loss_type": "gspo_token", "epsilon": 0.05, "beta": 0.1}, _KL),
    "gmpo": ({"loss_type": "gmpo"}, _OLD),
    "vespo": ({"loss_type": "vespo"}, _OLD),
    "vespo_corrected": ({"loss_type": "vespo", "is_correction": "token_mask"}, _ALL),
    **{f"is_{level}_{how}": (
        {"is_correction": f"{level}_{how}", "is_clip_max": 1.1, "beta": 0.1}, _ALL
    ) for level in ("token", "sequence", "geometric") for how in ("truncate", "mask")},
    **{f"is_gate_{name}": (
        {"is_correction": "token_mask", "is_gate": name, "is_clip_max": 0.005}, _ALL
    ) for name in ("binary_kl", "tv")},
    "is_token_on_policy": ({"is_correction": "token_truncate"}, ("sampling_logps",)),
    "is_sequence_on_policy": ({"is_correction": "sequence_truncate"}, ("sampling_logps",)),
    "off_policy": ({"off_policy_threshold": 0.01}, _ALL),
    "top_entropy": ({"top_entropy_quantile": 0.4}, _OLD),
    "top_entropy_bonus": ({"top_entropy_quantile": 0.4, "entropy_coef": 0.1}, _OLD),
    "entropy_threshold": (
        {"top_entropy_quantile": 0.4, "entropy_threshold": 1.05, "entropy_coef": 0.1}, _OLD
    ),
    "everything": (
        {"loss_type": "grpo", "beta": 0.1, "kl_clamp": 1.0, "delta": 1.5, "entropy_coef": 0.05,
         "is_correction": "token_truncate", "off_policy_threshold": 0.05,
         "top_entropy_quantile": 0.8},
        _ALL,
    ),
}  # fmt: skip


@dataclass
class Result:
    loss: Tensor
    metrics: dict[str, Tensor]
    logps: Tensor
    gradients: dict[str, Tensor | None] = field(default_factory=dict)


HEAD_FIELDS = tuple(x.name for x in fields(LMHead) if x.name != "weight")
EXECUTION_FIELDS = tuple(x.name for x in fields(Execution))


def called(package: Any, call: str, arguments: dict[str, Any]) -> Any:
    """Calls with arguments by name, `weight` and fields of the head and the execution among them.

    For tables of options, and for changes of any argument; the reference takes no execution.
    """
    rest = dict(arguments)
    head = {name: rest.pop(name) for name in HEAD_FIELDS if name in rest}
    execution = {name: rest.pop(name) for name in EXECUTION_FIELDS if name in rest}
    if package is reference and isinstance(dtype := head.pop("logits_dtype", None), torch.dtype):
        rest["rounded_to"] = dtype
    if "weight" in rest:
        # A plain weight where nothing else is asked for, as most callers have it.
        weight = rest.pop("weight")
        rest["head"] = LMHead(weight, **head) if head else weight
    if execution and package is not reference:
        rest["execution"] = Execution(**execution)
    return getattr(package, call)(**rest)


HEAD = ("hidden", "weight", "bias")


def run_fused(
    batch: Batch, *, exact: bool, scale: float = 3.0, head: Any = (), frozen: Any = (),
    mask: bool = True, advantages: Tensor | None = None, execution: Execution | None = None,
    **arguments: Any,
) -> Result:  # fmt: skip
    """`fused_grpo_loss`, or with `exact` its reference in float64, and the gradients.

    `head`: fields of the `LMHead`. Of the names that are True the batch has the tensors.
    """
    leaves = {}
    for name in HEAD:  # with the strides it came with, also where memory lies between its values
        x = getattr(batch, name).detach()
        x = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
        leaves[name] = (x.double() if exact else x).requires_grad_(name not in frozen)

    def tensors_of(named: dict[str, Any]) -> dict[str, Any]:
        tensors = {name: getattr(batch, name) if x is True else x for name, x in named.items()}
        for name, x in tensors.items():
            if exact and isinstance(x, Tensor) and x.dtype == torch.float32:
                tensors[name] = x.double()
        return {name: x for name, x in tensors.items() if x is not False}

    fields_of_head, arguments = tensors_of(dict(head)), tensors_of(arguments)
    if "bias" in fields_of_head:
        fields_of_head["bias"] = leaves["bias"]
    rounded = fields_of_head.get("logits_dtype") == "model"
    if exact:
        fields_of_head.pop("logits_dtype", None)
        arguments |= {"rounded_to": batch.hidden.dtype} if rounded else {}
    elif execution is not None:
        arguments["execution"] = execution
    call = reference.fused_grpo_loss if exact else grpo_kernels.fused_grpo_loss
    lm_head = LMHead(leaves["weight"], **fields_of_head) if head else leaves["weight"]
    out = call(
        leaves["hidden"], lm_head, batch.targets,
        batch.advantages if advantages is None else advantages, batch.mask if mask else None,
        cu_seqlens=batch.cu_seqlens, **arguments,
    )  # fmt: skip
    (scale * out.loss).backward()
    gradients = {k: None if x.grad is None else x.grad.double() / scale for k, x in leaves.items()}
    return Result(out.loss.detach(), dict(out.metrics), out.logps, gradients)


def relative_error(actual: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Norm of the difference over the norm of the expected; 1 for zeros, 2 for -expected.

    `floor`: the least to divide by.
    """
    expected = expected.double()
    difference = (actual.double().to(expected.device) - expected).norm()
    norm = expected.norm().clamp(min=floor)
    return float(difference / norm) if norm else float(difference)


def assert_matches(
    actual: Result, expected: Result, tolerance: float, *, logps: float, floor: float = 0.0,
    rounded_to: torch.dtype | None = None, scale: float = 1.0,
) -> None:  # fmt: skip
    """Loss, log-probs, metrics and every gradient; gradients that should not be 0 must not be.

    `rounded_to`: the dtype of the gradients, whose rounding alone may be more than the tolerance,
    where the loss was times `scale`.
    """
    if actual.logps.numel():
        worst = float((actual.logps.double() - expected.logps).abs().max())
        assert worst <= logps, f"log-probs off by {worst:.2e}"
    assert actual.metrics.keys() == expected.metrics.keys()
    numbers = {name: (actual.metrics[name], x, 2e-4) for name, x in expected.metrics.items()}
    numbers["loss"] = actual.loss, expected.loss, max(tolerance, 1e-5)
    for name, (x, truth, limit) in numbers.items():
        assert x.dtype == torch.float32
        assert abs(x.item() - truth.item()) <= limit * max(1.0, abs(truth.item())), name
    for name, value in expected.gradients.items():
        grad = actual.gradients[name]
        if value is None:
            assert grad is None, f"d_{name}: expected none"
            continue
        assert grad is not None, f"d_{name}: missing"
        error, allowed = relative_error(grad, value, floor), tolerance
        if rounded_to is not None:
            rounded = (scale * value).to(rounded_to).double() / scale
            allowed = max(allowed, 1.01 * relative_error(rounded, value))
        assert error <= allowed, f"d_{name}: relative error {error:.2e} > {allowed:.1e}"


def config(**options: Any) -> GRPOLossConfig:
    """A config; `dr_grpo` gets the length it needs, `cispo` its bound."""
    if "dr_grpo" in (options.get("loss_type"), options.get("aggregation")):
        options.setdefault("max_completion_length", 11)
    if options.get("loss_type") == "cispo":
        options.setdefault("epsilon_high", 1.1)
    return GRPOLossConfig(**options)

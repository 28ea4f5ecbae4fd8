"""Compares how sampler and policy round their logits: they should agree."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .base.checks import FLOATS, check_tensor

# A ratio of policy to sampler outside of this interval counts as far off.
NEAR = (0.9, 1.1)
# A rounding explains a difference that is smaller by this share under it.
SHARE = 0.2
# The largest difference of log-probs that agree, in nats.
SMALL = 1e-3


class SamplerCheck(NamedTuple):
    """Difference of the sampler's and the policy's log-probs, for both roundings of the logits."""

    tokens: int  # that count
    rms_fp32: float  # root of the mean squared difference in nats, logits in float32
    rms_model: float  # logits rounded to the model's dtype
    outside_fp32: float  # share of tokens whose ratio is outside [0.9, 1.1]
    outside_model: float

    @property
    def closer(self) -> str | None:
        """The `logits_dtype` that is closer to the sampler by a fifth; None if neither is."""
        if self.rms_model < (1 - SHARE) * self.rms_fp32:
            return "model"
        return "fp32" if self.rms_fp32 < (1 - SHARE) * self.rms_model else None

    @property
    def advice(self) -> str:
        """Advice on how to reduce the difference."""
        if self.closer == "model":
            return (
                "the sampler rounds its logits and the policy does not: give the sampler a head "
                'in float32 (vLLM: --hf-overrides \'{"head_dtype": "float32"}\'), or round '
                "here as well (logits_dtype='model')"
            )
        if self.closer == "fp32":
            return "the sampler does not round its logits: use logits_dtype='fp32'"
        if min(self.rms_fp32, self.rms_model) < SMALL:
            return "they agree"
        return (
            "the rounding of logits does not explain the difference: compare weights, "
            "temperature, kernels, and the dtype of the layers"
        )

    def __str__(self) -> str:
        parts = (
            f"logits in {name}: {rms:.2g} nats RMS, {outside:.1%} of tokens off by over a tenth"
            for name, rms, outside in (
                ("float32", self.rms_fp32, self.outside_fp32),
                ("the model's dtype", self.rms_model, self.outside_model),
            )
        )
        return f"sampler to policy over {self.tokens:,} tokens: {'; '.join(parts)}. {self.advice}"


def check_sampler(
    sampling_logps: Tensor, logps_fp32: Tensor, logps_model: Tensor, mask: Tensor | None = None
) -> SamplerCheck:
    """Finds the rounding of the logits that the sampler's log-probs come from.

    A head in bfloat16 rounds each logit to 8 bits, which moves log-probs by about 0.01 nats. If
    only sampler or policy rounds, their ratios are off by that much before training.

        hidden = ...  # of the policy that sampled
        fp32 = linear_logprobs(hidden, weight, targets, mask=mask).logps
        rounding = LMHead(weight, logits_dtype="model")
        model = linear_logprobs(hidden, rounding, targets, mask=mask).logps
        print(check_sampler(sampling_logps, fp32, model, mask))

    Args:
        sampling_logps: the sampler's log-probs, in any shape; NaN where it reported none.
        logps_fp32: log-probs under the policy that sampled, from logits in float32.
        logps_model: the same from logits in the model's dtype.
        mask: bool or 0/1; None: all tokens.

    Returns:
        Differences under both roundings, and `advice`; `print` shows them. Waits for the device.

    Raises:
        TypeError, ValueError: arguments that are not tensors of one shape, or an empty mask.
    """
    samples = {
        "sampling_logps": sampling_logps,
        "logps_fp32": logps_fp32,
        "logps_model": logps_model,
    }
    shape = check_tensor("sampling_logps", sampling_logps).shape
    for name, x in samples.items():
        check_tensor(name, x, shape=shape, dtypes=FLOATS, device=sampling_logps.device)
    counts = ~sampling_logps.isnan()
    if mask is not None:
        check_tensor("mask", mask, shape=shape, device=sampling_logps.device)
        counts &= mask != 0
    tokens = int(counts.sum())
    if not tokens:
        raise ValueError("mask, sampling_logps: expected a token that counts; got none")
    gaps = []
    for logps in (logps_fp32, logps_model):
        gap = logps[counts].float() - sampling_logps[counts].float()
        ratio = gap.exp()
        outside = (ratio < NEAR[0]) | (ratio > NEAR[1])
        gaps.append((gap.square().mean().sqrt().item(), outside.float().mean().item()))
    (rms_fp32, outside_fp32), (rms_model, outside_model) = gaps
    return SamplerCheck(tokens, rms_fp32, rms_model, outside_fp32, outside_model)

"""Advantages from rewards, and the per-token KL to subtract from rewards.

With R the reward of a completion, and mean and std (of n - 1) over the completions of its group:

    A = (R - mean) / (std + eps)         scale="group"
    A = (R - mean) / (std of all + eps)  scale="batch"
    A = R - mean                         scale="none"

Several rewards are weighted and summed to R ("sum_then_normalize"); or each is normalized within
the group first, and their weighted sum R' over the batch ("normalize_then_sum", GDPO):

    A = (R' - mean of all R') / (std of all R' + eps)

References: GRPO, arXiv:2402.03300; no std, arXiv:2503.20783; std of the batch, arXiv:2508.08221;
GDPO, arXiv:2601.05242.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..base.checks import (
    FLOATS,
    INTEGERS,
    as_number,
    check_choice,
    check_number,
    check_tensor,
    suggests_names,
)
from ..base.sequences import widened
from .config import KL_ESTIMATORS
from .objective import kl_estimate

SCALES = ("group", "batch", "none")
REWARD_AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")


@suggests_names
def group_advantages(
    rewards: Tensor,
    groups: int | Tensor,
    *,
    scale: str = "group",
    weights: Sequence[float] | Tensor | None = None,
    aggregation: str = "sum_then_normalize",
    eps: float = 1e-4,
) -> Tensor:
    """Computes each completion's advantage relative to its group.

    Equivalent PyTorch, for one reward function and groups of G:

        grouped = rewards.view(-1, G)
        mean, std = grouped.mean(1, keepdim=True), grouped.std(1, keepdim=True)
        advantages = ((grouped - mean) / (std + eps)).view(-1)

    A group whose rewards are all equal, as in a group of one, gets exactly 0.

    Args:
        rewards: `[B]`, or `[B, R]` for R reward functions, finite. NaN if a function did not
            apply: it is left out of the completion's sum. If none applied, the completion is left
            out of every mean and std, and its advantage is 0.
        groups: the size of all groups, whose completions are consecutive; or `[B]`, the integer id
            of each completion's group, in any order, for groups of any size.
        scale: the divisor of the difference to the group's mean: `"group"` (std of the group),
            `"batch"` (std of all), or `"none"`.
        weights: `[R]`, weights of the reward functions; None: 1 each.
        aggregation: `"sum_then_normalize"`, or `"normalize_then_sum"` (GDPO), which needs
            `scale="group"`.
        eps: added to the divisor.

    Returns:
        float32 `[B]`; computed in float64. On several ranks, pass the rewards of all ranks: groups
        may be split over ranks, and "batch" means all of them.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came.
    """
    check_tensor("rewards", rewards, dtypes=FLOATS)
    if rewards.ndim not in (1, 2):
        raise ValueError(f"rewards: expected shape [B] or [B, R]; got {list(rewards.shape)}")
    if rewards.isinf().any():
        raise ValueError(
            "rewards: expected finite numbers, or NaN where a function did not apply; got "
            "infinite ones: clamp them"
        )
    check_choice("scale", scale, SCALES)
    check_choice("aggregation", aggregation, REWARD_AGGREGATIONS)
    eps = check_number("eps", eps, "> 0")
    if aggregation == "normalize_then_sum" and scale != "group":
        raise ValueError(
            f"scale={scale!r} does not work with aggregation='normalize_then_sum', which divides "
            "by both stds: pass scale='group'"
        )
    values = widened(rewards.detach())
    values = values[:, None] if rewards.ndim == 1 else values  # [B, R]
    factors = _weights(weights, values)
    per_group, overall = _Groups(groups, values), _Groups(max(len(values), 1), values)
    unscorable = values.isnan().all(1)

    if aggregation == "sum_then_normalize":
        total = (values * factors).nansum(1).masked_fill(unscorable, torch.nan)[:, None]
        advantages = total - per_group.mean(total)
        if scale == "group":
            advantages = advantages / (per_group.std(total) + eps)
        elif scale == "batch":
            advantages = advantages / (overall.std(total) + eps)
        equal = per_group.all_equal(total)
    else:
        normalised = (values - per_group.mean(values)) / (per_group.std(values) + eps)
        equal = per_group.all_equal(values)
        total = (normalised * factors).nansum(1).masked_fill(unscorable, torch.nan)[:, None]
        advantages = (total - total.nanmean()) / (overall.std(total) + eps)
    # A std over one value is NaN, and so is an unscorable completion's advantage.
    return advantages.squeeze(1).masked_fill(equal.all(1) | unscorable, 0.0).float()


def per_token_kl(
    logps: Tensor,
    ref_logps: Tensor,
    mask: Tensor | None = None,
    *,
    estimator: str = "k3",
    clamp: float | None = None,
) -> Tensor:
    """Estimates each token's KL to the reference, to subtract from the reward.

    Equivalent PyTorch, for "k3":  `d = ref_logps - logps;  kl = d.exp() - d - 1`

    Args:
        logps: log-probs of the sampled tokens under the policy, any shape.
        ref_logps: log-probs under the reference policy, same shape.
        mask: bool or 0/1, same shape; None: all tokens. Masked tokens get 0.
        estimator: as `GRPOLossConfig.kl_estimator`.
        clamp: as `GRPOLossConfig.kl_clamp`.

    Returns:
        float32 (float64 for float64), differentiable, in the shape of `logps`.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came.
    """
    check_tensor("logps", logps, dtypes=FLOATS)
    check_tensor("ref_logps", ref_logps, shape=logps.shape, dtypes=FLOATS, device=logps.device)
    check_choice("estimator", estimator, KL_ESTIMATORS)
    if clamp is not None:
        clamp = check_number("clamp", clamp, "> 0")
    dtype = torch.promote_types(torch.float32, logps.dtype)
    d = ref_logps.to(dtype) - logps.to(dtype)
    if mask is not None:
        check_tensor("mask", mask, shape=logps.shape, device=logps.device)
        d = torch.where(mask != 0, d, 0.0)
    return kl_estimate(estimator, d, clamp)


def apply_is_weights(advantages: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """Multiplies advantages by the importance-sampling weights of another sampler.

    This multiplies each token's surrogate by its weight, as weights are >= 0 and a surrogate is
    linear in advantages of one sign.

    Args:
        advantages: `[B]` or `[B, T]`.
        weights: `[B]`, `[B, 1]` or `[B, T]`, >= 0.
        mask: `[B, T]`.

    Returns:
        `[B, T]`, the shape of the mask.
    """
    advantages, weights = (x[:, None] if x.ndim == 1 else x for x in (advantages, weights))
    return (advantages * weights).expand(mask.shape)


class _Groups:
    """Statistics over groups, returned for every member; NaN values are ignored."""

    def __init__(self, groups: object, values: Tensor) -> None:
        B, groups = values.shape[0], as_number(groups)
        if isinstance(groups, Tensor):
            check_tensor("groups", groups, shape=(B,), dtypes=INTEGERS, device=values.device)
            self.ids = groups.unique(return_inverse=True)[1]
        else:
            if isinstance(groups, bool) or not isinstance(groups, int):
                raise TypeError(
                    "groups: expected the size of a group, an int, or a tensor [B] of group ids; "
                    f"got {type(groups).__name__}"
                )
            if groups < 1 or B % groups:
                raise ValueError(
                    f"groups: expected a divisor of the number of rewards, {B}; got {groups}"
                )
            self.ids = torch.arange(B, device=values.device) // groups
        self.size = B

    def _sum(self, x: Tensor) -> Tensor:
        sums = x.new_zeros(self.size, x.shape[1]).index_add(0, self.ids, x.nan_to_num(nan=0.0))
        return sums[self.ids]

    def _count(self, x: Tensor) -> Tensor:
        return self._sum((~x.isnan()).to(x.dtype))

    def mean(self, x: Tensor) -> Tensor:
        return self._sum(x) / self._count(x)

    def _largest(self, x: Tensor) -> Tensor:
        lowest = torch.full((self.size, x.shape[1]), -torch.inf, dtype=x.dtype, device=x.device)
        index = self.ids[:, None].expand_as(x)
        return lowest.scatter_reduce(0, index, x, "amax")[self.ids]

    def std(self, x: Tensor) -> Tensor:
        return (self._sum((x - self.mean(x)).square()) / (self._count(x) - 1)).sqrt()

    def all_equal(self, x: Tensor) -> Tensor:
        highest, lowest = (
            self._largest((sign * x).masked_fill(x.isnan(), -torch.inf)) for sign in (1, -1)
        )
        # Both are -inf in a group without values.
        return (highest == -lowest) | highest.isinf()


def _weights(weights: Sequence[float] | Tensor | None, values: Tensor) -> Tensor:
    R = values.shape[1]
    if weights is None:
        return values.new_ones(R)
    try:
        numbers = weights if isinstance(weights, Tensor) else [as_number(x) for x in weights]
        factors = torch.as_tensor(numbers, dtype=values.dtype, device=values.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"weights: expected {R} numbers, or a tensor [{R}]; got {type(weights).__name__}"
        ) from error
    if factors.shape != (R,):
        raise ValueError(
            f"weights: expected one for each of {R} reward functions; got {list(factors.shape)}"
        )
    if not factors.isfinite().all():
        raise ValueError(f"weights: expected finite numbers; got {weights}")
    return factors

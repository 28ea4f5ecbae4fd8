"""`linear_cross_entropy`: the call of verl's kernel (`verl.utils.kernel`), without logits."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..config import check_choice
from ..linear_logprobs import linear_logprobs


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    reduction: str = "none",
    dist_process_group: None = None,
    **head_options: Any,
) -> tuple[Tensor, Tensor]:
    """Returns log-probs of the labels and entropies, both differentiable, without the logits.

    Equivalent PyTorch:

        log_p = (hidden @ weight.T).float().div(temperature).log_softmax(-1)
        logprobs = log_p.gather(-1, labels[..., None])[..., 0]
        entropy = -(log_p.exp() * log_p).sum(-1)

    Args:
        hidden: `[N, H]` or `[B, T, H]`.
        weight: `[V, H]`.
        labels: `[N]` or `[B, T]`, int64 token ids.
        temperature: divides the logits; a number, or a tensor with one value per token.
        reduction: `"none"`, `"sum"` or `"mean"` of the log-probs, which are not negated.
        dist_process_group: must be None, as heads split over ranks are not supported.
        head_options: `mask`, `bias`, `support`, `backward`, ... of `linear_logprobs`. With a
            `support` both results are those of the truncated policy.

    Returns:
        `logprobs` and `entropy` (nats), float32, in the shape of the labels (verl's are flat);
        `logprobs` is 0-d if reduced.

    Raises:
        TypeError, ValueError: as in `linear_logprobs`; a process group.
    """
    if dist_process_group is not None:
        raise ValueError(
            "dist_process_group: expected None, as a head split over ranks is not supported; got "
            f"{dist_process_group!r}"
        )
    check_choice("reduction", reduction, ("none", "sum", "mean"))
    out = linear_logprobs(
        hidden, weight, labels, temperature=temperature, entropy=True, **head_options
    )
    assert out.entropy is not None
    logps = out.logps if reduction == "none" else getattr(out.logps, reduction)()
    return logps, out.entropy

"""`linear_cross_entropy`, called as verl's kernel of that name (`verl.utils.kernel`)."""

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
    """Log-probs of the labels and entropies, both differentiable, without the logits.

    Equivalent PyTorch:

        log_p = (hidden @ weight.T).float().div(temperature).log_softmax(-1)
        logprobs = log_p.gather(-1, labels[..., None])[..., 0]
        entropy = -(log_p.exp() * log_p).sum(-1)

    Args:
        hidden: `[N, H]` or `[B, T, H]`.
        weight: `[V, H]`.
        labels: `[N]` or `[B, T]`, token ids.
        temperature: what logits are divided by, a number or one a token.
        reduction: of the log-probs (not negated): `"none"`, `"sum"` or `"mean"`.
        dist_process_group: None: the head is whole, not split over ranks.
        head_options: `mask`, `bias`, `backward`, ... of `linear_logprobs`.

    Returns:
        `logprobs` and `entropy`, float32, in the shape of the labels (verl's are flat);
        `logprobs` 0-d if reduced.

    Raises:
        ValueError, TypeError: as `linear_logprobs`.
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

"""`linear_cross_entropy`: the call of verl's kernel (`verl.utils.kernel`), without logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..config import check_choice
from ..execution import Execution
from ..head import LMHead, Support, VocabRanks
from ..linear_logprobs import linear_logprobs

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    reduction: str = "none",
    dist_process_group: ProcessGroup | None = None,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    support: Support | None = None,
    execution: Execution = Execution(),  # noqa: B008 - frozen
) -> tuple[Tensor, Tensor]:
    """Returns log-probs of the labels and entropies, both differentiable, without the logits.

    Equivalent PyTorch:

        log_p = (hidden @ weight.T).float().div(temperature).log_softmax(-1)
        logprobs = log_p.gather(-1, labels[..., None])[..., 0]
        entropy = -(log_p.exp() * log_p).sum(-1)

    Args:
        hidden: `[N, H]` or `[B, T, H]`.
        weight: `[V, H]`; with a process group this rank's rows of it.
        labels: `[N]` or `[B, T]`, int64 token ids.
        temperature: divides the logits; a number, or a tensor with one value per token.
        reduction: `"none"`, `"sum"` or `"mean"` of the log-probs, which are not negated.
        dist_process_group: ranks that share the vocabulary, in the order of its columns. As with
            verl's kernel the gradient of `hidden` is then this rank's part, which the caller adds
            up: `VocabRanks(group, hidden="partial")`.
        mask: as in `linear_logprobs`.
        bias: `[V]`, as in `LMHead`.
        support: as in `linear_logprobs`; both results are then those of the truncated policy.
        execution: as in `linear_logprobs`.

    Returns:
        `logprobs` and `entropy` (nats), float32, in the shape of the labels (verl's are flat);
        `logprobs` is 0-d if reduced.

    Raises:
        TypeError, ValueError: as in `linear_logprobs`.
    """
    check_choice("reduction", reduction, ("none", "sum", "mean"))
    ranks = None
    if dist_process_group is not None:
        ranks = VocabRanks(dist_process_group, hidden="partial")
    head = LMHead(weight, bias, temperature=temperature, ranks=ranks)
    out = linear_logprobs(
        hidden, head, labels, mask, entropy=True, support=support, execution=execution
    )
    assert out.entropy is not None
    logps = out.logps if reduction == "none" else getattr(out.logps, reduction)()
    return logps, out.entropy

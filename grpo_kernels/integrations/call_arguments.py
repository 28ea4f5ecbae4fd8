"""Arguments of a fused head's call: its labels, and refusals.

A model's forward takes any keyword argument, and ignores an unknown one. A fused head uses each
argument, or refuses it by name.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache

from ..base.checks import INTEGERS, ValueChecks, as_number, check_tensor
from .hf_head import body_of

# Arguments that a model's signature may lack: the head's, and members of transformers'
# TransformersKwargs that the layers use. A new member is refused until it is known here.
_COMMON = {
    "labels", "shift_labels", "logits_to_keep", "num_items_in_batch",
    "position_ids", "is_causal", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
    "seq_idx", "output_router_logits",
}  # fmt: skip
# Arguments that choose the result, with the only value that a fused head takes.
_RESULTS = {"return_dict": True, "output_hidden_states": False, "output_attentions": False}
# Arguments with which positions and labels no longer match. transformers 5.24 renamed the first.
_NOT_THE_TEXT = (
    "past_key_values", "cache", "cache_params", "state", "mems", "use_cache", "inputs_embeds",
)  # fmt: skip


def check_arguments(model: Any, kwargs: dict[str, Any]) -> None:
    """Raises TypeError or ValueError for arguments a fused head would ignore; drops unset ones."""
    signatures = (inspect.signature(type(x).forward) for x in (model, body_of(model)))
    known = _COMMON.union(_RESULTS, _NOT_THE_TEXT, *(x.parameters for x in signatures))
    for name, x in list(kwargs.items()):
        if isinstance(x, Cache) or (name in _NOT_THE_TEXT and x is not None and x is not False):
            raise ValueError(
                f"{name} does not work with a fused head, which scores full sequences of ids: pass "
                "input_ids without a cache (PEFT's virtual tokens and prefix tuning do not work)"
            )
        if name in _RESULTS and x is not None and bool(x) != _RESULTS[name]:
            raise ValueError(
                f"{name}={x!r} does not work with a fused head, which returns only a "
                f"FusedHeadOutput: leave {name} out"
            )
        if name not in known:
            raise TypeError(
                f"{name!r} is not an argument of {type(model).__name__}.forward: pass arguments "
                "of the loss in fused_head=Objective(...)"
            )
        if name in _RESULTS or name in _NOT_THE_TEXT:
            del kwargs[name]


def usual_results(config: Any) -> dict[str, bool]:
    """Arguments that make a body return its last hidden states alone, whatever its config says."""
    return {name: x for name, x in _RESULTS.items() if getattr(config, name, x) != x}


class Labels(NamedTuple):
    """The labels of a call: shifted already or not, all of them or the last `keep`."""

    ids: Tensor  # [B, S]
    shifted: bool
    keep: int  # 0: all

    @staticmethod
    def pop_from(kwargs: dict[str, Any]) -> Labels:
        """Takes the labels of a call out of its arguments; raises ValueError for none or two."""
        labels, shifted = kwargs.pop("labels", None), kwargs.pop("shift_labels", None)
        keep = as_number(kwargs.pop("logits_to_keep", 0))
        if (labels is None) == (shifted is None):
            raise ValueError(
                "labels: expected token ids [B, S] (-100: not scored), or shift_labels; got "
                f"{'neither' if labels is None else 'both'}"
            )
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 0:
            raise ValueError(f"logits_to_keep: expected an int >= 0; got {keep!r}")
        return Labels(labels if shifted is None else shifted, shifted is not None, keep)

    def predicting(self, x: Tensor) -> Tensor:
        """The part of `x [B, S, ...]` at the positions that predict the targets."""
        return (x if self.shifted else x[:, :-1])[:, -self.keep :]

    def targets(self, hidden: Tensor) -> Tensor:
        """The ids that `hidden [B, S, H]` predicts, `[B, T]`."""
        ids = check_tensor("labels", self.ids, shape=hidden.shape[:2], dtypes=INTEGERS)
        if ids.is_meta:
            raise ValueError("labels: expected a tensor with values; got one on the meta device")
        predicted = ids if self.shifted else ids[:, 1:]
        if self.keep > predicted.shape[1]:
            raise ValueError(
                f"logits_to_keep: expected at most {predicted.shape[1]}, the number of predicted "
                f"labels; got {self.keep}"
            )
        return predicted[:, -self.keep :]


def check_one_sequence(
    kwargs: dict[str, Any], labels: Labels, scored: Tensor, loss_type: object
) -> None:
    """Raises ValueError for rows with targets of several sequences, which a loss cannot tell apart.

    `kwargs`: the arguments of the model's body, which tells sequences apart by some of them.
    `scored`: bool `[B, T]`, the tokens that the loss counts.
    """
    message = (
        f"{{}} does not work with loss_type={loss_type!r} and these options, which need one "
        "sequence per row: do not pack several sequences into one"
    )
    for name in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"):
        if kwargs.get(name) is not None:
            raise ValueError(message.format(name))
    positions = kwargs.get("position_ids")
    if positions is None or not scored.numel():
        return
    # With four kinds of positions the first is the text's; with three it is time's, constant within
    # an image. Padding may have any, but is not scored.
    least = 0 if positions.ndim > 2 and len(positions) == 3 else 1
    positions = positions.flatten(0, -3)[0] if positions.ndim > 2 else positions
    restarts = pad(positions.diff(dim=-1) < least, (1, 0)).cumsum(-1)
    sequence = labels.predicting(restarts.expand(len(scored), -1)).to(scored.device)
    last = torch.where(scored, sequence, -1).amax(1, keepdim=True)
    checks = ValueChecks()
    checks.add((scored & (sequence != last)).any(1), message.format("position_ids"))
    checks.read()

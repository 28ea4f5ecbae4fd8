"""Arguments of a fused head's call: its labels, and the ones that are refused.

A model's forward takes any keyword argument, and ignores an unknown one. A fused head uses each
argument, or refuses it by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from ..base.checks import INTEGERS, as_number, check_tensor
from .hf_head import body_of

# Arguments that no signature of a model need have: the head's, and those of transformers'
# TransformersKwargs that the layers use. A new one there is refused until it is known here.
_COMMON = {
    "labels", "shift_labels", "logits_to_keep", "num_items_in_batch",
    "position_ids", "is_causal", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
    "seq_idx", "output_router_logits",
}  # fmt: skip
# Arguments that choose the result, with the value that `FusedHeadOutput` goes by.
_RESULTS = {"return_dict": True, "output_hidden_states": False, "output_attentions": False}
# Names of caches; transformers 5.24 renamed the first one.
_CACHES = ("past_key_values", "cache", "cache_params", "state", "mems")


def check_arguments(model: Any, kwargs: dict[str, Any], names: Sequence[str]) -> None:
    """Raises for arguments that a fused head would ignore; removes those without effect.

    Args:
        model: a model of transformers.
        kwargs: the arguments of a call, by name.
        names: the arguments of the model's forward.

    Raises:
        TypeError: an unknown argument.
        ValueError: a cache or embeddings, with which positions and labels no longer match; an
            argument that asks for another result.
    """
    for name, expected in _RESULTS.items():
        value = kwargs.pop(name, None)
        if value is not None and bool(value) != expected:
            raise ValueError(
                f"{name}={value!r} does not work with a fused head, which returns only a "
                f"FusedHeadOutput: leave {name} out"
            )
    for name in _CACHES:
        if name in kwargs and kwargs[name] is None:
            del kwargs[name]
    cached = ["use_cache"] if kwargs.pop("use_cache", None) else []
    cached += [
        name for name, x in kwargs.items() if isinstance(x, Cache) or name in _CACHES
    ]  # fmt: skip
    if cached:
        raise ValueError(
            f"{', '.join(cached)}: a fused head takes no cache, because it scores full sequences: "
            "leave it out (PEFT's prefix tuning, which passes one, is not supported)"
        )
    body = inspect.signature(type(body_of(model)).forward).parameters
    unknown = sorted(kwargs.keys() - {*names, *body} - _COMMON)
    if unknown:
        raise TypeError(
            f"{unknown[0]!r} is not an argument of {type(model).__name__}.forward: pass arguments "
            "of the loss in fused_head=Objective(...)"
        )
    if kwargs.get("inputs_embeds") is not None:
        raise ValueError(
            "inputs_embeds does not work with a fused head: pass input_ids (PEFT's virtual tokens, "
            "which pass inputs_embeds, are not supported)"
        )


def usual_results(config: Any) -> dict[str, bool]:
    """Arguments by which a body returns its last hidden states alone, whatever its config says."""
    return {name: x for name, x in _RESULTS.items() if getattr(config, name, x) != x}


@dataclass
class Labels:
    """The labels of a call: shifted already or not, all of them or the last `keep`."""

    ids: Tensor  # [B, S]
    shifted: bool
    keep: int  # 0: all

    @staticmethod
    def pop_from(kwargs: dict[str, Any]) -> Labels:
        """Takes the labels of a call out of its arguments.

        Raises:
            ValueError: there are none, or both kinds; `logits_to_keep` is no whole number.
        """
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

    def align(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the hidden states `[B, T, H]` that predict the targets `[B, T]`, and these."""
        targets = check_tensor("labels", self.ids, dtypes=INTEGERS)
        if targets.is_meta:
            raise ValueError("labels: expected a tensor with values; got one on the meta device")
        if targets.shape != hidden.shape[:2]:
            raise ValueError(
                f"labels: expected shape {list(hidden.shape[:2])}, as the hidden states have; got "
                f"{list(targets.shape)}"
            )
        if not self.shifted:
            hidden, targets = hidden[:, :-1], targets[:, 1:]
        if self.keep > targets.shape[1]:
            raise ValueError(
                f"logits_to_keep: expected at most {targets.shape[1]}, the number of predicted "
                f"labels; got {self.keep}"
            )
        return hidden[:, -self.keep :], targets[:, -self.keep :]

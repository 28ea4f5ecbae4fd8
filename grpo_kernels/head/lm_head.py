"""`LMHead`: from hidden states to a distribution over the vocabulary.

Objects check themselves when constructed; the call checks their fit with the hidden states.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..base.checks import (
    FLOATS,
    check_choice,
    check_number,
    check_tensor,
    convert_numbers,
    suggests_names,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

LOGITS_DTYPES = ("fp32", "model")
HIDDEN_LAYOUTS = ("replicated", "partial")


class Support(NamedTuple):
    """The vocabulary ids that the sampler kept for each token, with top-k, top-p or min-p.

    `token_ids[offsets[i] : offsets[i + 1]]` is the kept set of token i, tokens in row-major order.
    A set contains the target and no id twice, in any order. An empty set means the full vocabulary.
    """

    token_ids: Tensor  # int32 or int64 [K]
    offsets: Tensor  # int32 or int64 [N + 1]


@dataclass(frozen=True)
class VocabRanks:
    """Ranks that share the vocabulary, each with some rows of the head (`docs/distributed.md`).

    Args:
        group: the process group; None if the head is a DTensor.
        start: the vocabulary id of this rank's first row; None: rows are in the order of the ranks.
        hidden: `"replicated"`: the call sums the gradients of `hidden` and `lora_a_out` over the
            ranks; `"partial"`: the caller does.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """

    group: ProcessGroup | None = None
    start: int | None = None
    hidden: str = "replicated"

    def __post_init__(self) -> None:
        if self.group is not None:
            from torch.distributed import ProcessGroup

            if not isinstance(self.group, ProcessGroup):
                raise TypeError(
                    "ranks.group: expected a torch.distributed process group that this rank is in; "
                    f"got {self.group!r}"
                )
        convert_numbers(self)
        if self.start is not None and (
            isinstance(self.start, bool) or not isinstance(self.start, int)
        ):
            raise TypeError(f"ranks.start: expected an int, or None; got {self.start!r}")
        check_choice("ranks.hidden", self.hidden, HIDDEN_LAYOUTS)


class HeadTerm(NamedTuple):
    """Raw logits are the sum of `x @ y.T` over a head's terms."""

    x: Tensor  # [N, K]
    y: Tensor  # [V, K]


@suggests_names
@dataclass(frozen=True, eq=False)
class LMHead:
    """The LM head, from hidden states to a distribution over the vocabulary.

        raw = hidden @ weight.T + lora_a_out @ lora_b.T + bias
        logits = softcap(logit_scale * raw) / temperature

    Args:
        weight: `[V, H]`, float32, bfloat16 or float16; with `ranks` this rank's rows, or a DTensor
            with `Shard(0)`. If it is frozen, its gradient is not computed.
        bias: `[V]`; -inf bans an id, which then must not be a target.
        low_rank: a LoRA on the head, `(lora_a_out, lora_b)`: `scaling * lora_A(hidden)`,
            `[..., r]`, and the weight of `lora_B`, `[V, r]`, with gradients for both.
        logit_scale: factor on the raw logits, > 0.
        softcap: `softcap * tanh(x / softcap)` before the temperature, as Gemma 2 has it, > 0.
        temperature: divides the logits: a number > 0, or one per token in the shape of the targets.
        logits_dtype: `"fp32"`, or `"model"`: the result of each step before the temperature is
            rounded to the dtype of `hidden` and `weight`, or of autocast, as a sampler with this
            model rounds it. Steps are `hidden @ weight.T + bias`, the product of `low_rank`, their
            sum, the product with the scale, and the softcap's quotient, tanh and product.
            Gradients pass through the rounding.
        ranks: the ranks that have the other rows of the head.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """

    weight: Tensor
    bias: Tensor | None = None
    low_rank: tuple[Tensor, Tensor] | None = None
    _: KW_ONLY
    logit_scale: float = 1.0
    softcap: float | None = None
    temperature: float | Tensor = 1.0
    logits_dtype: str = "fp32"
    ranks: VocabRanks | None = None

    def __post_init__(self) -> None:
        self._check_tensors()
        convert_numbers(self)
        check_number("logit_scale", self.logit_scale, "> 0, as a float32")
        for name in ("softcap", "temperature"):
            value = getattr(self, name)
            if isinstance(value, Tensor) or (value is None and name == "softcap"):
                continue
            check_number(name, value, "> 0, as a float32")
        if isinstance(self.softcap, Tensor):
            raise TypeError("softcap: expected a number > 0, or None; got a tensor")
        if isinstance(self.temperature, Tensor) and self.temperature.requires_grad:
            raise ValueError("temperature: expected a constant; got a tensor requiring grad")
        if not isinstance(self.logits_dtype, str) or self.logits_dtype not in LOGITS_DTYPES:
            choices = " or ".join(map(repr, LOGITS_DTYPES))
            raise ValueError(f"logits_dtype: expected {choices}; got {self.logits_dtype!r}")
        if self.ranks is not None and not isinstance(self.ranks, VocabRanks):
            raise TypeError(f"ranks: expected a VocabRanks, or None; got {self.ranks!r}")

    def _check_tensors(self) -> None:
        weight = check_tensor("weight", self.weight, dtypes=FLOATS)
        if weight.ndim != 2 or (weight.shape[0] < 1 and self.ranks is None):
            zero3 = ". With ZeRO-3, call this inside the wrapped module's forward"
            hint = "" if weight.numel() else zero3
            raise ValueError(f"weight: expected shape [V, H]; got {list(weight.shape)}{hint}")
        device = weight.device
        if self.bias is not None:
            check_tensor("bias", self.bias, shape=weight.shape[:1], dtypes=FLOATS, device=device)
        if self.low_rank is None:
            return
        if not isinstance(self.low_rank, (tuple, list)) or len(self.low_rank) != 2:
            raise TypeError(
                "low_rank: expected a pair of tensors, lora_a_out and lora_b, or None; got "
                f"{type(self.low_rank).__name__}"
            )
        a_out, b = (
            check_tensor(f"low_rank[{i}]", x, dtypes=FLOATS, device=device)
            for i, x in enumerate(self.low_rank)
        )
        if b.ndim != 2 or b.shape[0] != weight.shape[0]:
            raise ValueError(
                f"low_rank[1]: expected shape [{weight.shape[0]}, r]; got {list(b.shape)}"
            )
        if a_out.ndim < 1 or a_out.shape[-1] != b.shape[1]:
            raise ValueError(
                f"low_rank[0]: expected hidden @ lora_a.T, of shape [..., {b.shape[1]}]; got "
                f"{list(a_out.shape)}"
            )

    @staticmethod
    def of(head: Tensor | LMHead) -> LMHead:
        """Returns `head` as an `LMHead`; it may be a weight."""
        if isinstance(head, LMHead):
            return head
        if not isinstance(head, Tensor):
            bias = getattr(head, "bias", None) is not None
            hint = ": pass LMHead(head.weight, head.bias)" if bias else ": pass head.weight"
            raise TypeError(
                f"head: expected a weight [V, H] or an LMHead; got {type(head).__name__}"
                f"{hint if hasattr(head, 'weight') else ''}"
            )
        return LMHead(head)

    def terms(self, hidden: Tensor) -> tuple[HeadTerm, ...]:
        """The terms of the raw logits of `hidden [..., H]`: weight, adapter, bias."""
        terms = [HeadTerm(hidden.reshape(-1, hidden.shape[-1]), self.weight)]
        if self.low_rank is not None:
            a_out, b = self.low_rank
            terms.append(HeadTerm(a_out.reshape(-1, b.shape[1]), b))
        if self.bias is not None:
            ones = terms[0].x.new_ones((), dtype=torch.float32).expand(len(terms[0].x), 1)
            terms.append(HeadTerm(ones, self.bias[:, None]))
        return tuple(terms)

    def replace(self, **changes: Any) -> LMHead:
        """Returns a copy with these changes, checked again."""
        return replace(self, **changes)


class Reference(NamedTuple):
    """Hidden states and head of a reference policy or a teacher, on the same tokens.

    Both are constants: no gradient. The vocabulary must be the policy's; hidden size, dtype
    (float32, bfloat16 or float16) and head options may differ. If an optimizer changes the weight
    before the call, pass a copy.
    """

    hidden: Tensor  # [B, T, H'] or [N, H'], laid out as the policy's
    head: Tensor | LMHead

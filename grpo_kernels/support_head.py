"""The head over the words that a sampler kept: statistics, and gradients of all operands.

    z_tj = logits of token t at the words j of its set S_t, and of no others
    l, E = token_stats over S_t
    D_tj = their gradient, as of any softmax
    dh_t = sum over j in S_t of D_tj W_j,    dW_j = sum over t with j in S_t of D_tj h_t

so that no row of logits is made: the head costs |S_t| rows of W instead of V. Each row of dh and of
dW is summed by one owner, in float32 and in one order, and rounded once; for dW the words are
sorted by id. The forward keeps one number per word; the backward makes the products.

Where a set is a large part of the vocabulary, three GEMMs are faster: z is then picked out of whole
rows of logits, and D is put into rows of zeros.

Where ranks share the vocabulary, each makes the logits of the words that it has. These are added
up: 4 bytes per word. Statistics and D are then the same on all ranks, dW is each rank's own, and dh
is added up once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .backends import RowGrads, TokenStats, Words
from .head_call import HeadCall, HeadOperands
from .head_gradients import HeadGradients
from .lm_head import LMHead, round_
from .row_plan import RowPlan, rows_of_logits
from .support import check_support, support_of

Gradients = tuple[Tensor | None, ...]


def with_support(
    call: HeadCall,
    weight: Tensor,
    support: object,
    fallback: str,
    *,
    logsumexp: bool = False,
    sparse: bool = False,
    gathered: bool = False,
) -> HeadCall:
    """The call, without the tokens that have a support in its mask; `support_of` has the rest.

    `sparse`: the gradient of the weight is to be row-sparse. `gathered`: none goes through logits.
    """
    shard, V, targets = call.shard, call.columns, call.targets
    if shard is not None:
        if call.target_ids is None:
            raise ValueError(
                "support: expected None where ranks with tokens of their own share the vocabulary, "
                f"hidden_layout={shard.layout!r}; got a support"
            )
        if sparse:
            raise ValueError(
                "sparse_weight_grad: expected False where ranks share the vocabulary; got True"
            )
        V, targets = shard.size, call.target_ids
    if call.tile or call.matmul:
        raise ValueError(
            "support: expected None with batch_invariant=True or a matmul, as which words are "
            "gathered depends on the whole batch; got a support"
        )
    if call.capturable:
        raise ValueError(
            "support: expected None with capturable=True, as the number of words is read from the "
            "device; got a support"
        )
    ids, offsets = check_support(support, call.layout.num_tokens, targets.device)
    if shard is not None:
        shard.check_support(call.checks, ids, offsets)
    found = support_of(
        ids,
        offsets,
        fallback,
        targets=targets,
        mask=call.mask,
        V=V,
        bytes_per_element=_bytes_moved(weight),
        rows_per_chunk=rows_of_logits(weight, call.chunk_bytes, call.dtype),
        checks=call.checks,
        logsumexp=logsumexp,
        all_gathered=sparse or gathered or shard is not None,
        distinct=sparse,
    )
    others = ~found.tokens
    mask = others if call.mask is None else call.mask & others
    if sparse:
        call.checks.add(
            mask,
            "sparse_weight_grad: expected a support for every token that counts, as the others' "
            "gradients are dense; got tokens without",
        )
    return replace(call, mask=mask, support=found)


def _bytes_moved(weight: Tensor) -> int:
    """The bytes per element of a gathered row."""
    if weight.device.type == "cpu" and weight.dtype != torch.float32:
        return 2 * 4  # read, and written as float32 for the products
    return weight.element_size()


def of_support_alone(call: HeadCall, plan: RowPlan) -> tuple[HeadCall, RowPlan]:
    """The call and its plan without the tokens that have no support."""
    nothing = torch.zeros_like(call.targets, dtype=torch.bool)
    no_rows = replace(plan, order=None, num_grad_rows=0, num_rows=0)
    return replace(call, mask=nothing), no_rows


class WordGrads(NamedTuple):
    """The gradient of the raw logits of words, float32 `[E]` each; 0 for tokens not `needed`."""

    gathered: Tensor
    through_logits: Tensor
    needed: Tensor  # bool [N]: tokens that have a gradient


class SupportHead:
    """The kept words of one call.

    Args:
        operands: of any head dtype; gathered words are multiplied in float32 whatever it is.
        call: with a support, whose sizes have been read.
    """

    def __init__(self, operands: HeadOperands, call: HeadCall) -> None:
        assert call.support is not None
        self.operands = HeadOperands(*map(_by_rows, operands))  # type: ignore[arg-type]
        self.call, self.support = call, call.support
        # Biases are added to single words.
        self.transform = replace(call.transform, bias=None)
        self.shard = call.shard
        # Of the gathered words those that this rank has, and which they are; None: all.
        self.words, self.mine = self.support.gathered, None
        if self.shard is not None:
            self.words, self.mine = self.shard.own_words(self.support.gathered)

    def logits(self) -> list[Tensor]:
        """The raw logits of the words of both routes, bias included, float32 `[E]`."""
        return [self._gathered_logits(), self._picked_logits()]

    def stats(self, logits: Sequence[Tensor], out: TokenStats) -> None:
        """Puts the statistics of every token's set into `out [N]`, which may lack the entropy."""
        for words, z in zip(self.support.words, logits, strict=True):
            if len(words):
                self.call.backend.word_stats(z, words, self.transform, out)

    def word_grads(self, logits: Sequence[Tensor], grads: RowGrads, needed: Tensor) -> WordGrads:
        """The gradient of the words of both routes, from those of the tokens `[N]`.

        Tokens that are not `needed`, bool `[N]`, have no part in any product, whatever their states
        hold.
        """
        if self.call.with_grad is not None:
            needed = needed & self.call.with_grad
        d_words = []
        for words, z in zip(self.support.words, logits, strict=True):
            if len(words):
                d = self.call.backend.word_grads(z, words, self.transform, grads)
                z = torch.where(needed[words.tokens], d, 0.0)
            d_words.append(z)
        return WordGrads(d_words[0], d_words[1], needed)

    @property
    def all_gathered(self) -> bool:
        """True if no token goes through logits."""
        return not len(self.support.through_logits)

    def add_to(self, d_words: WordGrads, gradients: HeadGradients) -> None:
        """Adds the share of all words."""
        words = self.support.through_logits
        for index, part, places in self.support.chunks():
            rows = gradients.head.rows(index)
            hidden = rows.hidden.masked_fill(~d_words.needed[index, None], 0.0)
            at = (places, words.ids[part])
            gradients.add_words(replace(rows, hidden=hidden), at, d_words.through_logits[part])
        if len(self.support.gathered):
            wanted = [x is not None for x in gradients.so_far()]
            self.gathered_gradients(d_words, wanted, gradients.so_far())

    def gathered_gradients(
        self, d_words: WordGrads, wanted: Sequence[bool], to: Gradients | None = None
    ) -> Gradients:
        """The share of the first route's words in the gradients, in the order of `HeadOperands`.

        `to`: gradients that this is added to; None makes them, in the dtypes of the operands.
        """
        d_logits = d_words.gathered if self.mine is None else d_words.gathered[self.mine]
        hidden, weight, bias, a_out, lora_b = self.operands
        words, sparse = self.words, self.support.distinct is not None
        of_tokens = of_ids = of_bias = (d_logits, words.ids, words.offsets)
        ones = weight.new_ones((1, 1), dtype=torch.float32)
        if (wanted[1] and not sparse) or wanted[2] or wanted[4]:
            begins = words.begins_of(torch.arange(len(weight) + 1, device=weight.device))
            of_ids = (d_logits[words.order], words.tokens_by_id, begins)
            of_bias = (of_ids[0], torch.zeros_like(words.order), begins)
        parts = (
            (hidden, of_tokens, weight), (weight, of_ids, hidden), (bias, of_bias, ones),
            (a_out, of_tokens, lora_b), (lora_b, of_ids, a_out),
        )  # fmt: skip
        results: list[Tensor | None] = []
        for i, (operand, group, rows) in enumerate(parts):
            if operand is None or not wanted[i]:
                results.append(None)
                continue
            if operand is weight and sparse:
                results.append(self._sparse_weight_gradient(d_words))
                continue
            assert rows is not None
            out = None if to is None else to[i]
            sums = self.call.backend.segment_sums
            if self.shard is not None and i in (0, 3):
                results.append(
                    self._over_ranks(sums(*group, rows, torch.float32, None), operand, out)
                )
                continue
            result = sums(
                *group, rows, operand.dtype, out if out is None or out.ndim > 1 else out[:, None]
            )
            results.append(result.view(operand.shape))
        return tuple(results)

    def _over_ranks(self, share: Tensor, operand: Tensor, out: Tensor | None) -> Tensor:
        """The sum of the ranks' shares in the gradient of rows, added to `out` if given."""
        assert self.shard is not None
        if self.shard.layout != "partial":
            share, work = self.shard.sum(share, None)
            work.wait()
        return share.to(operand.dtype) if out is None else out.add_(share)

    def _sparse_weight_gradient(self, d_words: WordGrads) -> Tensor:
        """The gradient of the weight by gathered words, row-sparse, in the weight's dtype."""
        d_logits = d_words.gathered
        hidden, weight, *_ = self.operands
        words, ids = self.support.gathered, self.support.distinct_ids()
        begins = torch.nn.functional.pad(words.begins_of(ids), (0, 1), value=len(words))
        values = self.call.backend.segment_sums(
            d_logits[words.order], words.tokens_by_id, begins, hidden, weight.dtype, None
        )
        return torch.sparse_coo_tensor(
            ids[None], values, weight.shape, is_coalesced=True, check_invariants=False
        )

    def _gathered_logits(self) -> Tensor:
        hidden, weight, bias, a_out, lora_b = self.operands
        words, dots = self.words, self.call.backend.word_dots
        z = _bias_of(words, bias, weight)
        if len(words):
            dots(hidden, weight, words, z)
            if a_out is not None and lora_b is not None:
                dots(a_out, lora_b, words, z)
            if self.call.rounding is not None:
                round_(z, self.call.rounding)
        if self.shard is None or not len(self.support.gathered):
            return z
        everyone = z.new_zeros(len(self.support.gathered)).index_put_((self.mine,), z)
        everyone, work = self.shard.sum(everyone, None)
        work.wait()
        return everyone

    def _picked_logits(self) -> Tensor:
        _, weight, bias, *_ = self.operands
        words = self.support.through_logits
        # Rounded logits have their bias.
        z = _bias_of(words, None if self.call.rounding else bias, weight)
        if len(words):
            head = LMHead(self.operands, self.call, self.support.logit_rows)
            for index, part, places in self.support.chunks():
                z[part] += head.logits(head.rows(index))[places, words.ids[part]]
        return z


def _by_rows(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def _bias_of(words: Words, bias: Tensor | None, like: Tensor) -> Tensor:
    """The bias of each word, float32 `[E]`."""
    if bias is None:
        return like.new_zeros(len(words), dtype=torch.float32)
    return bias.detach()[words.ids].float()

"""The head over the words that a sampler kept: statistics, and gradients of all operands.

    z_tj = logits of token t at the words j of its set S_t, and of no others
    l, E = token_stats over S_t
    D_tj = their gradient, as of any softmax
    dh_t = sum over j in S_t of D_tj W_j,    dW_j = sum over t with j in S_t of D_tj h_t

so that no row of logits is made: the head costs |S_t| rows of W instead of V. Each row of dh and of
dW is summed by one owner, in float32 and in one order, and rounded once; for dW the words are
sorted by id. The forward keeps one number per word; the backward makes the products.

Where ranks share the vocabulary, each makes the logits of the words that it has. These are added
up: 4 bytes per word. Statistics and D are then the same on all ranks, dW is each rank's own, and dh
is added up once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .backends import RowGrads, TokenStats, Words
from .head_call import HeadCall, HeadOperands
from .head_gradients import HeadGradients
from .lm_head import round_
from .support import check_support, support_of

Gradients = tuple[Tensor | None, ...]


def with_support(call: HeadCall, support: object, *, logsumexp: bool = False) -> HeadCall:
    """The call, without the tokens that have a support in its mask; `support_of` has the rest."""
    shard, V, targets = call.shard, call.columns, call.targets
    if shard is not None:
        if call.target_ids is None:
            raise ValueError(
                "support: expected None where ranks with tokens of their own share the vocabulary, "
                f"hidden_layout={shard.layout!r}; got a support"
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
        targets=targets,
        mask=call.mask,
        V=V,
        checks=call.checks,
        logsumexp=logsumexp,
    )
    others = ~found.tokens
    return replace(call, mask=others if call.mask is None else call.mask & others, support=found)


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

    def stats(self, logits: Tensor, out: TokenStats) -> None:
        """Puts the statistics of every token's set into `out [N]`, which may lack the entropy."""
        if len(self.support.gathered):
            self.call.backend.word_stats(logits, self.support.gathered, self.transform, out)

    def word_grads(self, logits: Tensor, grads: RowGrads, needed: Tensor) -> Tensor:
        """The gradient of the raw logits of words, float32 `[E]`, from those of the tokens `[N]`.

        Tokens that are not `needed`, bool `[N]`, have no part in any product, whatever their states
        hold.
        """
        words = self.support.gathered
        if self.call.with_grad is not None:
            needed = needed & self.call.with_grad
        if not len(words):
            return logits
        d_words = self.call.backend.word_grads(logits, words, self.transform, grads)
        return torch.where(needed[words.tokens], d_words, 0.0)

    def add_to(self, d_words: Tensor, gradients: HeadGradients) -> None:
        """Adds the share of all words."""
        if len(self.support.gathered):
            wanted = [x is not None for x in gradients.so_far()]
            self.gathered_gradients(d_words, wanted, gradients.so_far())

    def gathered_gradients(
        self, d_words: Tensor, wanted: Sequence[bool], to: Gradients | None = None
    ) -> Gradients:
        """The share of the words in the gradients, in the order of `HeadOperands`.

        `to`: gradients that this is added to; None makes them, in the dtypes of the operands.
        """
        d_logits = d_words if self.mine is None else d_words[self.mine]
        hidden, weight, bias, a_out, lora_b = self.operands
        words = self.words
        of_tokens = of_ids = of_bias = (d_logits, words.ids, words.offsets)
        ones = weight.new_ones((1, 1), dtype=torch.float32)
        if wanted[1] or wanted[2] or wanted[4]:
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

    def logits(self) -> Tensor:
        """The raw logits of all words, bias included, float32 `[E]`."""
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


def _by_rows(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def _bias_of(words: Words, bias: Tensor | None, like: Tensor) -> Tensor:
    """The bias of each word, float32 `[E]`."""
    if bias is None:
        return like.new_zeros(len(words), dtype=torch.float32)
    return bias.detach()[words.ids].float()

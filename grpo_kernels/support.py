"""The words that a sampler kept for each token, checked, and in the order of the products.

With top-k, top-p or min-p sampling the policy that acted is the softmax over the kept set S_t. It
comes as CSR, `(token_ids, offsets)`: `token_ids[offsets[t] : offsets[t + 1]]` is S_t, nothing at
all stands for the whole vocabulary, and whatever belongs to a masked token is not looked at.

A *word* is here one pair of a token and an id of its set. Everything is found out on the device;
the number of words is read together with the checks, in the one transfer of a call.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from .backends import Words
from .layout import Sizes, ValueChecks, check_tensor, to_device
from .objective import masked_quantile

# Sets of a larger share of the vocabulary had better not be gathered.
_LARGE_SHARE = 1 / 20


@dataclass(frozen=True)
class Support:
    """The kept words of a call's tokens, which are multiplied one by one.

    A set of one word has log-prob 0 and no gradient whatever its logit is: it takes no part, unless
    `logsumexp` is wanted.
    """

    tokens: Tensor  # bool [N]: those that have a set
    counts: Tensor  # int64 [N]: words of each, 0 without a set
    takes_part: Tensor  # bool [N]
    unpicked: list[_AllWords]  # one, until it is picked from: it is as large as what comes of it
    sizes: Sizes  # words that take part, tokens that have a set
    V: int

    @cached_property
    def gathered(self) -> Words:
        """The words that take part."""
        num_words, num_sets = self.sizes.numbers
        if num_words > _LARGE_SHARE * self.V * num_sets:
            _warn_of_large_sets()
        return self.unpicked.pop().of(self.takes_part, self.counts, num_words)

    def metrics(self, num_tokens: Tensor) -> dict[str, Tensor]:
        """Sizes of the sets, and shares; `num_tokens`, 0-d, are unmasked."""
        has, counts = self.tokens.float(), self.counts.float()
        with_set = has.sum()
        return {
            "support/mean": counts.sum() / with_set.clamp(min=1),
            "support/p99": masked_quantile(counts, has, 0.99),
            "support/singletons": (self.counts == 1).sum() / with_set.clamp(min=1),
            "support/gathered": with_set / num_tokens.clamp(min=1),
        }


@cache
def _warn_of_large_sets() -> None:
    """Warns, once per process."""
    warnings.warn(
        f"support: expected sets of less than {_LARGE_SHARE:.0%} of the vocabulary on average; got "
        "larger ones, whose rows of the head cost more to gather than whole rows of logits: leave "
        "the support out where sampling keeps so much",
        stacklevel=3,
    )


@dataclass(frozen=True)
class _AllWords:
    """The words as they came, `[K]`, with those that belong to no token."""

    ids: Tensor  # int64
    tokens: Tensor  # int64
    belongs: Tensor  # bool
    by_id: Tensor  # int64: a permutation
    positions: Tensor  # int64 [N]

    def of(self, tokens: Tensor, counts: Tensor, size: int) -> Words:
        """The `size` words of some tokens, bool `[N]`."""
        if size == 0:
            none, zeros = self.ids[:0], torch.zeros_like(counts)
            return Words(none, none, _from_zero(zeros), zeros, none)
        offsets = _from_zero(torch.where(tokens, counts, 0).cumsum(0))
        if size == len(self.ids):
            return Words(self.ids, self.tokens, offsets, self.positions, self.by_id)
        keep = self.belongs & tokens[self.tokens]
        index = indices(keep, size)
        ranks = keep.cumsum(0) - 1
        order = ranks[self.by_id[indices(keep[self.by_id], size)]]
        return Words(self.ids[index], self.tokens[index], offsets, self.positions, order)


def batch_support(
    supports: Sequence[tuple[Tensor, Tensor] | None],
    length: int,
    device: torch.device | str | None = None,
    *,
    targets: Tensor | Sequence[Sequence[int]] | None = None,
) -> tuple[Tensor, Tensor]:
    """Joins the supports of completions into that of a batch padded on the right.

    Args:
        supports: per completion `token_ids [K]` and `offsets [tokens + 1]` on the CPU, as
            `fused_grpo_loss` has them; None for one whose tokens were sampled from the whole
            vocabulary.
        length: T, the tokens of a padded completion, which have no words where there is padding.
        device: where the result goes, without waiting for the device's work; None: the CPU.
        targets: `[B, T]` on the CPU, or a sequence of ids per completion: sets that lack their
            target are left out, so that a call scores these tokens over the whole vocabulary. None:
            all sets stay as they are, and a call refuses those that lack their target.

    Returns:
        `token_ids` and `offsets [B * T + 1]`, the `support` of a call on `[B, T]`.

    Raises:
        ValueError: a completion with more than `length` tokens, or with more than it has targets.
    """
    if targets is not None and len(targets) != len(supports):
        raise ValueError(
            f"targets: expected those of {len(supports)} completions, as many as supports; got "
            f"{len(targets)}"
        )
    counts = torch.zeros(len(supports), length, dtype=torch.int64)
    parts = [torch.zeros(0, dtype=torch.int32)]
    for i, support in enumerate(supports):
        if support is not None:
            token_ids, offsets = support
            if len(offsets) - 1 > length:
                raise ValueError(
                    f"length: expected as many as the longest completion has tokens, "
                    f"{len(offsets) - 1}; got {length}"
                )
            of_tokens = offsets.diff()
            if targets is not None:
                token_ids, of_tokens = _with_targets(token_ids, of_tokens, targets[i])
            counts[i, : len(of_tokens)] = of_tokens
            parts.append(token_ids)
    offsets = _from_zero(counts.flatten().cumsum(0))
    return to_device(torch.cat(parts), device), to_device(offsets, device)


def _with_targets(
    token_ids: Tensor, counts: Tensor, targets: Tensor | Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The ids and counts of a completion, those of sets that lack their target left out."""
    targets = torch.as_tensor(targets)
    if targets.ndim != 1 or len(targets) < len(counts):
        raise ValueError(
            f"targets: expected an id for each of a completion's {len(counts)} tokens; got shape "
            f"{list(targets.shape)}"
        )
    if targets.device.type != "cpu":
        raise ValueError(f"targets: expected ids on the CPU; got a tensor on {targets.device}")
    tokens = torch.arange(len(counts)).repeat_interleave(counts)
    if len(tokens) != len(token_ids):
        raise ValueError(
            f"supports: expected offsets that end at the {len(token_ids)} ids; got {len(tokens)}"
        )
    found = torch.zeros(len(counts), dtype=torch.bool)
    found[tokens[token_ids == targets[tokens]]] = True
    return token_ids[found[tokens]], torch.where(found, counts, 0)


def check_support(support: object, num_tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The ids and offsets of a support, of the right shapes and dtypes."""
    if not isinstance(support, (tuple, list)) or len(support) != 2:
        raise TypeError(
            "support: expected a pair of tensors, token_ids and offsets, or None; got "
            f"{type(support).__name__}"
        )
    integers = (torch.int64, torch.int32)
    ids = check_tensor("support[0]", support[0], dtypes=integers, device=device)
    if ids.ndim != 1:
        raise ValueError(f"support[0]: expected token ids, shape [K]; got {list(ids.shape)}")
    shape = (num_tokens + 1,)
    offsets = check_tensor("support[1]", support[1], shape=shape, dtypes=integers, device=device)
    return ids.detach().long(), offsets.detach().long()


def support_of(
    ids: Tensor,
    offsets: Tensor,
    *,
    targets: Tensor,
    mask: Tensor | None,
    V: int,
    checks: ValueChecks,
    logsumexp: bool = False,
) -> Support:
    """The support of flat targets, checked as far as it can be without reading the device.

    Args:
        ids: int64 `[K]`.
        offsets: int64 `[N + 1]`.
        targets: int64 `[N]`.
        mask: bool `[N]`, or None.
        V: ids are below it.
        checks: gets the questions, and the sizes to be read.
        logsumexp: whether sets of one word take part.
    """
    N, device = len(targets), ids.device
    ids = ids if N else ids[:0]
    active = torch.ones_like(targets, dtype=torch.bool) if mask is None else mask
    begins, ends, last = _intervals(offsets, active, len(ids), checks)
    counts = ends - begins
    places = torch.arange(len(ids), device=device)
    tokens = torch.searchsorted(last, places, right=True).clamp(max=max(N - 1, 0))
    belongs, hits = _compared(ids, places, tokens, torch.stack([begins, ends, targets]))
    exists = (ids >= 0) & (ids < V)
    checks.add(belongs & ~exists, f"support[0]: expected ids in [0, {V}); got ids outside")

    found, positions = _found(hits, places, begins, ends)
    del hits, places
    checks.add(
        (counts > 0) & (found == 0),
        "support: expected the target of every token among its ids (batch_support(..., targets=) "
        "empties other sets, whose tokens are then scored over the whole vocabulary); got tokens "
        "whose target is not",
    )
    by_id = _sorted(torch.where(belongs & exists, ids, V), tokens, V, checks)
    has = counts > 0
    takes_part = has if logsumexp else counts > 1
    all_words = _AllWords(ids, tokens, belongs, by_id, positions)
    sizes = checks.ask(torch.where(takes_part, counts, 0).sum(), has.sum())
    return Support(has, counts, takes_part, [all_words], sizes, V)


def _intervals(
    offsets: Tensor, active: Tensor, K: int, checks: ValueChecks
) -> tuple[Tensor, Tensor, Tensor]:
    """Begin and end of each token's words, equal for masked or wrong ones; and how far they reach.

    The last, the largest end so far, ascends whatever masked tokens have.
    """
    begins, ends = offsets[:-1], offsets[1:]
    reached = torch.where(active, ends, 0).cummax(0).values if len(ends) else ends
    wrong = (begins < _from_zero(reached)[:-1]) | (ends < begins) | (ends > K)
    # Masked tokens may lie at either end.
    wrong[:1] |= begins[:1] != 0
    wrong[-1:] |= ends[-1:] != K
    checks.add(
        wrong & active,
        f"support[1]: expected offsets that start at 0, never decrease, and end at the {K} ids; "
        "got offsets that do not",
    )
    begins = begins.clamp(0, K)
    return begins, torch.where(active & ~wrong, ends, begins), reached


def _compared(
    ids: Tensor, places: Tensor, tokens: Tensor, of_tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """Which words belong to their token, and are its target; from begins, ends and targets."""
    begin, end, target = of_tokens[:, tokens]
    belongs = (places >= begin) & (places < end)
    return belongs, belongs & (ids == target)


def _found(hits: Tensor, places: Tensor, begins: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """How often each token's words hit, and the place of the one that does, from its begin."""
    sums = _from_zero(torch.stack([hits.long(), torch.where(hits, places, 0)]).cumsum(1))
    found, place = sums[:, ends] - sums[:, begins]
    return found, place - begins


def _sorted(ids: Tensor, tokens: Tensor, V: int, checks: ValueChecks) -> Tensor:
    """The permutation that sorts `ids`, where V stands for none; checks that none repeats."""
    ordered, by_id = ids.sort(stable=True)
    of = tokens[by_id]
    again = (ordered[1:] == ordered[:-1]) & (of[1:] == of[:-1]) & (ordered[1:] < V)
    checks.add(again, "support[0]: expected each id once per token; got repeated ones")
    return by_id


def indices(keep: Tensor, count: int) -> Tensor:
    """The indices of the `count` entries of `keep` that are True, without reading the device."""
    everything = torch.arange(len(keep), device=keep.device)
    if count == len(keep):
        return everything
    # All others go to one place past the end.
    place = torch.where(keep, keep.cumsum(0) - 1, count)
    return everything.new_empty(count + 1).scatter_(0, place, everything)[:count]


def _from_zero(sums: Tensor) -> Tensor:
    """A 0 before the last dimension's first entry."""
    return torch.nn.functional.pad(sums, (1, 0))

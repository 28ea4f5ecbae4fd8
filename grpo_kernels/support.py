"""The words that a sampler kept for each token, checked, and in the order of the products.

With top-k, top-p or min-p sampling the policy that acted is the softmax over the kept set S_t. It
comes as CSR, `(token_ids, offsets)`: `token_ids[offsets[t] : offsets[t + 1]]` is S_t, nothing at
all stands for the whole vocabulary, and whatever belongs to a masked token is not looked at.

A *word* is here one pair of a token and an id of its set. Everything is found out on the device;
the number of words is read together with the checks, in the one transfer of a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .backends import Words
from .config import check_choice
from .layout import Sizes, ValueChecks, check_tensor, to_device
from .objective import masked_quantile

FALLBACKS = ("error", "dense")
SCORES = ("support", "both")
# A word moves three rows: of W for its logit and for dh, of the states for dW. A row of logits is
# three GEMMs of 2 V H FLOP. FLOPs of a large GEMM in the time of a byte moved: measured on a CPU,
# predicted for GPUs (an H200's 780 TFLOP/s and 2.6 TB/s of gathers).
_FLOPS_PER_BYTE = {"cpu": 7.0, "gpu": 300.0}
# Rows of logits also read W and write dW once per call: worth so many words per word of V.
WORDS_PER_WEIGHT = 1.0


@dataclass(frozen=True)
class Support:
    """The kept words of a call's tokens, on two routes.

    The words of `gathered` tokens are multiplied one by one; `through_logits`, a token's whole row
    of logits is made, which pays where a set is a large part of the vocabulary. A set of one word
    has log-prob 0 and no gradient whatever its logit is: it takes part in neither, unless
    `logsumexp` is wanted.
    """

    tokens: Tensor  # bool [N]: those that have a set
    counts: Tensor  # int64 [N]: words of each, 0 without a set
    num_fallback: Tensor  # int64, 0-d: tokens whose target was outside
    unrouted: list[_AllWords]  # one, until it is routed: it is as large as what comes of it
    routes: Tensor  # bool [2, N]: gathered, through logits
    rows_per_chunk: int  # of logits
    sizes: Sizes
    distinct: Tensor | None  # bool [V]: ids of gathered words, where they are wanted

    @cached_property
    def words(self) -> tuple[Words, Words]:
        """The words of both routes: multiplied one by one, and picked out of rows of logits."""
        of, (one_by_one, picked) = self.unrouted.pop().of, self.sizes.numbers[:2]
        return (
            of(self.routes[0], self.counts, one_by_one, ordered=True),
            of(self.routes[1], self.counts, picked, ordered=False),
        )

    @property
    def gathered(self) -> Words:
        """The words that are multiplied one by one."""
        return self.words[0]

    @property
    def through_logits(self) -> Words:
        """The words whose logits come from whole rows."""
        return self.words[1]

    def chunks(self) -> Iterator[tuple[Tensor, slice, Tensor]]:
        """Cuts the tokens of `through_logits`: their ids, their words, the row of each word."""
        _, _, num_tokens, _, *bounds = self.sizes.numbers
        tokens = indices(self.routes[1], num_tokens)
        ranks = self.routes[1].cumsum(0) - 1
        for i, first in enumerate(range(0, num_tokens, self.rows_per_chunk)):
            words = slice(bounds[i], bounds[i + 1])
            rows = ranks[self.through_logits.tokens[words]] - first
            yield tokens[first : first + self.rows_per_chunk], words, rows

    @property
    def logit_rows(self) -> int:
        """The most rows of logits that are needed at a time."""
        return min(self.rows_per_chunk, self.sizes.numbers[2])

    def distinct_ids(self) -> Tensor:
        """The ids of gathered words, ascending, each once."""
        assert self.distinct is not None
        return indices(self.distinct, self.sizes.numbers[3])

    def metrics(self, num_tokens: Tensor) -> dict[str, Tensor]:
        """Sizes of the sets, and shares; `num_tokens`, 0-d, are unmasked."""
        has, counts = self.tokens.float(), self.counts.float()
        with_set = has.sum().clamp(min=1)
        gathered = (self.tokens & ~self.routes[1]).sum()
        return {
            "support/mean": counts.sum() / with_set,
            "support/p99": masked_quantile(counts, has, 0.99),
            "support/singletons": (self.counts == 1).sum() / with_set,
            "support/gathered": gathered / num_tokens.clamp(min=1),
            "support/fallback": self.num_fallback.float(),
        }


@dataclass(frozen=True)
class _AllWords:
    """The words as they came, `[K]`, with those that belong to no token."""

    ids: Tensor  # int64
    tokens: Tensor  # int64
    belongs: Tensor  # bool
    by_id: Tensor  # int64: a permutation
    positions: Tensor  # int64 [N]

    def of(self, tokens: Tensor, counts: Tensor, size: int, *, ordered: bool) -> Words:
        """The `size` words of some tokens, bool `[N]`; in the order of their ids, too."""
        if size == 0:
            none, zeros = self.ids[:0], torch.zeros_like(counts)
            return Words(none, none, _from_zero(zeros), zeros, none)
        offsets = _from_zero(torch.where(tokens, counts, 0).cumsum(0))
        if size == len(self.ids):
            return Words(self.ids, self.tokens, offsets, self.positions, self.by_id)
        keep = self.belongs & tokens[self.tokens]
        index = indices(keep, size)
        order = index[:0]
        if ordered:
            ranks = keep.cumsum(0) - 1
            order = ranks[self.by_id[indices(keep[self.by_id], size)]]
        return Words(self.ids[index], self.tokens[index], offsets, self.positions, order)


def batch_support(
    supports: Sequence[tuple[Tensor, Tensor] | None],
    length: int,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:
    """Joins the supports of completions into that of a batch padded on the right.

    Args:
        supports: per completion `token_ids [K]` and `offsets [tokens + 1]` on the CPU, as
            `fused_grpo_loss` has them; None for one whose tokens were sampled from the whole
            vocabulary.
        length: T, the tokens of a padded completion, which have no words where there is padding.
        device: where the result goes, without waiting for the device's work; None: the CPU.

    Returns:
        `token_ids` and `offsets [B * T + 1]`, the `support` of a call on `[B, T]`.

    Raises:
        ValueError: a completion with more than `length` tokens.
    """
    counts = torch.zeros(len(supports), length, dtype=torch.int64)
    parts = [torch.zeros(0, dtype=torch.int32)]
    for row, support in zip(counts, supports, strict=True):
        if support is not None:
            token_ids, offsets = support
            if len(offsets) - 1 > length:
                raise ValueError(
                    f"length: expected as many as the longest completion has tokens, "
                    f"{len(offsets) - 1}; got {length}"
                )
            row[: len(offsets) - 1] = offsets.diff()
            parts.append(token_ids)
    offsets = _from_zero(counts.flatten().cumsum(0))
    return to_device(torch.cat(parts), device), to_device(offsets, device)


def check_support_options(
    support: object, fallback: object, score: object, sparse_weight_grad: object
) -> None:
    """Refuses options of a support that did not come, or that exclude each other."""
    check_choice("support_fallback", fallback, FALLBACKS)
    check_choice("score", score, SCORES)
    if not isinstance(sparse_weight_grad, bool):
        raise TypeError(f"sparse_weight_grad: expected a bool; got {sparse_weight_grad!r}")
    if support is None and score == "both":
        raise ValueError("score: expected 'support', as no support came; got 'both'")
    if sparse_weight_grad and (support is None or score == "both"):
        raise ValueError(
            "sparse_weight_grad: expected False unless every token is scored over a support alone; "
            f"got True with {'no support' if support is None else repr(score)}"
        )


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
    fallback: str,
    *,
    targets: Tensor,
    mask: Tensor | None,
    V: int,
    bytes_per_element: int,
    rows_per_chunk: int,
    checks: ValueChecks,
    logsumexp: bool = False,
    all_gathered: bool = False,
    distinct: bool = False,
) -> Support:
    """The support of flat targets, checked as far as it can be without reading the device.

    Args:
        ids: int64 `[K]`.
        offsets: int64 `[N + 1]`.
        fallback: `"dense"` leaves tokens whose target is not in their set without one.
        targets: int64 `[N]`.
        mask: bool `[N]`, or None.
        V: ids are below it.
        bytes_per_element: that a gathered row moves; with V it decides which route pays.
        rows_per_chunk: rows of logits that there is memory for.
        checks: gets the questions, and the sizes to be read.
        logsumexp: whether sets of one word take part.
        all_gathered: no words go through logits, whatever they cost.
        distinct: whether `distinct_ids` is wanted.
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
    outside = (counts > 0) & (found == 0)
    if fallback == "error":
        checks.add(
            outside,
            "support: expected the target of every token among its ids (support_fallback='dense' "
            "scores others over the whole vocabulary); got tokens whose target is not",
        )
    counts = counts.masked_fill(outside, 0)
    belongs = belongs & ~outside[tokens]

    by_id = _sorted(torch.where(belongs & exists, ids, V), tokens, V, checks)
    routes = _routes(counts, V, bytes_per_element, 1 if logsumexp else 2, all_gathered)
    all_words = _AllWords(ids, tokens, belongs, by_id, positions)
    wide = torch.where(routes[1], counts, 0).cumsum(0)
    present = None
    if distinct:
        used = torch.where(belongs & exists & routes[0][tokens], ids, V)
        present = torch.zeros(V + 1, dtype=torch.bool, device=device).scatter_(0, used, True)[:V]
    sizes = checks.ask(
        torch.where(routes, counts, 0).sum(1),
        routes[1].sum(),
        routes[1].sum() if present is None else present.sum(),
        _bounds(wide, routes[1].cumsum(0), rows_per_chunk),
    )
    return Support(
        counts > 0, counts, outside.sum(), [all_words], routes, rows_per_chunk, sizes, present
    )  # fmt: skip


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


def _routes(
    counts: Tensor, V: int, bytes_per_element: int, least: int, all_gathered: bool
) -> Tensor:
    """The tokens that are gathered, and those that go through logits, bool `[2, N]`."""
    takes_part = counts >= least
    if all_gathered:
        return torch.stack([takes_part, torch.zeros_like(takes_part)])
    limit = words_per_row(counts.device.type, V, bytes_per_element)
    wide = takes_part & (counts > limit)
    pays = torch.where(wide, counts - limit, 0.0).sum() > WORDS_PER_WEIGHT * V
    wide = wide & pays
    return torch.stack([takes_part & ~wide, wide])


def words_per_row(device_type: str, V: int, bytes_per_element: int) -> float:
    """The words that cost as much as a row of logits."""
    per_byte = _FLOPS_PER_BYTE["cpu" if device_type == "cpu" else "gpu"]
    return 6 * V / (3 * bytes_per_element * per_byte)


def _bounds(words: Tensor, tokens: Tensor, step: int) -> Tensor:
    """The words before every `step`-th token, from cumulative sums `[N]`, and all of them."""
    N = len(words)
    firsts = torch.arange(step, N + step, step, device=words.device)
    ends = torch.searchsorted(tokens, firsts).clamp(max=max(N - 1, 0))
    return _from_zero(words[ends])


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

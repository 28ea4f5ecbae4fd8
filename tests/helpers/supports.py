"""Supports of a batch's tokens, as samplers leave them: ragged, with singletons and without any."""

from __future__ import annotations

from dataclasses import replace

import torch

from grpo_kernels import LMHead, Support, reference
from tests.helpers.batches import Batch


def make_support(batch: Batch, *, seed: int = 0, without: float = 0.2, most: int = 60) -> Support:
    """A set for each token: singletons, some words, many; a share `without` any.

    The target is in it, in any place; masked tokens have words that do not exist.
    """
    g = torch.Generator().manual_seed(seed)
    V, N = len(batch.weight), batch.targets.numel()
    sets: list[list[int]] = []
    kinds = torch.rand(N, generator=g).tolist()
    targets, masked = batch.targets.reshape(-1).tolist(), (~batch.mask).reshape(-1).tolist()
    for kind, target, hidden in zip(kinds, targets, masked, strict=True):
        if hidden:
            sets.append([-7, V + 3, V + 3][: int(3 * kind)])
            continue
        if kind < without:
            sets.append([])
            continue
        count = 1 if kind < without + 0.2 else int(torch.randint(2, most, (1,), generator=g))
        if kind > 0.95:
            count = V // 2
        other_ids = [w for w in torch.randperm(V, generator=g)[:count].tolist() if w != target]
        words = [*other_ids[: count - 1], target]
        sets.append([words[i] for i in torch.randperm(len(words), generator=g).tolist()])
    return csr(sets)


def csr(sets: list[list[int]]) -> Support:
    ids = torch.tensor([w for words in sets for w in words], dtype=torch.int32)
    offsets = torch.tensor([0, *(len(words) for words in sets)]).cumsum(0)
    return Support(ids, offsets)


def with_logps_of(batch: Batch, support: Support, **head: object) -> Batch:
    """The batch with old, reference and sampler's log-probs around those of the support."""
    mask = batch.mask
    kwargs = {name: getattr(batch, name) if x is True else x for name, x in head.items()}
    args = batch.hidden.double(), LMHead(batch.weight.double(), **kwargs), batch.targets, mask
    both = [reference.linear_logprobs(*args, support=s).logps for s in (None, support)]
    shift = (both[1] - both[0]).float()
    names = ("old_logps", "ref_logps", "sampling_logps")
    return replace(batch, **{name: getattr(batch, name) + shift for name in names})

"""Supports drawn at random, and the policy they lead to by masking whole rows of logits."""

from itertools import chain

import torch


def draw_support(targets, V, *, seed=0, dense=0.2):
    """Up to 20 words per token and its target; for a share `dense` of the tokens, none."""
    g = torch.Generator().manual_seed(seed)
    words = []
    for target in targets.flatten().tolist():
        count = int(torch.randint(0, 20, (), generator=g))
        kept = {target, *torch.randint(0, V, (count,), generator=g).tolist()}
        drop = float(torch.rand((), generator=g)) < dense
        words.append([] if drop else sorted(kept))
    counts = torch.tensor([0, *map(len, words)])
    return torch.tensor([*chain.from_iterable(words)], dtype=torch.int32), counts.cumsum(0)


def masked_logps(logits, targets, support):
    """Log-probs of targets and entropies of the softmax over the kept words."""
    token_ids, offsets = support
    counts = offsets.diff()
    kept = torch.zeros(targets.numel(), logits.shape[-1], dtype=torch.bool)
    kept[torch.arange(len(counts)).repeat_interleave(counts), token_ids.long()] = True
    kept[counts == 0] = True
    kept = kept.view(logits.shape)
    log_p = logits.masked_fill(~kept, -torch.inf).log_softmax(-1)
    # The entropy's gradient has to be finite where a word is out.
    finite = log_p.masked_fill(~kept, 0.0)
    logps = log_p.gather(-1, targets[..., None])[..., 0]
    return logps, -(log_p.exp() * finite).sum(-1)

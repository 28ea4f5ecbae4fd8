"""The truncated policy by masking whole rows of logits."""

import torch


def masked_logps(logits, targets, support, mask):
    """Log-probs of targets and entropies of the softmax over the kept words; 0 where masked."""
    token_ids, offsets = support
    V = logits.shape[-1]
    rows = torch.arange(targets.numel()).repeat_interleave(offsets.diff())
    exists = (token_ids >= 0) & (token_ids < V)  # masked tokens may have others
    kept = torch.zeros(targets.numel(), V, dtype=torch.bool)
    kept[rows[exists], token_ids[exists].long()] = True
    kept[~kept.any(1)] = True
    kept = kept.view(logits.shape)
    log_p = logits.masked_fill(~kept, -torch.inf).log_softmax(-1)
    # The entropy's gradient has to be finite where a word is out.
    entropy = -(log_p.exp() * log_p.masked_fill(~kept, 0.0)).sum(-1)
    logps = log_p.gather(-1, targets[..., None])[..., 0]
    return torch.where(mask, logps, 0.0), torch.where(mask, entropy, 0.0)

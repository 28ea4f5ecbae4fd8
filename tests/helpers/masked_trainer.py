"""TRL's trainer of the truncated policy, by masking whole rows of logits."""

import torch
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from trl import GRPOTrainer


def warpers_of(trainer):
    """Transformers' own, in its order or in vLLM's, which applies `min_p` before the others."""
    first = [TemperatureLogitsWarper(trainer.temperature)]
    top = [TopKLogitsWarper(trainer.top_k)] if trainer.top_k else []
    top += [TopPLogitsWarper(trainer.top_p)]
    least = [MinPLogitsWarper(trainer.min_p)] if trainer.min_p else []
    return first + (least + top if trainer.use_vllm else top + least)


@torch.no_grad()
def kept_sets(trainer, prompt_ids, completion_ids):
    """Entries that the trainer's warpers keep for each token: per completion [T, V], bool."""
    kept = []
    for prompt, completion in zip(prompt_ids, completion_ids, strict=True):
        ids = torch.tensor([prompt + completion])
        scores = trainer.model(ids).logits[0, len(prompt) - 1 : -1].float()
        for warper in warpers_of(trainer):
            scores = warper(ids, scores)
        kept.append(scores > -torch.inf)
    return kept


class MaskedGRPOTrainer(GRPOTrainer):
    """TRL's trainer over what its warpers keep, found anew from the sampling model.

    A completion is known by its tokens, whatever batch they are in.
    """

    def __init__(self, *args, **kwargs):
        self.kept = {}
        super().__init__(*args, **kwargs)

    def key(self, ids):
        return (self.model.training, *ids)

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        completion_ids, logps = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        kept = kept_sets(self, prompt_ids, completion_ids)
        for prompt, completion, own in zip(prompt_ids, completion_ids, kept, strict=True):
            self.kept[self.key(prompt + completion)] = own
        return completion_ids, logps

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, *_, compute_entropy=False, **__
    ):
        T = logits_to_keep
        logits = model(input_ids, attention_mask=attention_mask).logits[:, -T - 1 : -1].float()
        kept = torch.ones_like(logits, dtype=torch.bool)
        for row, (ids, mask) in enumerate(zip(input_ids, attention_mask, strict=True)):
            if mask[-T:].any():  # else the completion was cut, and is masked
                own = self.kept[self.key(ids[mask.bool()].tolist())]
                kept[row, : len(own)] = own
        log_p = (logits / self.temperature).masked_fill(~kept, -torch.inf).log_softmax(-1)
        logps = log_p.gather(-1, input_ids[:, -T:, None])[..., 0]
        entropy = -(log_p.exp() * log_p.masked_fill(~kept, 0.0)).sum(-1)
        return logps, entropy if compute_entropy else None, None

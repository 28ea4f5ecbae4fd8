"""Gives TRL's GRPOTrainer this library's LM head: same arguments, loss, metrics and gradients.

    from grpo_kernels.integrations.trl import FusedGRPOTrainer      # instead of GRPOTrainer
    trainer = FusedGRPOTrainer(model, reward_funcs=..., args=GRPOConfig(...), train_dataset=...)

TRL's code computes the loss and the logged metrics from the model's log-probs and entropies, which
here come from `attach_fused_head`. If the objective is token-local, one pass computes the gradient
with the log-probs: the returned loss has TRL's value and our gradient, and the two losses are
compared now and then. Otherwise TRL's loss is differentiated through `linear_logprobs`.

| file | content |
|---|---|
| `trainer.py` | the trainer and the patch: where TRL's methods are wrapped |
| `micro_batch.py` | the loss of a micro-batch |
| `loss.py` | TRL's loss as an objective of this library, and the comparison of the two |
| `deal.py` | the completions of a micro-batch, and the part of them that goes through the model |
| `replay.py`, `exact_kl.py`, `explain.py` | one option each |

A TRL that is newer than the tested ones warns. This folder alone depends on private parts of TRL:

- `GRPOTrainer._compute_loss`;
- `GRPOTrainer._get_per_token_logps_and_entropies`, which calls `model(..., fused_lm_head=True)`;
- `GRPOTrainer._prepare_inputs`, which keeps the micro-batches of a generation batch in
  `_buffered_inputs` and counts them in `_step`;
- `GRPOTrainer._generate_and_score_completions`, whose dict is shuffled and split, lists included,
  and `_calculate_rewards`, which it calls;
- `grpo_trainer.add_fused_lm_head`, which the constructor calls on its models;
- `grpo_trainer.BaseTunerLayer`, by which the constructor refuses adapters on the head (TRL's head
  would leave them out);
- `_entropy_bonus_enabled` and `_last_world_entropy`, the state of the entropy bonus; `_metrics`;
- with `replay_support`, `_generate_single_turn`, which calls `generate` of the unwrapped model;
  with vLLM also `vllm_generation.LLM`, which constructs the engine, and the `generate` of `llm`,
  called once.
"""

from . import versions  # noqa: F401 - raises before TRL is imported

# isort: split
from .trainer import FusedGRPOTrainer, patch_trl

__all__ = ["FusedGRPOTrainer", "patch_trl"]

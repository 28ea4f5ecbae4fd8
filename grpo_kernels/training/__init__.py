"""A lean GRPO loop: `Trainer(config, model, tokenizer, problems, held_out).train()`."""

from .config import TrainingConfig, parse_config
from .data import load as load_problems
from .loading import load_model
from .rollout import Completion, Rollout, Sampling
from .trainer import Trainer

__all__ = [
    "Completion",
    "Rollout",
    "Sampling",
    "Trainer",
    "TrainingConfig",
    "load_model",
    "load_problems",
    "parse_config",
]

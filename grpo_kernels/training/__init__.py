"""A lean GRPO loop: `Trainer(config, model, tokenizer, problems, held_out).train()`."""

import sys
import warnings

# `python -m grpo_kernels.training.evaluate` imports this package, and with it that module, first.
warnings.filterwarnings("ignore", "'grpo_kernels.training.* found in sys.modules", RuntimeWarning)

try:
    from .command_line import parse_config
    from .config import TrainingConfig
    from .loading import load_model
    from .problems.data import Problem, problem_of
    from .problems.data import load as load_problems
    from .problems.rewards import OwnMetrics
    from .run.metrics import Metric
    from .sampling.completions import Completion, SamplingParams
    from .sampling.rollout import Rollout
    from .step.samples import Samples
    from .train import Trainer
except ModuleNotFoundError as error:
    if str(error.name).startswith("grpo_kernels"):
        raise
    message = f"grpo_kernels.training needs {error.name}: pip install -e '.[train]' in the checkout"
    if sys.argv[:1] == ["-m"]:  # a command, which Python is about to run
        print(f"error: {message}", file=sys.stderr)
        raise SystemExit(2) from error
    raise ImportError(message) from error

__all__ = [
    "Completion",
    "Metric",
    "OwnMetrics",
    "Problem",
    "Rollout",
    "Samples",
    "SamplingParams",
    "Trainer",
    "TrainingConfig",
    "load_model",
    "load_problems",
    "parse_config",
    "problem_of",
]

"""Options from flags, or from a YAML file and flags after it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, overload

from .config import TrainingConfig
from .kinds import kinds_of

_Config = TypeVar("_Config", bound=TrainingConfig)
# Options of other trainers: ours, and what is different about it.
ELSEWHERE = {
    "batch_size": "prompts_per_step, over all processes",
    "bf16": "precision bf16",
    "clip_eps": "epsilon",
    "cliprange": "epsilon",
    "generation_batch_size": "prompts_per_step, in prompts, not completions",
    "gradient_accumulation_steps": "micro_batch_size: as many as are needed are added up",
    "kl_coef": "beta",
    "logging_steps": "show_every, of completions; metrics are logged every step",
    "lr": "learning_rate",
    "max_new_tokens": "max_completion_length",
    "max_steps": "steps, each with a rollout and epochs_per_rollout * minibatches updates",
    "mu": "epochs_per_rollout",
    "num_iterations": "epochs_per_rollout; where it renews the reference, sync_ref_every",
    "num_train_epochs": "steps, of prompts_per_step problems each",
    "output_dir": "output, the folder of runs, and name, that of the run in it",
    "per_device_train_batch_size": "micro_batch_size, in completions; changes memory alone",
    "ref_model_mixup_alpha": "ref_mixup_alpha, 1.0 where it is not given",
    "ref_model_sync_steps": "sync_ref_every, in steps, not updates",
    "report_to": "trackers",
    "reward_funcs": "rewards",
    "save_steps": "save_every",
    "eval_steps": "eval_every",
    "sync_ref_model": "sync_ref_every, above 0",
    "train_batch_size": "prompts_per_step, in prompts, not completions",
    "use_vllm": "rollout vllm",
}


@overload
def parse_config(
    argv: Sequence[str] | None = None, *, kind: type[_Config], **defaults: Any
) -> _Config: ...
@overload
def parse_config(argv: Sequence[str] | None = None, **defaults: Any) -> TrainingConfig: ...
def parse_config(
    argv: Sequence[str] | None = None, *, kind: type[TrainingConfig] = TrainingConfig,
    **defaults: Any,
) -> TrainingConfig:  # fmt: skip
    """Reads options from flags, or from one YAML file and flags that override it.

    Exits with the reason on standard error, as `argparse` does.

    Args:
        argv: flags, after the YAML file if there is one; None: those of the process.
        kind: `TrainingConfig`, or a dataclass with more options.
        defaults: options in the place of the defaults of `kind`.
    """
    import tyro

    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0].endswith((".yaml", ".yml")):
        argv[:1] = _flags_of(Path(argv[0]), kinds_of(kind))
    for flag in argv:
        meant = ELSEWHERE.get(flag.removeprefix("--").partition("=")[0].replace("-", "_"))
        if flag.startswith("--") and meant is not None:
            print(f"{flag.partition('=')[0]}: no option here; it is {meant}", file=sys.stderr)
            sys.exit(2)
    default = kind(model="a model")
    # Checked once flags have changed them, not before.
    for name, value in ({"model": ""} | defaults).items():
        if not hasattr(default, name):
            raise TypeError(f"parse_config: expected options of {kind.__name__}; got {name}")
        object.__setattr__(default, name, value)
    return tyro.cli(kind, args=argv, default=default, use_underscores=True)


def _flags_of(path: Path, kinds: Mapping[str, tuple[Any, ...]]) -> Iterator[str]:
    """The options in a file, as flags; exits if it holds none.

    An option gets what is written: 0123 and `no` are numbers and bools to those alone that are.
    """
    import yaml

    try:
        text = path.read_text()
        values = yaml.safe_load(text) or {}
        if not isinstance(values, dict):
            raise ValueError(f"expected options, one per line as `steps: 100`; got {values!r}")
        written = yaml.load(text, yaml.BaseLoader)
        for name, value in values.items():
            if value is None and NoneType not in kinds.get(name, (NoneType,)):
                raise ValueError(f"{name}: expected a value; got null")
    except (OSError, ValueError, yaml.YAMLError) as error:
        print(f"{path}: {error}", file=sys.stderr)
        sys.exit(2)
    for name, value in values.items():
        if isinstance(value, bool) and bool in kinds.get(name, (bool,)):
            yield f"--{'' if value else 'no_'}{name}"
        else:
            yield f"--{name}"
            given = "None" if value is None else written.get(name, value)
            if isinstance(given, dict):
                given = [x for pair in given.items() for x in pair]
            yield from map(str, given if isinstance(given, list) else [given])

"""Options from flags, or from a YAML file and flags after it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

from .config import TrainingConfig

_Config = TypeVar("_Config", bound=TrainingConfig)


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
        argv[:1] = _flags_of(Path(argv[0]))
    default = kind(model="a model")
    # Checked once flags have changed them, not before.
    for name, value in ({"model": ""} | defaults).items():
        if not hasattr(default, name):
            raise TypeError(f"parse_config: expected options of {kind.__name__}; got {name}")
        object.__setattr__(default, name, value)
    return tyro.cli(kind, args=argv, default=default, use_underscores=True)


def _flags_of(path: Path) -> Iterator[str]:
    """The options in a file, as flags; exits if it holds none."""
    import yaml

    try:
        values = yaml.safe_load(path.read_text()) or {}
        if not isinstance(values, dict):
            raise ValueError(f"expected options, one per line as `steps: 100`; got {values!r}")
    except (OSError, ValueError, yaml.YAMLError) as error:
        print(f"{path}: {error}", file=sys.stderr)
        sys.exit(2)
    for name, value in values.items():
        if isinstance(value, bool):
            yield f"--{'' if value else 'no_'}{name}"
        else:
            yield f"--{name}"
            yield from map(str, value if isinstance(value, list) else [value])

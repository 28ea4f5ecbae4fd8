"""Options from flags, or from a YAML file and flags after it; and messages for user errors."""

from __future__ import annotations

import re
import sys
import time
import traceback
from argparse import SUPPRESS, Action
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints, overload

from docstring_parser import parse_from_object
from jsonargparse import (
    ActionConfigFile,
    ActionYesNo,
    ArgumentParser,
    DefaultHelpFormatter,
    set_loader,
)
from ruamel.yaml import YAML, YAMLError

from ..base.hints import ELSEWHERE
from ..loss.config import GRPOLossConfig
from ..loss.losses import LOSS_TYPES, flat_fields
from .config import TrainingConfig, as_list, defaults_of, lists_of
from .run import ranks

_Config = TypeVar("_Config", bound=TrainingConfig)
# Titles in `--help`, by the first option under each in `TrainingConfig`.
_GROUPS = {
    "model": "Model", "dataset": "Data and rewards", "steps": "Sampling", "loss_type": "Loss",
    "epochs_per_rollout": "Updates", "output": "Logs and checkpoints",
}  # fmt: skip
TRACEBACK = "Show where in Python an error was raised."
# Seconds within which a launcher ends the other processes of a command.
_ENDED_S = 20.0
_CLIPPING = ("epsilon", "epsilon_high", "delta")  # most losses have these
_COMMAND, _SOME_LOSSES = "This command", "Options of some loss types only"


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

    A run's `config.json` is such a file, too. Exits like `argparse`, with the reason on standard
    error. `kind`: `TrainingConfig`, or a dataclass with more options, whose defaults `defaults`
    replace. `argv` None: the process's.
    """
    parser = _parser(kind, defaults)
    flags = [
        re.sub(r"^--[\w-]+", lambda name: "--" + name[0][2:].replace("-", "_"), text)
        for text in (sys.argv[1:] if argv is None else argv)
    ]
    if flags and flags[0].endswith((".yaml", ".yml", ".json")):
        flags.insert(0, "--config")
    options = parser.parse_args(flags).as_dict()
    try:
        return kind(**{option.name: options[option.name] for option in fields(kind)})
    except (TypeError, ValueError) as error:
        parser.error(str(error))


@contextmanager
def user_errors(argv: Sequence[str] | None = None) -> Iterator[None]:
    """Ends the command with status 2 and the text of a user error that the block raises.

    `--traceback` in `argv`, or among the flags of the process, shows the traceback.
    """
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        if not ranks.is_first_process():
            # Otherwise each process would print the error; the launcher ends them after the first.
            time.sleep(_ENDED_S)
        if "--traceback" in (sys.argv[1:] if argv is None else argv):
            traceback.print_exc()
        else:
            hint = "(--traceback shows where this was raised)"
            print(f"error: {error}\n{hint}", file=sys.stderr)
        raise SystemExit(2) from error


class _Help(DefaultHelpFormatter):
    """Help with defaults, without Python types."""

    def _get_help_string(self, action: Action) -> str:
        text = super()._get_help_string(action).replace("type: %(type)s, ", "")
        return text if action.default != "" else text.replace(" (default: %(default)s)", "")


class _Parser(ArgumentParser):
    """A parser that suggests an option for an unknown name."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        known = [flag[2:] for action in self._actions for flag in action.option_strings]
        for name in re.findall(r"(?<=--)\w+|(?<=Option ')[\w-]+", message):
            name = name.replace("-", "_")
            if name in ELSEWHERE:
                message = f"--{name} does not exist here. {ELSEWHERE[name]}"
            elif name not in known and (near := get_close_matches(name, known)):
                message += f"\n--{name} does not exist: did you mean --{', --'.join(near)}?"
        if re.search(r"unrecognized arguments:( (true|false|yes|no|on|off|0|1))+$", message, re.I):
            message += "\nSwitches take no value: --chat turns one on, --no_chat off."
        super().error(message, ex)


def _parser(kind: type[TrainingConfig], defaults: dict[str, Any]) -> ArgumentParser:
    """The parser of all options, in groups; `defaults` override the defaults of `kind`."""
    set_loader("yaml_1.2", lambda text: _loaded(text, lists_of(kind)), (YAMLError,))
    usage = "%(prog)s [FILE.yaml] [--OPTION VALUE ...]"
    spec = sys.modules["__main__"].__spec__  # of `python -m`, None of a script
    parser = _Parser(
        prog=spec and f"python -m {spec.name.removesuffix('.__main__')}", usage=usage,
        parser_mode="yaml_1.2", allow_abbrev=False, formatter_class=_Help,
    )  # fmt: skip
    parser.add_argument("--config", action=ActionConfigFile, help="A YAML file of options.")
    parser.add_argument("--traceback", action="store_true", default=SUPPRESS, help=TRACEBACK)
    for action in parser._actions:
        if "--print_config" in action.option_strings:  # jsonargparse's, with flags of its own
            action.help, action.metavar = "Print all options as YAML, and exit.", ""
    hints, titles, values = get_type_hints(kind), _titles(kind), defaults_of(kind) | defaults
    if unknown := sorted(set(values) - set(hints)):
        raise TypeError(f"parse_config: expected options of {kind.__name__}; got {unknown}")
    helps = {
        entry.arg_name: text[:1].upper() + text[1:]
        for base in reversed(kind.__mro__[:-1])
        for entry in parse_from_object(base).params
        for text in [" ".join(str(entry.description).split()).replace("None", "null")]
    }
    order = [*_GROUPS.values(), _COMMAND, _SOME_LOSSES]
    groups = {x: parser.add_argument_group(x) for x in order if x in titles.values()}
    for option in fields(kind):
        name, hint = option.name, hints[option.name]
        more: dict[str, Any] = {"type": hint}
        if hint is bool:
            more = {"action": ActionYesNo(yes_prefix="", no_prefix="no_")}
        elif get_origin(hint) is list:
            more = {"type": get_args(hint)[0], "nargs": "*", "metavar": "X"}
        elif get_origin(hint) is not Literal:
            more["metavar"] = "X"
        groups[titles[name]].add_argument(
            f"--{name}", default=values[name], help=helps[name], **more
        )
    return parser


def _loaded(text: str, lists: Sequence[str]) -> Any:
    """Reads YAML; one value of a list option is a list of one, as for a flag."""
    loaded = YAML(typ="safe", pure=True).load(text)
    if isinstance(loaded, dict):
        return {name: as_list(x) if name in lists else x for name, x in loaded.items()}
    return loaded


def _titles(kind: type[TrainingConfig]) -> dict[str, str]:
    """The title of each option's group in `--help`."""
    titles, title = dict[str, str](), ""
    for name in TrainingConfig.__annotations__:
        titles[name] = title = _GROUPS.get(name, title)
    some_losses = set().union(*map(flat_fields, LOSS_TYPES)) - set(_CLIPPING)
    for option in fields(GRPOLossConfig):
        titles.setdefault(option.name, _SOME_LOSSES if option.name in some_losses else "Loss")
    return {x.name: titles.get(x.name, _COMMAND) for x in fields(kind)}

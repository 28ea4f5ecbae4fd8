"""Differences between the versions of TRL.

From 1.15 on TRL asks its model for log-probs. Before that it asks for logits, and takes log-probs
and entropies out of them with functions of its module: `LogitsInName` stands for the logits, and
`reading` makes these functions read it. Before 1.10 losses divide otherwise (`DIVIDES_BY_BATCH`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

from torch import Tensor

from ..base.checks import version_numbers
from .private import TESTED_VERSIONS, trl_part

OLDEST, NEWEST = TESTED_VERSIONS["trl"].split(" to ")
INSTALL = f"pip install 'trl>={OLDEST}'"
_FROM = "grpo_kernels.integrations.trl"


def check_version(installed: str) -> None:
    """Raises ImportError if `installed` is too old, warns if it is newer than what is tested."""
    if version_numbers(installed) < version_numbers(OLDEST):
        raise ImportError(f"{_FROM}: expected TRL {OLDEST} or newer; got {installed}: {INSTALL}")
    if version_numbers(installed) > version_numbers(NEWEST):
        warnings.warn(
            f"{_FROM}: expected TRL {OLDEST} to {NEWEST}, the tested versions; got {installed}. "
            "Its loss is compared with ours in some micro-batches; training stops if they differ",
            stacklevel=3,
        )


try:
    check_version(metadata.version("trl"))
except metadata.PackageNotFoundError as error:
    raise ImportError(f"{_FROM}: expected TRL {OLDEST} or newer; got none: {INSTALL}") from error

_INSTALLED = version_numbers(metadata.version("trl"))
# TRL computes log-probs from the logits of its model.
ASKS_FOR_LOGITS = _INSTALLED < (1, 15)
# dapo, cispo and vespo divide by the tokens of the whole generation batch, however many optimizer
# steps share it, and so does their entropy bonus; luspo trains padding.
DIVIDES_BY_BATCH = _INSTALLED < (1, 10)


def check_parts(trainer: Any, methods: Iterable[str], module: Any) -> None:
    """Raises RuntimeError for a TRL that calls what takes our place by another name, or nothing."""
    for name in methods:
        trl_part(trainer, name)
    if not ASKS_FOR_LOGITS:
        trl_part(module, "add_fused_lm_head")


def check_has_head(attached: bool) -> None:
    """Raises RuntimeError for a trainer that TRL has constructed without our head."""
    if not attached:
        raise RuntimeError(
            f"trl: expected {TESTED_VERSIONS['trl']}, whose GRPOTrainer calls add_fused_lm_head; "
            f"got {metadata.version('trl')}, which does not: use GRPOTrainer"
        )


class LogitsInName:
    """Log-probs and entropies `[B, T]` of a completion's tokens, where TRL expects logits."""

    def __init__(self, logps: Tensor, entropy: Tensor) -> None:
        self.logps, self.entropy = logps, entropy

    def __getitem__(self, _: Any) -> LogitsInName:
        return self  # TRL cuts off the prompt and the last position

    def div_(self, _: Any) -> LogitsInName:
        return self  # by the temperature, which our head has

    __truediv__ = div_


def labels_of(inputs: dict[str, Any], length: int) -> Tensor:
    """Replaces a call's arguments for logits by labels: the completion's tokens, -100 elsewhere."""
    for name in ("logits_to_keep", "use_cache"):
        inputs.pop(name, None)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    labels[:, :-length] = -100
    return labels


_READS = {
    "selective_log_softmax": lambda x: x.logps,
    "entropy_from_logits": lambda x: x.entropy,
    "selective_log_softmax_and_entropy": lambda x: (x.logps, x.entropy),
}


@contextmanager
def reading(module: Any) -> Iterator[None]:
    """Makes TRL's functions of logits, in this module, read `LogitsInName`, within a block."""
    own = {name: getattr(module, name) for name in _READS if hasattr(module, name)}

    def reader(name: str) -> Any:
        def read(logits: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(logits, LogitsInName):
                return _READS[name](logits)
            return own[name](logits, *args, **kwargs)

        return read

    vars(module).update({name: reader(name) for name in own})
    try:
        yield
    finally:
        vars(module).update(own)

"""`Options` of a trainer, and `State`, the one attribute that we add to a trainer of TRL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from ...base.checks import check_bool
from ...head.execution import Execution
from ...loss.losses import Loss
from ..patching import check_head_options

OwnLossType = Loss | Callable[[Any], Tensor]
_ATTRIBUTE = "_grpo_kernels"


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `FusedGRPOTrainer`, which describes them, and of `patch_trl`."""

    execution: Execution = Execution()  # noqa: RUF009 - frozen
    logits_dtype: str = "fp32"
    replay_support: bool = False
    loss: OwnLossType | None = None
    exact_kl: bool = False
    skip_untrained: bool = False
    sort_by_length: bool = False
    zero_equal_groups: bool = True

    def __post_init__(self) -> None:
        check_head_options(self.execution, logits_dtype=self.logits_dtype)
        for option in fields(self):
            if isinstance(option.default, bool):
                check_bool(option.name, getattr(self, option.name))
        if isinstance(self.loss, str):
            raise TypeError(
                "loss: expected a loss or a callable (for TRL's losses set loss_type); got "
                f"{self.loss!r}"
            )


@dataclass
class State:
    """A trainer's options, and the objects that implement them."""

    options: Options
    replay: Any = None  # a SupportReplay
    dealer: Any = None  # a Dealer
    explainer: Any = None  # an ExplainCallback
    compared: int = 0  # micro-batches considered for a comparison with TRL's loss
    took_part: bool = False  # in the loss of the present micro-batch
    rewards: Tensor | None = None  # of the generation batch that is being scored

    def check_took_part(self, trainer: Any) -> None:
        """Raises ValueError for a trainer whose loss has ignored our options."""
        if not self.took_part:
            self.refuse_options(
                f"on {type(trainer).__name__}, whose _compute_loss does not call GRPOTrainer's: "
                "leave the option out, or call super()._compute_loss there"
            )

    def refuse_options(self, where: str, more: tuple[str, ...] = ()) -> None:
        """Raises ValueError if options of the loss, or `more`, are set, which have no effect."""
        names = (*more, "loss", "exact_kl", "skip_untrained", "sort_by_length")
        active = [name for name in names if getattr(self.options, name) not in (None, False)]
        active += ["ExplainCallback"] if self.explainer is not None else []
        if active:
            raise ValueError(f"{', '.join(active)}: no effect {where}")


def state_of(trainer: Any) -> State | None:
    """Returns the state of a trainer; None for a trainer made before TRL was patched."""
    return getattr(trainer, _ATTRIBUTE, None)


def options_of(trainer: Any) -> Options:
    """Returns the options of a trainer; defaults for a trainer made before TRL was patched."""
    state = state_of(trainer)
    return Options() if state is None else state.options


def set_state(trainer: Any, state: State) -> None:
    setattr(trainer, _ATTRIBUTE, state)

"""`Reused`: options that one object hands to all of its calls over a head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..head.execution import Execution, check_execution
from ..head.lm_head import LMHead


@dataclass(frozen=True)
class Reused:
    """Options of all calls of an attached head, a trainer or a module; checks itself.

    Args:
        temperature, logits_dtype: as in `LMHead`.
        execution: how calls are computed.

    Raises:
        TypeError, ValueError: naming the option, what was expected and what came.
    """

    temperature: float | Tensor = 1.0
    logits_dtype: str = "fp32"
    execution: Execution = Execution()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        # A head of any weight checks what goes with it.
        weight = torch.zeros(1, 1, dtype=torch.float32, device="cpu")
        LMHead(weight, temperature=self.temperature, logits_dtype=self.logits_dtype)
        check_execution(self.execution)

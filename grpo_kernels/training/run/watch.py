"""Warnings that name a cause and a remedy, from the rows of steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from ..config import TrainingConfig

# Steps that count as "always", and steps until a warning is repeated.
WINDOW = 5
QUIET = 20
LARGE_RATIO = 10.0
LARGE_KL = 10.0
LOW_ENTROPY = 0.05


def skipped_by_scaler(row: Mapping[str, Any]) -> bool:
    """True if gradients of a step were too large for float16 at the scale of the loss."""
    norm = row["grad_norm"]
    overflowed = norm is None or not math.isfinite(norm)
    return overflowed and "loss_scale" in row and "bad_updates" not in row


class Watch:
    """Looks at every step's row for signs of trouble."""

    def __init__(self, config: TrainingConfig) -> None:
        self.config = config
        self.rows: deque[Mapping[str, Any]] = deque(maxlen=WINDOW)
        self.last_steps: dict[str, int] = {}  # by kind of warning
        self.first_entropy: float | None = None

    def after_step(self, row: Mapping[str, Any]) -> list[str]:
        """Warnings about the step; the same one comes again only after `QUIET` steps."""
        self.rows.append(row)
        if self.first_entropy is None:
            self.first_entropy = row.get("entropy")
        step = row["step"]
        signs = {
            kind: text for kind, text in self._signs(row).items()
            if step - self.last_steps.get(kind, -QUIET) >= QUIET or kind == "gradient"
        }  # fmt: skip
        self.last_steps |= dict.fromkeys(signs, step)
        return list(signs.values())

    def _signs(self, row: Mapping[str, Any]) -> dict[str, str]:
        """Signs that something is wrong, by kind; logs have null for what is not finite."""
        signs = dict[str, str]()

        def always(name: str) -> bool:
            return len(self.rows) == WINDOW and all(r[name] == 1 for r in self.rows)

        norm = row["grad_norm"]
        if skipped_by_scaler(row):
            signs["scale"] = (
                f"gradients were too large for float16 at a loss scale of {row['loss_scale']:g}: "
                "the update was skipped, and the scale is halved. This is normal in first steps"
            )
        elif norm is None or not math.isfinite(norm):
            signs["gradient"] = (
                f"the gradient norm is {norm}: the update was skipped. Lower learning_rate, or "
                "look for NaN in the model"
            )
        if always("groups_equal"):
            signs["equal"] = (
                f"for {WINDOW} steps every group had equal rewards, so nothing was learned. The "
                "problems are too hard or too easy, or the rewards too coarse: look at "
                "samples.jsonl, and raise num_generations or temperature"
            )
        if always("truncated"):
            signs["truncated"] = (
                f"for {WINDOW} steps every completion was cut at max_completion_length = "
                f"{self.config.max_completion_length}. Raise it, or set stop"
            )
        if late := row.get("answers_timed_out"):
            signs["late"] = (
                f"{late:.0f} comparisons of answers had no result in time and count as wrong: look "
                "at samples.jsonl for long or nested expressions"
            )
        if self.config.records_support and "support/mean" not in row:
            signs["support"] = (
                "top_k, top_p or min_p is set, but the rollout returns no support: the loss uses "
                "the full softmax, another policy than the one that sampled. Return "
                "Completion.support, or turn replay_support off"
            )
        entropy, first = row.get("entropy"), self.first_entropy or 0.0
        if (
            len(self.rows) == WINDOW and entropy is not None
            and entropy < LOW_ENTROPY and entropy < 0.2 * first
        ):  # fmt: skip
            signs["entropy"] = (
                f"entropy fell from {first:.2f} to {entropy:.3f}: completions of a group are "
                "nearly the same. Lower learning_rate, raise temperature, epsilon_high or "
                "entropy_coef"
            )
        for name, large, bound in (
            ("ratio_max", LARGE_RATIO, "the ratio with delta"),
            ("kl_max", LARGE_KL, "the KL with kl_clamp"),
        ):
            value = row.get(name, 0.0)
            if value is not None and value > large:
                signs["spike"] = f"{name} is {value:.3g}. Lower learning_rate, or bound {bound}"
        return signs

"""Warnings that name a cause and a remedy, from the rows of steps and evaluations."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .config import TrainingConfig
from .metrics import Evaluation
from .rollout import RolloutError
from .samples import Samples

# Steps that count as "always", and steps until a warning is repeated.
WINDOW = 5
QUIET = 20
LARGE_RATIO = 10.0
LARGE_KL = 10.0
LOW_ENTROPY = 0.05
# By the dtype that sampled, the mean gap to its log-probs that is always explained, and the one
# that never is. Between them, up to so many times the first step's, whose weights are the model's.
GAPS = {"float32": (1e-4, 0.03), "bfloat16": (0.1, 0.3)}
TIMES_THE_FIRST_GAP = 4.0


class Watch:
    """Looks at every step's row and at every evaluation for signs of trouble."""

    def __init__(self, config: TrainingConfig) -> None:
        self.config = config
        self.rows: deque[dict[str, Any]] = deque(maxlen=WINDOW)
        self.evaluations: list[tuple[float, float, float]] = []  # accuracy, high, mean reward
        self.last_told: dict[str, int] = {}  # step by kind of warning
        self.rewards: list[float] = []
        self.first_entropy: float | None = None
        self.first_gap: float | None = None

    def sampler_gap(self, row: Mapping[str, float], dtype: str | None) -> dict[str, float]:
        """The gap between the log-probs of sampler and policy, before the policy's first update.

        Args:
            row: metrics of the loss.
            dtype: that explains a gap, as torch calls it; None: any gap is explained.

        Raises:
            RolloutError: the gap is larger than the dtype explains.
        """
        mean, largest = (row.get(f"sampling/sampling_logp_difference/{x}") for x in ("mean", "max"))
        if mean is None or largest is None:
            return {}
        error = None if dtype is None else self.unexplained_gap(mean, largest, dtype)
        if error is not None:
            raise RolloutError(error)
        return {"sampler_gap": mean, "sampler_gap_max": largest}

    def unexplained_gap(self, mean: float, largest: float, dtype: str) -> str | None:
        """An error if log-probs of a sampler that got the weights are not the policy's.

        Args:
            mean: of |log-prob of the policy - log-prob of the sampler| over the tokens.
            largest: of the same.
            dtype: that the sampler computes in, as torch calls it.
        """
        always, never = GAPS[dtype]
        if self.first_gap is None:
            self.first_gap = mean
        limit = min(never, max(always, TIMES_THE_FIRST_GAP * self.first_gap))
        if mean <= limit:
            return None
        return (
            f"sampler_gap: expected the sampler's log-probs to be the policy's to {limit:.2g} on "
            f"average, which {dtype} explains (first step: {self.first_gap:.2g}); got {mean:.2g}, "
            f"and {largest:.2g} at most. The sampler has other weights, is another model, or "
            "computes in another precision. Nothing was trained on these samples"
        )

    def spike(self, row: Mapping[str, Any]) -> str | None:
        """The name of the metric by which a token moved suspiciously far, or None."""
        for name, large in (("ratio_max", LARGE_RATIO), ("kl_max", LARGE_KL)):
            if row.get(name, 0.0) > large:
                return name
        return None

    def after_step(self, row: dict[str, Any], worst_token: str | None = None) -> list[str]:
        """Warnings about the step; the same one comes again only after `QUIET` steps."""
        self.rows.append(row)
        self.rewards.append(row["reward"])
        entropy = row.get("entropy")
        if entropy is not None and self.first_entropy is None:
            self.first_entropy = entropy
        full = len(self.rows) == WINDOW
        found: dict[str, str] = {}
        if not math.isfinite(row["grad_norm"]):
            found["gradient"] = (
                f"the gradient's norm is {row['grad_norm']}: the update was left out. Lower "
                "learning_rate, or look for NaN in the model"
            )
        if full and all(r["groups_equal"] == 1 for r in self.rows):
            found["equal"] = (
                f"in {WINDOW} steps every group had equal rewards, so nothing was learned. The "
                "problems are too hard or too easy for the model, or the rewards see no "
                "difference: look at samples.jsonl, and raise num_generations or temperature"
            )
        if full and all(r["truncated"] == 1 for r in self.rows):
            found["truncated"] = (
                f"in {WINDOW} steps every completion was cut at max_completion_length = "
                f"{self.config.max_completion_length}. Raise it, or give a stop string"
            )
        if self.config.records_support and "support/mean" not in row:
            found["support"] = (
                "top_k, top_p or min_p is set, and the rollout does not say what they kept: "
                "the loss is over the whole softmax, which is not what sampled. Return completions "
                "with a support, or turn replay_support off"
            )
        if self._collapsed(entropy):
            found["entropy"] = (
                f"entropy fell from {self.first_entropy:.2f} to {entropy:.3f}: completions of a "
                "group are nearly the same. Lower learning_rate, raise temperature, epsilon_high "
                "or entropy_coef"
            )
        if self.spike(row):
            what = ", ".join(
                f"{name} {row[name]:.3g}" for name in ("ratio_max", "kl_max") if name in row
            )
            bound = {"ratio_max": "the ratio with delta", "kl_max": "the KL with kl_clamp"}
            found["spike"] = (
                f"{what}; {worst_token or 'no token to show'}. Lower learning_rate, or bound "
                f"{bound[self.spike(row) or '']}"
            )
        fresh = [
            name for name in found
            if row["step"] - self.last_told.get(name, -QUIET) >= QUIET or name == "gradient"
        ]  # fmt: skip
        self.last_told |= {name: row["step"] for name in fresh}
        return [found[name] for name in fresh]

    def after_evaluation(self, evaluation: Evaluation) -> str | None:
        """A warning if rewards rose while the answers got worse."""
        recent = self.rewards[-WINDOW:]
        mean = sum(recent) / len(recent) if recent else math.nan
        self.evaluations.append((evaluation.accuracy, evaluation.high, mean))
        trained = [e for e in self.evaluations if not math.isnan(e[2])]
        if len(trained) < 2 or not trained[-1][2] > trained[0][2]:
            return None
        best = max(e[0] for e in self.evaluations[:-1])
        if evaluation.high >= best:
            return None
        return (
            f"the reward rose from {trained[0][2]:.2f} to {mean:.2f} while held-out accuracy fell "
            f"from {best:.1%} to {evaluation.accuracy:.1%}: the model may earn the reward in a way "
            "that was not meant. Read samples.jsonl"
        )

    def _collapsed(self, entropy: float | None) -> bool:
        if entropy is None or self.first_entropy is None or len(self.rows) < WINDOW:
            return False
        return entropy < LOW_ENTROPY and entropy < 0.2 * self.first_entropy

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, as JSON takes it."""
        return {
            "rows": list(self.rows), "evaluations": self.evaluations, "told": self.last_told,
            "rewards": self.rewards, "first_entropy": self.first_entropy,
            "first_gap": self.first_gap,
        }  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores a state."""
        self.rows = deque(state["rows"], maxlen=WINDOW)
        self.evaluations = [(a, b, c) for a, b, c in state["evaluations"]]
        self.last_told, self.rewards = state["told"], state["rewards"]
        self.first_entropy = state["first_entropy"]
        self.first_gap = state["first_gap"]


def worst_token(samples: Samples, against: Tensor, tokenizer: Any) -> tuple[float, str]:
    """The token whose log-prob moved the most from `against`, `[B, T]`: how far, and a text."""
    if samples.logps is None:
        return 0.0, ""
    seen = (samples.mask != 0) & (samples.logps != 0)
    gaps = torch.where(seen, samples.logps - against, 0.0).abs()
    i, t = divmod(int(gaps.argmax()), gaps.shape[1])
    ids = samples.completions[i].token_ids
    token, before = (tokenizer.decode(some) for some in ([ids[t]], ids[max(0, t - 8) : t]))
    text = (
        f"token {t} {token!r} after {before!r}: log-prob {float(against[i, t]):.2f} -> "
        f"{float(samples.logps[i, t]):.2f}"
    )
    return float(gaps[i, t]), text

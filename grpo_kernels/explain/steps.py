"""The choice of steps to explain, and the folder of their pages."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from ..base.checks import check_number
from .explanation import Explanation
from .page import link_next, step_page

# Smallest values that count as a spike: a KL of 1e-5 that becomes 1e-4 is no news.
SPIKES = {"grad_norm": 0.0, "kl": 0.01}
FIRST, WINDOW = 5, 100  # steps before one can be a spike; steps that it is compared with


def not_finite(row: Mapping[str, Any], name: str) -> bool:
    """True for NaN and infinity, for which logs in JSON may have null."""
    x = row.get(name, 0.0)
    return x is None or (isinstance(x, float) and not math.isfinite(x))


def skipped_by_scaler(row: Mapping[str, Any]) -> bool:
    """True if gradients of a step were too large for float16 at the scale of the loss."""
    return not_finite(row, "grad_norm") and "loss_scale" in row and "bad_updates" not in row


class ExplainedSteps:
    """Decides which steps of a run to explain: every n-th, and spikes of gradient norm or KL.

    Args:
        folder: the run's folder; pages are `explanations/step-000012.html` with a `.jsonl` each.
        every: number of steps between explanations; 0: only spikes.
        factor: a spike exceeds all of the last 100 steps, and their median by this factor; 0: no
            spikes.
        most: the largest number of spikes to explain in a run.
    """

    def __init__(
        self, folder: str | Path, *, every: int = 0, factor: float = 5.0, most: int = 5
    ) -> None:
        for name, x in (("every", every), ("factor", factor), ("most", most)):
            check_number(name, x, ">= 0")
        self.folder, self.every, self.factor = Path(folder) / "explanations", every, factor
        self.most = self.left = most
        self.seen = {name: deque[float](maxlen=WINDOW) for name in SPIKES}

    def open(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Begins a run, or goes on after these rows of its steps; the last page has no next one."""
        self.left = self.most
        for seen in self.seen.values():
            seen.clear()
        for row in rows:
            self.why(row)
        link_next(self.folder, math.inf, "")

    def why(self, row: Mapping[str, Any]) -> str | None:
        """Returns the reason to explain a step, or None; call it for every step.

        Args:
            row: the step's number `step` and its metrics `grad_norm` and `kl`; others are ignored.
        """
        spikes = []
        for name, least in SPIKES.items():
            x, seen = row.get(name), self.seen[name]
            if x is None or (name == "grad_norm" and skipped_by_scaler(row)):
                continue
            if len(seen) >= FIRST and self.factor:
                if not math.isfinite(x):
                    spikes.append(f"{name} is {x}")
                elif x > max(least, self.factor * median(seen), *seen):
                    spikes.append(f"{name} is {x:.3g}, the median so far {median(seen):.3g}")
            if math.isfinite(x):
                seen.append(x)
        if spikes and self.left > 0:
            self.left -= 1
            return "; ".join(spikes)
        return f"every {self.every} steps" if self.every and row["step"] % self.every == 0 else None

    def write(self, step: int, why: str, explanation: Explanation) -> dict[str, Any]:
        """Writes the page and the rows of a step; links the page before to it.

        Returns:
            The step's record: `why`; `spike`, False for every n-th step; the name of the first
            `cause`, or None; and a `text` about it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        page = self.page(step)
        page.write_text(step_page(explanation, path=page, why=why), encoding="ascii")
        explanation.write(page.with_suffix(".jsonl"))
        link_next(self.folder, step, page.name)
        cause, text = None, str(explanation)
        for first in explanation.causes[:1]:
            cause, text = first.name, first.text
        return {"why": why, "spike": not why.startswith("every "), "cause": cause, "text": text}

    def page(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}.html"

    def message(self, step: int, record: Mapping[str, Any]) -> str:
        """Returns a line for the user about a step's record."""
        why = f" ({record['why']})" * record["spike"]
        cause = f"{record['cause']}: " if record["cause"] else ""
        return f"step {step} explained{why}: {cause}{record['text']}; see {self.page(step)}"

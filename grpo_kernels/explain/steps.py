"""Steps of a run that are explained, and the folder of their pages."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from .explanation import Explanation

# Smallest values that count as a spike: a KL of 1e-5 that becomes 1e-4 is no news.
SPIKES = {"grad_norm": 0.0, "kl": 0.01}
FIRST, WINDOW = 5, 100  # steps before one can be a spike; steps that it is compared with


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
        for name, x, least in (("every", every, 0), ("factor", factor, 0), ("most", most, 0)):
            if not least <= x < math.inf:
                raise ValueError(f"{name}: expected a number >= {least}; got {x!r}")
        self.folder, self.every, self.factor, self.left = Path(folder), every, factor, most
        self.seen = {name: deque[float](maxlen=WINDOW) for name in SPIKES}

    def why(self, step: int, values: Mapping[str, float | None]) -> str | None:
        """Returns the reason to explain this step, or None; call it for every step.

        Args:
            step: number of the step.
            values: metrics of the step; `grad_norm` and `kl` are used.
        """
        spikes = []
        for name, least in SPIKES.items():
            x, seen = values.get(name), self.seen[name]
            if x is None:
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
        return f"every {self.every} steps" if self.every and step % self.every == 0 else None

    def write(self, step: int, why: str, explanation: Explanation) -> str:
        """Writes the page and the rows of a step; returns a message for the user."""
        folder = self.folder / "explanations"
        folder.mkdir(parents=True, exist_ok=True)
        page = folder / f"step-{step:06d}.html"
        explanation.write(page)
        explanation.write(page.with_suffix(".jsonl"))
        first = "".join(f"{cause.name}: {cause.text}; " for cause in explanation.causes[:1])
        because = "" if self.was_asked_for(why) else f" ({why})"
        return f"step {step} explained{because}: {first}see {page}"

    @staticmethod
    def was_asked_for(why: str) -> bool:
        """True for the reason of every n-th step, False for a spike's."""
        return why.startswith("every ")

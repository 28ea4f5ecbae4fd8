"""Draws the README's chart from what `benchmarks.head` stored: time and memory beside peers.

    python -m benchmarks.chart

Bars are relative to eager PyTorch of the same run; the picture is light or dark as its reader is.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import contenders

BASELINE, OURS = contenders.BASELINE, contenders.OURS[0]
# How a row is named in the picture.
NAMES = {
    BASELINE: "eager PyTorch",
    "eager, compiled": "eager, torch.compile",
    "TRL chunked head": "TRL 1.16, chunked head (CPU)",
    "Liger fused linear": "Liger 0.8.5, fused linear GRPO",
    OURS: "fused_grpo_loss",
}
PANELS = (
    ("rollout", "The batch of a GRPO step"),
    ("smollm", "Every token counts"),
)
NOTE = (
    "On GPUs TRL's head is other code, which holds less: docs/benchmarks.md has its memory there."
)
WIDTH, LEFT, BAR, LINE, LONGEST = 880, 225, 13, 21, 240
STYLE = """text{font:13px sans-serif;fill:#24292f}.head{font-weight:bold}.note{fill:#656d76}
.peer{fill:#aeb7c1}.ours{fill:#1f77b4}.unit{stroke:#656d76;stroke-dasharray:2 3}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.note{fill:#8d96a0}.peer{fill:#57606a}
.ours{fill:#58a6ff}.unit{stroke:#8d96a0}}"""


def measured(rows: list[dict[str, Any]], workload: str) -> dict[str, dict[str, Any]]:
    """Returns the rows of a workload, by contender."""
    return {x["name"]: x for x in rows if x.get("workload", "").startswith(workload)}


def ratios(rows: list[dict[str, Any]], workload: str) -> dict[str, tuple[float, float]]:
    """Time and memory of each contender, over the baseline's."""
    known = measured(rows, workload)
    seconds = {name: statistics.median(known[name]["seconds"]) for name in NAMES}
    memory = {name: known[name]["extra_bytes"] for name in NAMES}
    return {x: (seconds[x] / seconds[BASELINE], memory[x] / memory[BASELINE]) for x in NAMES}


def bars(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The elements of the picture, from top to bottom."""
    most = max(max(x) for name, _ in PANELS for x in ratios(rows, name).values())
    scale, columns = LONGEST / most, (LEFT, LEFT + 330)
    y = 20
    for workload, title in PANELS:
        yield f'<text class="head" x="0" y="{y}">{title}</text>'
        for x, what in zip(columns, ("time", "memory beyond the inputs"), strict=True):
            yield f'<text class="note" x="{x}" y="{y}">{what}, x eager</text>'
        top = y + 8
        for name, values in ratios(rows, workload).items():
            y += LINE
            kind, weight = ("ours", "head") if name == OURS else ("peer", "")
            yield f'<text class="{weight}" x="0" y="{y}">{NAMES[name]}</text>'
            for x, value in zip(columns, values, strict=True):
                place = f'x="{x}" y="{y - BAR + 2}" width="{value * scale:.0f}" height="{BAR}"'
                yield f'<rect class="{kind}" {place}/>'
                yield f'<text x="{x + value * scale + 6:.0f}" y="{y}">{value:.2f}</text>'
        for one in (column + scale for column in columns):
            yield f'<line class="unit" x1="{one:.0f}" x2="{one:.0f}" y1="{top}" y2="{y + 6}"/>'
        y += 34
    yield f'<text class="note" x="0" y="{y - 6}">{NOTE}</text>'


def drawn(rows: list[dict[str, Any]]) -> str:
    """The picture."""
    height = len(PANELS) * (20 + LINE * len(NAMES) + 14) + 22
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">',
        "<title>Time and memory of the LM head with the GRPO loss, beside eager and peers</title>",
        f"<style>{STYLE}</style>", *bars(rows), "</svg>",
    ]  # fmt: skip
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    stored = json.loads(Path("benchmarks/results/cpu.json").read_text())
    Path("docs/head.svg").write_text(drawn(stored["rows"]))

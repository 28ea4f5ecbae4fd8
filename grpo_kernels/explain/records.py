"""Rows in JSON: one per sequence of an explanation, and one per step of a run.

An explanation's rows are strict JSON, which has no NaN and no infinity: null stands for NaN, the
largest float32 for infinity.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .explanation import Explanation

LARGEST = torch.finfo(torch.float32).max


def write_jsonl(explanation: Explanation, path: str | Path) -> None:
    """Writes one row per sequence, without the causes, which a reader ranks."""
    e, lines = explanation, []
    tokens: dict[str, list[Any]] = {"position": e.position.tolist()}
    if e.token_ids is not None:
        tokens["token_id"] = e.token_ids.tolist()
    if e.texts is not None:
        tokens["text"] = [text for texts in e.texts for text in texts]
    for name, column in e.columns.items():  # nine digits distinguish all float32
        tokens[name] = [float(f"{x:.9g}") for x in column.tolist()]
    ends = [0, *e.sequence.bincount(minlength=len(e.sequences)).cumsum(0).tolist()]
    for i, (start, end) in enumerate(pairwise(ends)):
        part = {name: x[start:end] for name, x in tokens.items()}
        lines.append(dump({"sequence": i, **e.sequences[i], "tokens": part}) + "\n")
    Path(path).write_text("".join(lines), encoding="ascii")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a file that have an integer `step`; none if there is no such file.

    Damaged and unfinished lines are skipped.
    """
    rows = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def read_values(path: Path) -> dict[str, Any]:
    """Returns the values in a JSON file; none if it is missing or damaged."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8", errors="replace")))
    except (OSError, TypeError, ValueError, RecursionError):
        return {}


def prompt_text(prompt: Any, skip_role: str = "") -> str:
    """Returns the text of a prompt or of its messages, whose content may be in parts.

    Messages of the role `skip_role` are left out.
    """
    if isinstance(prompt, str):
        return prompt
    contents = [m.get("content") or "" for m in prompt if m.get("role", "user") != skip_role]
    parts = ([{"text": x}] if isinstance(x, str) else x for x in contents)
    texts = ([str(p.get("text") or "") for p in x if isinstance(p, dict)] for x in parts)
    return "\n".join(map("".join, texts))


def dump(x: Any) -> str:
    """Returns a value as strict JSON, in ASCII."""
    return json.dumps(_strict(x), allow_nan=False, separators=(",", ":"))


def _strict(x: Any) -> Any:
    """Replaces NaN and infinity as files have them."""
    if isinstance(x, Mapping):
        return {str(key): _strict(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [_strict(value) for value in x]
    if isinstance(x, float) and not math.isfinite(x):
        return None if math.isnan(x) else math.copysign(LARGEST, x)
    return x

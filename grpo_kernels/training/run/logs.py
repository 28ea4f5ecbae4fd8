"""The files of a run in JSON: one value each, or one row per line."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...explain.records import read_rows

# Held-out problems, and digests of the prompts that the run trains on.
HELD_OUT, TRAINED_ON = "held_out.jsonl", "trained_on.json"
NAMES = ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl", "answers.jsonl")


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Appends a row to a file, completely or not at all.

    Raises:
        OSError: the disk is full, for example.
    """
    line = (json.dumps(_json_safe(row), default=_plain) + "\n").encode()
    with path.open("ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[file.write(line) :]
        except OSError as error:
            with suppress(OSError):  # a device has no length
                file.truncate(size)  # half a row would spoil the next
            error.filename = str(path)  # an error of a write lacks it
            raise


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes a file, completely or not at all."""
    _replace(path, json.dumps(values, indent=1) + "\n")


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes a file with a row per line, completely or not at all."""
    _replace(path, "".join(json.dumps(_json_safe(row), default=_plain) + "\n" for row in rows))


def write_if_exact(path: Path, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Writes a file as `write_rows` does if JSON preserves its rows; returns whether it does."""
    try:
        exact = json.loads(json.dumps(rows)) == rows
    except (TypeError, ValueError):
        return False
    if exact:
        write_rows(path, rows)
    return exact


def _replace(path: Path, text: str) -> None:
    scratch = path.with_suffix(".tmp")
    scratch.write_text(text)
    scratch.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """The values in a file; none if there is no such file."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


def open_folder(folder: Path, options: Mapping[str, Any], step: int) -> None:
    """Makes a run's folder; removes rows and pages of steps after `step`, and unfinished lines."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", options)
    for name in NAMES:
        path = folder / name
        if path.exists():
            write_rows(path, [row for row in read_rows(path) if row["step"] <= step])
    # The answers of an evaluation are written before its row.
    answers, complete = folder / "answers.jsonl", {x["step"] for x in read_rows(folder / NAMES[2])}
    if answers.exists():
        write_rows(answers, [row for row in read_rows(answers) if row["step"] in complete])
    for path in (folder / "explanations").glob("step-*"):
        number = path.stem.removeprefix("step-")
        if number.isdigit() and int(number) > step:
            path.unlink()


def _plain(x: Any) -> Any:
    """Returns a value of NumPy or torch as number or list, any other as text."""
    return x.tolist() if hasattr(x, "tolist") else str(x)


def _json_safe(x: Any) -> Any:
    """Replaces NaN and inf by None, as JSON has neither."""
    if isinstance(x, Mapping):
        return {key: _json_safe(value) for key, value in x.items()}
    return None if isinstance(x, float) and not math.isfinite(x) else x

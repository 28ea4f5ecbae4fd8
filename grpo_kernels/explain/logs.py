"""Logs of this trainer, TRL, ms-swift, verl and wandb as rows with our names of metrics."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from .explanation import Explanation
from .records import read_rows, read_values

# Our names, and the same in TRL and ms-swift, verl, torchforge; the first that a log has wins.
NAMES: dict[str, tuple[str, ...]] = {
    "step": ("Step", "_step", "global_step", "training/global_step", "global_step/max_steps"),
    "loss": ("Training Loss", "actor/loss", "actor/pg_loss"),
    "grad_norm": ("actor/grad_norm",),
    "learning_rate": ("actor/lr",),
    "reward": ("critic/rewards/mean", "critic/score/mean"),
    "reward_std": (),
    "groups_equal": ("frac_reward_zero_std",),
    "accuracy": (), "held_out_accuracy": (), "held_out_low": (), "held_out_high": (),
    "completion_length": ("completions/mean_length", "response_length/mean"),
    "truncated": ("completions/clipped_ratio", "response_length/clip_ratio"),
    "kl": ("actor/kl_loss", "grpo_loss/kl_divergence_mean"),
    "kl_max": ("grpo_loss/kl_divergence_max",),
    "old_kl": ("actor/ppo_kl",),
    "entropy": ("entropy/mean", "actor/entropy", "actor/entropy_loss"),
    "clip_ratio/region_mean": ("clip_ratio", "actor/pg_clipfrac"),
    "clip_low": (), "clip_high": (), "ratio_max": (),
    # |p - q| of verl is at most |log p - log q|
    "sampler_gap": ("sampling/sampling_logp_difference/mean", "training/rollout_probs_diff_mean"),
    "sampler_gap_max": (
        "sampling/sampling_logp_difference/max", "training/rollout_probs_diff_max",
    ),
    "sampling/importance_sampling_ratio/mean": ("rollout_corr/rollout_is_mean",),
    "answers_timed_out": (), "support/mean": (), "loss_scale": (), "bad_updates": (),
}  # fmt: skip
_PLACES = {x: (ours, i) for ours, theirs in NAMES.items() for i, x in enumerate((ours, *theirs))}
# Metrics whose names have a user-defined part.
_ACCURACY = r"rewards?/[^/]*(accuracy|correct)[^/]*(/mean)?"
_OWN = {
    "accuracy": re.compile(_ACCURACY, re.I),
    "held_out_accuracy": re.compile(rf"eval_{_ACCURACY}|val-core/.*/(acc|reward)/mean@\d+", re.I),
}
_NUMBER = r"[-+]?(?:\d[\d.]*(?:e[-+]?\d+)?|nan|inf(?:inity)?)"
_PRINTED = re.compile(rf"""(['"])([^'"]{{1,99}})\1: (['"]?)({_NUMBER}(?:/\d+)?)\3(?=[,}}])""", re.I)
_CONSOLE = re.compile(rf"(?:^|\s)([\w@./-]{{1,99}}):({_NUMBER})(?=\s|$)", re.I)  # verl's
_EXPECTED = (
    "trainer_state.json, metrics.jsonl, lines such as {'loss': 0.0, 'reward': 0.5}, verl's "
    "step:1 - actor/entropy:0.5, or a table in CSV"
)


def read(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, str]]:
    """Returns the rows of a log, options from a file next to it, and its names of our metrics.

    A row has an integer `step` and numbers by our names; our files have None for NaN. If a step was
    logged twice, as in a resumed run, the later numbers count.

    Raises:
        ValueError: naming file and line, what was expected and what came.
    """
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    rows: dict[int, dict[str, Any]] = {}
    names: dict[str, str] = {}
    try:
        for raw in _json(text) if path.suffix == ".json" else _table(text) or _lines(text):
            if len(row := _named(raw, len(rows) + 1, names)) > 1:
                rows.setdefault(row["step"], {}).update(row)
        if not rows:
            raise ValueError(f"line 1: got {text[:60].strip()!r}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected {_EXPECTED}; {error}") from error
    if path.name == "metrics.jsonl":
        for x in read_rows(path.with_name("evaluations.jsonl")):
            row = _named({f"held_out_{k}": x.get(k) for k in ("accuracy", "low", "high")}, 0, names)
            rows.setdefault(x["step"], {}).update(row | {"step": x["step"]})
    return [rows[step] for step in sorted(rows)], _options(path), names


def _options(path: Path) -> dict[str, Any]:
    """The numbers among a run's options, and its dtype, which a model's config has, too."""
    if path.name not in ("metrics.jsonl", "trainer_state.json"):
        return {}
    values = read_values(path.with_name("config.json"))
    dtype = values.get("dtype", values.get("torch_dtype"))
    numbers = {name: x for name, x in values.items() if isinstance(x, int | float)}
    return numbers | {"dtype": "bf16" if dtype == "bfloat16" else dtype}


def _json(text: str) -> Iterator[dict[str, Any]]:
    values = json.loads(text)
    history = values.get("log_history") if isinstance(values, dict) else values
    if not isinstance(history, list):
        raise ValueError("line 1: got JSON without a list log_history")
    return (row for row in history if isinstance(row, dict))


def _lines(text: str) -> Iterator[dict[str, Any]]:
    """Rows of JSONL, of printed dicts and of verl's console; other lines are skipped."""
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            printed = {name: value for _, name, _, value in _PRINTED.findall(line)}
            yield printed or dict(_CONSOLE.findall(line))
        else:
            if isinstance(row, dict):  # verl's files have the metrics in `data`
                yield row | (row["data"] if isinstance(row.get("data"), dict) else {})


def _table(text: str) -> list[dict[str, Any]]:
    """Rows of a table: columns that wandb names RUN - train/kl, or a notebook's, between bars."""
    mark = next((x for x in "|\t;" if x in text[:99]), ",")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=mark)
    try:
        names = [name.rpartition(" - ") for name in next(reader, [])]
        if not any(_place(name) for *_, name in names):
            return []
        rows = [dict(zip((name for *_, name in names), line, strict=False)) for line in reader]
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num}: {error}") from error
    if len(runs := sorted({run for run, *_ in names if run})) > 1:
        raise ValueError(f"line 1: got columns of {', '.join(runs[:3])}: export a single run")
    return rows


def _named(raw: Mapping[str, Any], number: int, names: dict[str, str]) -> dict[str, Any]:
    """Returns the row of a step with our names, and adds the log's names to `names`.

    `number` is for logs that have none.
    """
    row, ranks = dict[str, Any](step=None), dict[str, int]()
    for name, x in raw.items():
        if not (place := _place(str(name)[:200])):
            continue
        ours, rank, theirs = place
        value = _number(x)
        if (x is None or value is not None) and rank < ranks.get(ours, 99):
            row[ours], ranks[ours], names[ours] = value, rank, theirs
    step = row["step"]
    row["step"] = number if step is None or not math.isfinite(step) else int(step)
    if "clip_low" in row:
        parts = (row.get(name) or 0.0 for name in ("clip_low", "clip_high"))
        row.setdefault("clip_ratio/region_mean", sum(parts))
    return row


@lru_cache(1000)
def _place(name: str) -> tuple[str, int, str] | None:
    """A metric's name here, its rank among others' names, and the log's name."""
    name = re.sub(r" *(/) *", r"\1", name).strip().removeprefix("train/")
    user_defined = [(ours, 9) for ours, pattern in _OWN.items() if pattern.fullmatch(name)]
    return next(((*place, name) for place in [_PLACES.get(name), *user_defined] if place), None)


def _number(x: Any) -> float | None:
    """A number, or the first of `5/3766`."""
    try:
        return float(str(x).split("/")[0])
    except ValueError:
        return None


def row_of(explanation: Explanation) -> dict[str, Any]:
    """Returns the metrics of a step that follow from its tokens, as a row."""
    columns, sequences = explanation.columns, explanation.sequences
    row = dict[str, Any](step=1)
    for name in columns.keys() & {"entropy", "kl", "sampler_gap"}:
        if (x := columns[name][columns[name].isfinite()]).numel():
            x = x.abs() if name == "sampler_gap" else x
            row |= {name: x.mean().item(), f"{name}_max": x.max().item()}
    if "clip" in columns and not (clip := columns["clip"]).isnan().all():
        row["clip_ratio/region_mean"] = (clip.nan_to_num() != 0).float().mean().item()
    spreads = [
        x["reward_std"] for x in explanation.groups if x["group"] is not None
        and len(x["sequences"]) > 1 and all("reward" in sequences[i] for i in x["sequences"])
    ]  # fmt: skip
    if spreads:
        row["groups_equal"] = sum(x < 1e-9 for x in spreads) / len(spreads)
    cut = [x.get("truncated") for x in sequences]
    if None not in cut:
        row["truncated"] = sum(x == 1 for x in cut) / len(cut)
    return row

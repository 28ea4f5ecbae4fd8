"""Logs of this trainer, TRL, ms-swift, verl and wandb as rows with our names of metrics."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .explanation import Explanation
from .records import read_rows

# Our names, and what others call the same: TRL and ms-swift, verl, torchforge; the first one wins.
NAMES: dict[str, tuple[str, ...]] = {
    "loss": ("Training Loss", "actor/loss", "actor/pg_loss"),
    "grad_norm": ("actor/grad_norm",),
    "learning_rate": ("actor/lr",),
    "reward": ("critic/rewards/mean", "critic/score/mean"),
    "reward_std": (),
    "groups_equal": ("frac_reward_zero_std",),
    "accuracy": (),
    "held_out_accuracy": (),
    "completion_length": ("completions/mean_length", "response_length/mean"),
    "truncated": ("completions/clipped_ratio", "response_length/clip_ratio"),
    "kl": ("actor/kl_loss", "grpo_loss/kl_divergence_mean"),
    "kl_max": ("grpo_loss/kl_divergence_max",),
    "old_kl": ("actor/ppo_kl",),
    "entropy": ("entropy/mean", "actor/entropy", "actor/entropy_loss"),
    "clip_ratio/region_mean": ("clip_ratio", "actor/pg_clipfrac"),
    "ratio_max": (),
    # |p - q| of verl is at most |log p - log q|
    "sampler_gap": ("sampling/sampling_logp_difference/mean", "training/rollout_probs_diff_mean"),
    "sampler_gap_max": (
        "sampling/sampling_logp_difference/max", "training/rollout_probs_diff_max",
    ),
    "sampling/importance_sampling_ratio/mean": ("rollout_corr/rollout_is_mean",),
    "answers_timed_out": (), "support/mean": (), "loss_scale": (), "bad_updates": (),
}  # fmt: skip
_STEPS = ("step", "Step", "_step", "global_step", "training/global_step", "global_step/max_steps")
# Metrics whose names have a part of the user's own.
_ACCURACY = re.compile(r"rewards?/[^/]*(accuracy|correct)[^/]*(/mean)?", re.IGNORECASE)
_HELD_OUT = re.compile(rf"eval_{_ACCURACY.pattern}|val-core/.*/(acc|reward)/mean@\d+", re.I)
_NUMBER = r"[-+]?(?:\d[\d.]*(?:e[-+]?\d+)?|nan|inf(?:inity)?)"
_PRINTED = re.compile(rf"""(['"])([^'"]{{1,99}})\1: (['"]?)({_NUMBER}(?:/\d+)?)\3(?=[,}}])""", re.I)
_CONSOLE = re.compile(rf"(?:^|\s)([\w@./-]{{1,99}}):({_NUMBER})(?=\s|$)", re.I)  # verl's
_EXPECTED = (
    "trainer_state.json, metrics.jsonl, lines such as {'loss': 0.0, 'reward': 0.5}, verl's "
    "step:1 - actor/entropy:0.5, or a table in CSV"
)


def read(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns the rows of a log, and options that stand in a file beside it.

    A row has a whole `step` and numbers by our names; None stands for NaN in our own files.

    Raises:
        ValueError: naming file and line, what was expected and what came.
    """
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    rows: list[dict[str, Any]] = []
    try:
        for raw in _json(text) if path.suffix == ".json" else _table(text) or _lines(text):
            if len(row := _named(raw, len(rows) + 1)) > 1:
                rows.append(row)
        if not rows:
            raise ValueError(f"line 1: got {text[:60].strip()!r}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected {_EXPECTED}; {error}") from error
    if path.name != "metrics.jsonl":
        return rows, _options(path)
    accuracies = read_rows(path.with_name("evaluations.jsonl"))
    held_out = ({"step": x["step"], "held_out_accuracy": x.get("accuracy")} for x in accuracies)
    return [*rows, *(_named(row, 0) for row in held_out)], _options(path)


def _options(path: Path) -> dict[str, Any]:
    """The numbers among a run's options and its dtype, which stands in a model's config, too."""
    try:
        values = json.loads(path.with_name("config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(values, dict) or path.name not in ("metrics.jsonl", "trainer_state.json"):
        return {}
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
    """Rows of JSONL, of printed dicts and of verl's console; other lines are left out."""
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
    reader = csv.reader(io.StringIO(text, newline=""), delimiter="|" if "|" in text[:99] else ",")
    try:
        names = [name.rpartition(" - ") for name in next(reader, [])]
        if not any(len(_named({name: 0.0}, 1)) > 1 for *_, name in names):
            return []
        rows = [dict(zip((name for *_, name in names), line, strict=False)) for line in reader]
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num}: {error}") from error
    if len(runs := sorted({run for run, *_ in names if run})) > 1:
        raise ValueError(f"line 1: got columns of {', '.join(runs[:3])}: export a single run")
    return rows


def _named(raw: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Returns the row of a step with our names; `number` is for logs that have none."""
    clean = {
        re.sub(r" *(/) *", r"\1", str(name)[:200]).strip().removeprefix("train/"): x
        for name, x in raw.items()
    }
    steps = (_number(str(clean.get(name)).split("/")[0]) for name in _STEPS)
    found = next((x for x in steps if x is not None and math.isfinite(x)), number)
    row: dict[str, Any] = {"step": int(found)}
    own = {"accuracy": _ACCURACY, "held_out_accuracy": _HELD_OUT}
    for ours, theirs in NAMES.items():
        candidates = [ours, *theirs, *(x for x in clean if ours in own and own[ours].fullmatch(x))]
        for name in candidates:
            if name in clean and (clean[name] is None or _number(clean[name]) is not None):
                row[ours] = _number(clean[name])
                break
    if "clip_low" in clean:
        parts = (_number(clean.get(name)) or 0.0 for name in ("clip_low", "clip_high"))
        row.setdefault("clip_ratio/region_mean", sum(parts))
    return row


def _number(x: Any) -> float | None:
    try:
        return None if isinstance(x, bool) else float(x)
    except (TypeError, ValueError, OverflowError):
        return None


def row_of(explanation: Explanation) -> dict[str, Any]:
    """Returns the metrics of a step that its tokens tell, as a row."""
    columns, row = explanation.columns, dict[str, Any](step=1)
    for name, column in (("entropy", "entropy"), ("kl", "kl"), ("sampler_gap", "sampler_gap")):
        if (x := columns.get(column)) is not None and (x := x[x.isfinite()]).numel():
            x = x.abs() if name == "sampler_gap" else x
            row |= {name: x.mean().item(), f"{name}_max": x.max().item()}
    if (clip := columns.get("clip")) is not None and not clip.isnan().all():
        row["clip_ratio/region_mean"] = (clip.nan_to_num() != 0).float().mean().item()
    groups = [
        {explanation.sequences[i].get("reward") for i in group["sequences"]}
        for group in explanation.groups
        if group["group"] is not None and len(group["sequences"]) > 1
    ]
    known = [rewards for rewards in groups if None not in rewards]
    if known:
        row["groups_equal"] = sum(len(rewards) == 1 for rewards in known) / len(known)
    cut = [x.get("truncated") for x in explanation.sequences]
    if None not in cut:
        row["truncated"] = sum(x == 1 for x in cut) / len(cut)
    return row

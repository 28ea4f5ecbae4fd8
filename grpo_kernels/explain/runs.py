"""The page of a run, or of several for comparison, from the files in their folders."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median_low
from typing import Any
from urllib.parse import quote

from ..base.text import printable
from .page import pages, render
from .records import prompt_text, read_rows, read_values

Run = Mapping[str, Any]
MOST = 6  # runs on a page, which has six colours
TEXTS, LONGEST = 2_000_000, 6_000  # characters of all prompts, of completions; and of one
DATA, SIZE = ("dataset", "dataset_config"), ("prompts_per_step", "num_generations")


def write(folders: Sequence[str | Path], output: str | Path) -> str:
    """Writes the page of one to six runs; returns its verdict and figures, as text.

    Raises:
        ValueError: no folder, more than six, or a folder that is not a run's.
    """
    paths, output = [*dict.fromkeys(Path(x).resolve() for x in folders)], Path(output).resolve()
    if not 1 <= len(paths) <= MOST:
        raise ValueError(f"folders: expected 1 to {MOST} runs; got {len(paths)}: compare fewer")
    names, depth = [path.name for path in paths], 1
    while len({*names}) < len(names):  # until the names differ
        depth += 1
        names = ["/".join(path.parts[-depth:]) for path in paths]
    prompts: dict[str, int] = {}
    runs = [{"name": n, **_run(p, output, prompts)} for n, p in zip(names, paths, strict=True)]
    verdict = _comparison(runs) if len(runs) > 1 else _verdict(runs[0])
    title = " and ".join(names) if len(runs) < 3 else f"{len(runs)} runs"
    longest = min(LONGEST, TEXTS // (len(prompts) or 1))
    data = {"runs": runs, "prompts": [_cut(text, longest) for text in prompts]}
    scratch = output.with_name(f"{output.name}.tmp")
    scratch.write_text(render("run.html", title, data, VERDICT=verdict), encoding="ascii")
    scratch.replace(output)
    return printable("\n".join((verdict, *map(_summary, runs))))


def _run(folder: Path, output: Path, prompts: dict[str, int]) -> dict[str, Any]:
    """The data of a run; adds its prompts, with their places on the page, to `prompts`."""
    rows = {row["step"]: row for row in read_rows(folder / "metrics.jsonl")}.values()
    if not (options := read_values(folder / "config.json")):
        raise ValueError(f"folder: expected a run's, with its config.json; got {folder}")
    samples = _rows(folder / "samples.jsonl", "prompt", "completion")
    evaluations = _rows(folder / "evaluations.jsonl", "problems", "accuracy", "low", "high")
    longest = min(LONGEST, TEXTS // (len(samples) or 1))
    names = dict.fromkeys(k for row in rows for k in row if k != "step")
    columns = {k: [_short(row.get(k)) for row in rows] for k in names}
    run = {
        "options": options, "about": read_values(folder / "about.json"),
        "evaluations": [*{e["step"]: e for e in evaluations if e["problems"]}.values()],
        "answers": _answers(folder / "answers.jsonl", prompts),
        "steps": [row["step"] for row in rows],
        "columns": {k: v for k, v in columns.items() if any(x is not None for x in v)},
        "signs": [signs for row in rows if len(signs := _signs(row)) > 1],
        "samples": [
            {**x, "completion": _cut(x["completion"], longest),
             "prompt": prompts.setdefault(prompt_text(x["prompt"], "system"), len(prompts))}
            for x in samples
        ],
        "pages": [*pages(folder / "explanations")],
        "up": quote(os.fsencode(os.path.relpath(folder, output.parent).replace(os.sep, "/"))),
    }  # fmt: skip
    return run | {"change": _difference(run, 0, run)}


def _rows(path: Path, *keys: str) -> list[dict[str, Any]]:
    return [row for row in read_rows(path) if row.keys() >= {*keys}]


def _signs(row: Run) -> dict[str, Any]:
    """The step of a row, its warnings and why it was explained, if they have our form."""
    warnings, explained = row.get("warnings"), row.get("explained")
    valid = [x for x in warnings if isinstance(x, dict)] if isinstance(warnings, list) else []
    signs = {"warnings": valid, "explained": explained if isinstance(explained, dict) else None}
    return {"step": row["step"], **{name: x for name, x in signs.items() if x}}


def _short(x: Any) -> float | None:
    """The value to five digits; None unless it is a finite number."""
    if not isinstance(x, int | float) or not abs(x) < 1e300:
        return None
    return int(x) if x == int(x) and abs(x) < 1e15 else float(f"{x:.5g}")


def _cut(text: str, longest: int) -> str:
    left, half = len(text) - longest, longest // 2
    return text if left <= 0 else f"{text[:half]} [... {left:,} characters ...] {text[-half:]}"


def _answers(path: Path, prompts: dict[str, int]) -> dict[int, dict[int, list[Any]]]:
    """Answers by step and prompt: correct, right answer, answer; the text at the first and last."""
    rows = [row for row in _rows(path, "prompt", "completion", "correct") if "sample" not in row]
    of: dict[int, dict[int, list[Any]]] = {step: {} for step in sorted({r["step"] for r in rows})}
    ends = {*[*of][:1], *[*of][-1:]}
    longest = max(400, min(LONGEST, TEXTS * len(of) // (2 * len(rows) or 1)))
    for row in rows:
        texts = [None if row.get(k) is None else str(row[k]) for k in ("answer", "answered")]
        texts += [_cut(row["completion"], longest)] if row["step"] in ends else []
        place = prompts.setdefault(prompt_text(row["prompt"], "system"), len(prompts))
        of[row["step"]][place] = [int(row["correct"]), *texts]
    return of


def _summary(run: Run) -> str:
    """A run's name and figures in a line."""
    rewards, seconds, lengths, memory = (
        [x for x in run["columns"].get(name, ()) if x is not None]
        for name in ("reward", "seconds", "completion_length", "peak_memory_gib")
    )
    # The metric `tokens` would count the tokens of two epochs twice.
    tokens = sum(lengths) * math.prod(run["options"].get(name, 0) for name in SIZE)
    parts = []
    if total := sum(seconds):
        n = len(seconds)
        parts.append(f"{n:,} step{'s' * (n > 1)}, median {median_low(seconds):.3g} s")
        parts += [f"{tokens / total:,.0f} completion tokens per second"] if tokens else []
    if rewards:
        n = max(1, min(max(5, len(rewards) // 20), len(rewards) // 2))
        first, last = fmean(rewards[:n]), fmean(rewards[-n:])
        parts.append(f"reward {first:.3f} -> {last:.3f} (first and last {n:,})")
    parts += [f"peak memory {max(memory):.2f} GiB"] if memory else []
    return f"{run['name']}: {'; '.join(parts) or 'no step is done yet'}"


def _difference(x: Run, i: int, y: Run) -> dict[str, Any]:
    """The 95 % interval of the last accuracy of `y` minus the accuracy of `x` at evaluation `i`.

    For the same problems: McNemar's exact test, and the interval of Agresti and Min (2005).
    Otherwise, as for independent samples, Newcombe's method 10 (1998).
    """
    if len(x["evaluations"]) < 2 - (x is not y):
        return {}
    a, b = x["evaluations"][i], y["evaluations"][-1]
    old, new = x["answers"].get(a["step"], {}), y["answers"].get(b["step"], {})
    if len(old) == a["problems"] == b["problems"] and old.keys() == new.keys():
        up, down = (sum(new[k][0] - old[k][0] == sign for k in old) for sign in (1, -1))
        rarer = sum(math.comb(up + down, k) for k in range(min(up, down) + 1))
        n, turned = len(old) + 2, {"up": up, "down": down}
        middle, half = (up - down) / n, math.sqrt(up + down + 1 - (up - down) ** 2 / n) * 1.96 / n
        beyond = 2 * rarer / 2 ** (up + down) < 0.05
        return {"low": middle - half, "high": middle + half, "beyond": beyond, **turned}
    p, q = a["accuracy"], b["accuracy"]
    low = q - p - math.hypot(q - b["low"], p - a["high"])
    high = q - p + math.hypot(q - b["high"], p - a["low"])
    return {"low": low, "high": high, "beyond": low > 0 or high < 0}


def _verdict(run: Run) -> str:
    """A sentence about the result of a run."""
    evaluations, change, steps = run["evaluations"], run["change"], run["steps"]
    text = "No held-out problems were answered." if steps else "No step is done yet."
    if evaluations:
        old, new = _percent(run, 0), _percent(run)
        said = f"stayed at {new}" if change and old == new else f"is {new}"
        if change and old != new:
            rose = evaluations[-1]["accuracy"] > evaluations[0]["accuracy"]
            how = ("fell", "rose")[rose] if change["beyond"] else "went"
            said = f"{how} from {old} to {new}{', a difference within chance' * (how == 'went')}"
        n = _problems(evaluations[-1]["problems"])
        turned = ": {up:,} turned right, {down:,} wrong".format(**change) if "up" in change else ""
        text = f"Held-out accuracy {said}, on {n}{turned}."
    if steps and steps[-1] < (planned := run["options"].get("steps", 0)):
        text += f" Step {steps[-1]:,} of {planned:,} is done."
    return text


def _comparison(runs: Sequence[dict[str, Any]]) -> str:
    """A sentence about the most accurate run; adds to the others how far behind they are."""
    known = [run for run in runs if run["evaluations"]]
    if not known:
        return "No held-out problems were answered in these runs."
    sets = {tuple(run["options"].get(name) for name in DATA) for run in known}
    if len(sets) > 1:
        of = (f"{x['name']} {_percent(x)} of {x['evaluations'][-1]['problems']:,}" for x in known)
        return f"These runs have different held-out problems: {', '.join(of)} were answered right."
    best = max(known, key=lambda run: run["evaluations"][-1]["accuracy"])
    behind: dict[bool, list[str]] = {False: [], True: []}
    for run in known:
        if run is not best:
            run["behind"] = _difference(best, -1, run)
            last = run["evaluations"][-1]["step"]
            behind[run["behind"]["beyond"]].append(
                f"{run['name']} ({_percent(run)}, step {last:,})"
            )
    last = best["evaluations"][-1]
    text = f"{best['name']} answers {_percent(best)} of {_problems(last['problems'])}"
    text += f", step {last['step']:,}"
    for kind, words in ((False, "within chance of it"), (True, "behind by more than chance")):
        text += f"; {words}: {', '.join(behind[kind])}" if behind[kind] else ""
    return f"{text}."


def _problems(n: int) -> str:
    return f"{n:,} problem{'s' * (n != 1)} not trained on"


def _percent(run: Run, which: int = -1) -> str:
    # Halves are rounded up, as on the page.
    return f"{100 * run['evaluations'][which]['accuracy'] + 1e-9:.1f} %"

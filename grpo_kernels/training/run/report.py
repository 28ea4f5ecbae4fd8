"""`report.html`, a view of a run that needs no network.

python -m grpo_kernels.training.report runs/NAME
"""

from __future__ import annotations

import argparse
import html
import io
import math
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from ...explain.records import read_rows
from ..config import TrainingConfig
from . import logs

Row = Mapping[str, Any]
# Step and value, or step, value and the ends of its interval.
Points = Sequence[tuple[float, ...]]
_FILES = ("metrics.jsonl", "evaluations.jsonl", "samples.jsonl")
_PACKAGES = (
    "grpo_kernels", "torch", "triton", "transformers", "accelerate", "peft", "datasets", "vllm",
)  # fmt: skip
_SMOOTH = 5
_SAMPLE = ("prompt (its end)", "completion", "right answer", "reward", "advantage")
# Pictures of a page: patterns of the metrics in one.
_CURVES = {
    "reward, mean of 5 steps": ("reward", "reward/*"),
    "accuracy of training samples, mean of 5 steps": ("accuracy", "accuracy/*"),
    "KL to the reference": ("kl",),
    "entropy, nats": ("entropy",),
    "completion length, tokens": ("completion_length",),
    "share of completions cut, of equal groups": ("truncated", "groups_equal"),
    "share of tokens clipped": ("clip_low", "clip_high"),
    "gradient norm": ("grad_norm",),
    "importance ratio": ("ratio_mean", "ratio_max"),
    "gap to the sampler's log-probs, nats, log scale": ("sampler_gap", "sampler_gap_max"),
    "seconds per step": ("seconds", "seconds/*"),
    "peak memory, GiB": ("peak_memory_gib",),
}


def prompt_text(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """Returns the text of a prompt, or of a chat's last message, whose content may have parts."""
    content = prompt if isinstance(prompt, str) else prompt[-1].get("content")
    if content is None or isinstance(content, str):  # None in a message that calls a tool
        return content or ""
    return "".join(str(part.get("text") or "") for part in content)


def summary(rows: Sequence[Row], evaluations: Sequence[Row]) -> str:
    """Says what came of a run: accuracies, then reward, time and memory."""
    sentences = [_verdict(rows, evaluations)] if evaluations else []
    if rows:
        seconds = sum(row["seconds"] for row in rows) / len(rows)
        parts = [f"{len(rows):,} step{'s' * (len(rows) > 1)} of {seconds:.1f} s"]
        parts += [f"reward {text}"] if (text := _change(rows, "reward", "{:.3f}")) else []
        parts.append(f"peak memory {max(row['peak_memory_gib'] for row in rows):.2f} GiB")
        sentences.append("; ".join(parts))
    return ".\n".join(sentences) or "no step yet"


def _verdict(rows: Sequence[Row], evaluations: Sequence[Row]) -> str:
    """Says how both accuracies changed, in a sentence without its full stop."""
    first, last = evaluations[0], evaluations[-1]
    old, new = (f"{x['accuracy']:.1%}" for x in (first, last))
    if first["step"] == last["step"]:
        change = f"is {new}"
    elif _surely_more(last, first):
        change = f"rose from {old} to {new}"
    elif _surely_more(first, last):
        change = f"fell from {old} to {new}"
    elif old == new:
        change = f"stayed at {old}"
    else:
        change = f"went from {old} to {new}, a difference within chance"
    text = (
        f"Held-out accuracy {change} ({last['problems']} problems that were not trained on; "
        f"95 % interval: {last['low']:.1%} to {last['high']:.1%})"
    )
    sampled = _change(rows, "accuracy", "{:.0%}")
    return text + (f"; accuracy of the completions trained on {sampled}" if sampled else "")


def _surely_more(x: Row, y: Row) -> bool:
    """True if the difference's 95 % interval is above 0, by Newcombe's method 10 (1998)."""
    margin = math.hypot(x["accuracy"] - x["low"], y["high"] - y["accuracy"])
    return bool(x["accuracy"] - y["accuracy"] > margin)


def _change(rows: Sequence[Row], name: str, form: str) -> str:
    """Compares the means of a metric over the first and the last steps, at most five of each."""
    values = [row[name] for row in rows if row.get(name) is not None]
    if n := min(_SMOOTH, len(values) // 2):
        first, last = (form.format(sum(part) / n) for part in (values[:n], values[-n:]))
        steps = f"{n} steps" if n > 1 else "step"
        return f"{first} (first {steps}) -> {last} (last {steps})"
    return form.format(values[0]) if values else ""


def write_environment(folder: Path) -> None:
    """Writes device and versions, and the package's commit in a git checkout, for the report."""
    state, versions = PartialState(), {"Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    commit = {"grpo_kernels' commit": text} if (text := _commit()) else {}
    device = {"processes x device": f"{state.num_processes} x {_name_of(state.device)}"}
    logs.write_json(folder / "environment.json", device | commit | versions)


def write(folder: Path) -> tuple[Path, str]:
    """Makes `report.html` from the logs in the folder; returns it and the run's summary."""
    options = logs.read_json(folder / "config.json")
    rows, evaluations, samples = (read_rows(folder / name) for name in _FILES)
    model = Path(options["model"])
    name = model.name if model.is_absolute() else model
    title = html.escape(f"{folder.resolve().name}: {name} on {options['dataset']}")
    warnings = [(f"step {r['step']}", x["text"]) for r in rows for x in r.get("warnings", [])]
    last = [s for s in samples if s["step"] == samples[-1]["step"]]
    text, defaults = summary(rows, evaluations), TrainingConfig.default_json()
    changed = {k: (x, defaults.get(k)) for k, x in options.items() if x != defaults.get(k)}
    parts = (
        f"<p>{html.escape(text)}</p>", _table("Warnings", warnings[-20:]), _explanations(folder),
        _pictures(rows, evaluations, logs.read_json(folder / "charts.json")),
        _table("Held-out problems", *_accuracies(evaluations)),
        _table("Completions of the last step shown: best and worst of two groups",
               map(_texts, last), _SAMPLE),
        _table("Options that differ from their defaults", [(k, *x) for k, x in changed.items()],
               ("option", "here", "default")),
        _table("Device and versions", logs.read_json(folder / "environment.json").items()),
        _table("Options at their defaults",
               [(k, x) for k, x in options.items() if k not in changed]),
    )  # fmt: skip
    head, foot = Path(__file__).with_name("report_page.html").read_text().split("BODY")
    # Whatever is in its text: half of a surrogate pair, too.
    scratch = folder / "report.tmp"
    scratch.write_text(
        "\n".join((head.replace("TITLE", title), *parts, foot)), encoding="utf-8", errors="replace"
    )
    return scratch.replace(folder / "report.html"), text


def _explanations(folder: Path) -> str:
    """Links to the pages that explain steps."""
    names = sorted(path.name for path in folder.glob("explanations/step-*.html"))
    links = (f'<a href="explanations/{name}">{name[5:-5].lstrip("0")}</a>' for name in names)
    return f"<p>Steps explained, token by token: {', '.join(links)}</p>" if names else ""


def _name_of(device: torch.device) -> str:
    module = torch.get_device_module(device)
    if hasattr(module, "get_device_name"):
        return str(module.get_device_name(device))
    if device.type != "cpu":
        return device.type  # Apple's: its module has no names
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next((x.partition(": ")[2] for x in lines if x.startswith("model name")), "CPU")
    return f"{name}, {torch.get_num_threads()} threads"


def _commit() -> str | None:
    here = Path(__file__)
    try:
        for command in (f"ls-files --error-unmatch {here.name}", "describe --always --dirty"):
            git = ["git", "-C", str(here.parent), *command.split()]
            done = subprocess.run(git, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):  # no git, or no checkout
        return None
    return done.stdout.strip()


def _table(title: str, rows: Iterable[Sequence[object]], header: Sequence[str] = ()) -> str:
    """A table of texts, none of which is taken for HTML; nothing of no rows."""
    lines = [_line("td", row) for row in rows]
    if not lines:
        return ""
    heads = [_line("th", header)] if header else []
    return f"<h2>{title}</h2><table>{''.join(heads + lines)}</table>"


def _line(kind: str, row: Sequence[object]) -> str:
    cells = "".join(f"<{kind}>{html.escape(str(x))}</{kind}>" for x in row)
    return f"<tr>{cells}</tr>"


def _accuracies(evaluations: Sequence[Row]) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """A header, then the first and the last evaluation, also by several samples."""
    if not evaluations:
        return [], ()
    now = evaluations[-1]
    compared = [evaluations[0], now] if len(evaluations) > 1 else [now]
    rows = [("all", str(now["problems"]), *map(_interval, compared))]
    if several := now.get("samples"):
        each = f"{several['count']} samples each"
        rows.append((each, str(several["problems"]), _interval(several)))
    steps = (f"accuracy after step {e['step']} (95 % interval)" for e in compared)
    return rows, ("", "problems", *steps)


def _interval(one: Row) -> str:
    return f"{one['accuracy']:.1%} ({one['low']:.1%} to {one['high']:.1%})"


def _texts(row: Row) -> tuple[str, ...]:
    """A row of `samples.jsonl`, as `_SAMPLE` names its parts."""
    cut = "" if row["ended"] else " [cut]"
    reward = "not scored" if row["reward"] is None else f"{row['reward']:.2f}"
    texts = prompt_text(row["prompt"])[-600:], row["completion"] + cut, str(row["answer"])
    return *texts, reward, f"{row['advantage']:+.2f}"


def _pictures(
    rows: Sequence[Row], evaluations: Sequence[Row], charts: Mapping[str, Sequence[str]]
) -> str:
    """The curves, each of what a run has of it."""
    drawn: dict[str, dict[str, Points]] = {}
    if evaluations:
        held_out = [(e["step"], e["accuracy"], e["low"], e["high"]) for e in evaluations]
        drawn["held-out accuracy, 95 % interval"] = {"held out": held_out}
    known = dict.fromkeys(key for row in rows for key in row)
    for title in dict.fromkeys((*_CURVES, *charts)):
        curves: dict[str, Points] = {}
        for key in known:
            is_drawn = any(fnmatchcase(key, pattern) for pattern in _CURVES.get(title, ()))
            if not is_drawn and key not in charts.get(title, ()):
                continue
            if points := [(r["step"], r[key]) for r in rows if r.get(key) is not None]:
                short = key.partition("/")[2]
                curves[key if short in ("", *curves) else short] = points
        if curves:
            drawn[title] = curves
    pictures = "".join(_svg(*of) for of in drawn.items())
    return f'<h2>Curves</h2><div class="plots">{pictures}</div>' if pictures else ""


def _svg(title: str, lines: Mapping[str, Points]) -> str:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(4.4, 2.8), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    for points in lines.values():
        steps, values, *ends = zip(*points, strict=True)
        far = [[abs(a - b) for a, b in zip(end, values, strict=True)] for end in ends] or None
        curve = _smooth(values) if "mean of" in title else values
        axes.errorbar(steps, curve, far, fmt="-" if len(steps) > 1 else "o", capsize=3, label="x")
    # Names are set afterwards: a legend leaves out those with an underscore before them, and has
    # formulas between dollar signs.
    for label, name in zip(axes.legend(fontsize=7).get_texts(), lines, strict=True):
        label.set_text(name)
        label.set_parse_math(False)
    axes.set_yscale("log" if "log scale" in title else "linear")
    axes.set_title(title, fontsize=9, parse_math=False)
    axes.set_xlabel("step", fontsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(labelsize=7, which="both")
    axes.grid(alpha=0.3)
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def _smooth(values: Sequence[float]) -> list[float]:
    parts = [values[max(0, i - _SMOOTH + 1) : i + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m grpo_kernels.training.report", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("folder", type=Path, help="of a run")
    folder = parser.parse_args(argv).folder
    if not (folder / "config.json").exists():
        parser.error(f"folder: expected a run's folder, with config.json; got {folder}")
    print(*write(folder), sep="\n")


if __name__ == "__main__":
    main()

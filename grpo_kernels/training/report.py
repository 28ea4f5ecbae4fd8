"""Views of a run: lines in the terminal, and `report.html`, a page that needs no network.

python -m grpo_kernels.training.report runs/NAME
"""

from __future__ import annotations

import argparse
import html
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import logs

Row = Mapping[str, Any]
# Step and value, or step, value and the ends of its interval.
Points = Sequence[tuple[float, ...]]
_FILES = ("metrics.jsonl", "evaluations.jsonl", "samples.jsonl")
_SHOWN = 4
_SMOOTH = 5
_PHASES = ("sync", "generate", "reward", "score", "train")
# Pictures of a page: the metrics that a run has in one; one that ends with "/" stands for all that
# begin so.
_CURVES = {
    "reward, mean of 5 steps": ("reward", "reward/"),
    "accuracy while sampling, mean of 5 steps": ("accuracy", "accuracy/"),
    "KL to the reference": ("kl",),
    "entropy, nats": ("entropy",),
    "completion length, tokens": ("completion_length",),
    "share of completions cut, of equal groups": ("truncated", "groups_equal"),
    "share of tokens clipped": ("clip_low", "clip_high"),
    "gradient norm": ("grad_norm",),
    "importance ratio": ("ratio_mean", "ratio_max"),
    "gap to the sampler's log-probs, nats, log scale": ("sampler_gap", "sampler_gap_max"),
    "seconds per step": ("seconds", "seconds/"),
    "peak memory, GiB": ("peak_memory_gib",),
}


# Lines in the terminal


def line(row: Row) -> str:
    """A step's row in one line of text."""
    parts = [f"{row['step']:5d}  reward {row['reward']:.3f}"]
    for name, text in (
        ("accuracy", "accuracy {:.0%}"),
        ("kl", "kl {:.4f}"),
        ("entropy", "entropy {:.2f}"),
    ):
        if name in row:
            parts.append(text.format(row[name]))
    parts += [
        f"length {row['completion_length']:.1f}", f"loss {row['loss']:+.4f}",
        f"grad norm {row['grad_norm']:.3g}",
    ]  # fmt: skip
    split = [f"{part} {row[key]:.1f}" for part in _PHASES if (key := f"seconds/{part}") in row]
    parts.append(f"{row['seconds']:.1f} s ({', '.join(split)})")
    return "  ".join(parts)


def sample_rows(samples: Any, group_size: int) -> list[dict[str, Any]]:
    """Rows of `samples.jsonl`: the best and the worst completion of the first groups."""
    shown = []
    for start in range(0, min(len(samples.texts), _SHOWN // 2 * group_size), group_size):
        group = range(start, start + group_size)
        by_advantage = sorted(group, key=lambda i: float(samples.advantages[i]))
        problem = samples.problems[samples.prompt_of[start]]
        for i in dict.fromkeys((by_advantage[-1], by_advantage[0])):
            shown.append({
                "prompt": problem["prompt"], "completion": samples.transcripts[i],
                "answer": problem.get("answer"),
                "reward": float(samples.totals[i]),
                "advantage": float(samples.advantages[i]),
                "ended": samples.completions[i].ended,
            })  # fmt: skip
    return shown


def sample_table(rows: Sequence[Row]) -> str:
    """Rows of `samples.jsonl` as text, one line per completion."""
    lines = []
    for row in rows:
        question = _shortened(_text_of(row["prompt"]), 60, end=True)
        text = _shortened(row["completion"] + ("" if row["ended"] else " [cut]"), 90)
        lines.append(
            f"      {question} -> {text}   (answer {_shortened(str(row['answer']), 20)}, reward "
            f"{row['reward']:.2f}, advantage {row['advantage']:+.2f})"
        )
    return "\n".join(lines)


def _shortened(text: str, width: int, end: bool = False) -> str:
    text = " ".join(text.split())
    if len(text) <= width:
        return text
    return "..." + text[len(text) - width :] if end else text[:width] + "..."


def _text_of(prompt: str | Sequence[Mapping[str, str]]) -> str:
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def summary(folder: Path) -> str:
    """Says how a run ended, from its logs."""
    rows, evaluations = logs.read(folder / "metrics.jsonl"), logs.read(folder / "evaluations.jsonl")
    first, last = (sum(r["reward"] for r in some) / len(some) for some in (rows[:5], rows[-5:]))
    text = f"Reward {first:.3f} (first 5 steps) -> {last:.3f} (last 5)"
    if len(evaluations) > 1:
        before, after = evaluations[0], evaluations[-1]
        text += (
            f"; accuracy on {after['problems']} held-out problems {before['accuracy']:.1%} -> "
            f"{after['accuracy']:.1%} (95 %: {after['low']:.1%} to {after['high']:.1%})"
        )
    return f"{text}\nLook at {folder / 'report.html'}"


# The page


def write(folder: Path) -> Path:
    """Makes `report.html` from the logs in the folder, however many steps they have."""
    config = json.loads((folder / "config.json").read_text())
    rows, evaluations, samples = (logs.read(folder / name) for name in _FILES)
    model = Path(config["model"])
    name = model.name if model.is_absolute() else model
    title = html.escape(f"{config['name']}: {name} on {config['dataset']}")
    told = [(f"step {r['step']}", text) for r in rows for text in r.get("warnings", [])]
    last = [s for s in samples if s["step"] == samples[-1]["step"]]
    parts = (
        _table("", _numbers(rows, evaluations)), _table("Warnings", told[-20:]),
        _pictures(rows, evaluations), _table("Held-out problems", _accuracies(evaluations)),
        _table("Completions of the last step shown", map(_texts, last)),
        _table("Options", config.items()),
    )  # fmt: skip
    head, foot = Path(__file__).with_name("report_page.html").read_text().split("BODY")
    # Whatever is in its text: half of a surrogate pair, too.
    scratch = folder / "report.tmp"
    scratch.write_text(
        "\n".join((head.replace("TITLE", title), *parts, foot)), encoding="utf-8", errors="replace"
    )
    return scratch.replace(folder / "report.html")


def _table(title: str, rows: Iterable[Sequence[object]]) -> str:
    """A table of texts, none of which is taken for HTML; nothing of no rows."""
    cells = (
        "<tr>" + "".join(f"<td>{html.escape(str(x))}</td>" for x in row) + "</tr>" for row in rows
    )
    table = "".join(cells)
    return f"<h2>{title}</h2><table>{table}</table>" if table else ""


def _numbers(rows: Sequence[Row], evaluations: Sequence[Row]) -> list[tuple[str, str]]:
    if not rows:
        return [] if evaluations else [("steps", "none yet")]
    shares = dict.fromkeys(f"{e['accuracy']:.1%}" for e in (*evaluations[:1], *evaluations[-1:]))
    return [
        ("steps", f"{rows[-1]['step']:,}"),
        ("reward, last 5 steps", f"{_smooth([r['reward'] for r in rows])[-1]:.3f}"),
        ("held-out accuracy, before -> now", " -> ".join(shares)),
        ("seconds per step", f"{sum(r['seconds'] for r in rows) / len(rows):.1f}"),
        ("peak memory", f"{max(r['peak_memory_gib'] for r in rows):.2f} GiB"),
    ]


def _accuracies(evaluations: Sequence[Row]) -> Iterable[tuple[str, ...]]:
    """The last evaluation beside the first, by group, and of several samples."""
    if not evaluations:
        return
    now = evaluations[-1]
    compared = [evaluations[0], now] if len(evaluations) > 1 else [now]
    yield ("", "problems", *(f"after step {e['step']}" for e in compared))
    yield ("all", str(now["problems"]), *map(_interval, compared))
    for column, values in now.get("by", {}).items():
        for value, part in values.items():
            parts = (e.get("by", {}).get(column, {}).get(value) for e in compared)
            yield (f"{column}: {value}", str(part["problems"]), *map(_interval, parts))
    for name, share in now.get("samples", {}).items():
        one = dict(zip(("accuracy", "low", "high"), share, strict=True))
        yield (f"several samples: {name}", "", _interval(one))


def _interval(one: Row | None) -> str:
    return "" if one is None else f"{one['accuracy']:.1%} ({one['low']:.1%} to {one['high']:.1%})"


def _texts(row: Row) -> tuple[str, ...]:
    """A completion, with what it was given and what it got."""
    cut = "" if row["ended"] else " [cut]"
    got = f"reward {row['reward']:.2f}", f"advantage {row['advantage']:+.2f}"
    return _text_of(row["prompt"])[-600:], row["completion"] + cut, str(row["answer"]), *got


def _pictures(rows: Sequence[Row], evaluations: Sequence[Row]) -> str:
    """The curves, each of what a run has of it."""
    drawn: dict[str, dict[str, Points]] = {}
    if evaluations:
        held_out = [(e["step"], e["accuracy"], e["low"], e["high"]) for e in evaluations]
        drawn["held-out accuracy, 95 % interval"] = {"held out": held_out}
    known = dict.fromkeys(key for row in rows for key in row)
    for title, names in _CURVES.items():
        keys = [
            k
            for name in names
            for k in known
            if k == name or (name[-1] == "/" and k.startswith(name))
        ]
        found: dict[str, Points] = {
            key.partition("/")[2] or key: [
                (r["step"], r[key]) for r in rows if r.get(key) is not None
            ]
            for key in keys
        }
        drawn |= {title: found} if any(found.values()) else {}
    pictures = "".join(_svg(*of) for of in drawn.items())
    return f'<h2>Curves</h2><div class="plots">{pictures}</div>' if pictures else ""


def _svg(title: str, lines: Mapping[str, Points]) -> str:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(4.4, 2.8), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    for label, points in lines.items():
        if not points:
            continue
        steps, values, *ends = zip(*points, strict=True)
        far = [[abs(a - b) for a, b in zip(end, values, strict=True)] for end in ends] or None
        curve = _smooth(values) if "mean of" in title else values
        axes.errorbar(steps, curve, far, fmt="-" if len(steps) > 1 else "o", capsize=3, label=label)
    axes.legend(fontsize=7)
    axes.set_yscale("log" if "log scale" in title else "linear")
    axes.set_title(title, fontsize=9)
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
    print(write(folder))


if __name__ == "__main__":
    main()

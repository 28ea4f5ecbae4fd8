"""Views of a run: lines in the terminal, and `report.html`, a page that needs no network.

python -m grpo_kernels.training.report runs/NAME [runs/OTHER ...]
"""

from __future__ import annotations

import argparse
import html
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import logs
from .config import TrainingConfig

Row = Mapping[str, Any]
# Step and value, or step, value and the ends of its interval.
Points = Sequence[tuple[float, ...]]
_SHOWN = 4
_SMOOTH = 5
_ANSWERS = 20
_PHASES = ("sync", "generate", "reward", "score", "train")
# Pictures of a page: the metrics that a run has in one; one that ends with "/" stands for all that
# begin so.
_CURVES = {
    "reward, mean of 5 steps": ("reward", "reward/"),
    "accuracy while sampling, mean of 5 steps": ("accuracy", "accuracy/"),
    "held-out accuracy, 95 % interval": ("held_out", "held_out/"),
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


def flat(config: TrainingConfig) -> dict[str, Any]:
    """The config in the types that trackers take."""
    return {
        k: ", ".join(map(str, v)) if isinstance(v, list) else v for k, v in config.as_json().items()
    }


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


# Pages


class Run(NamedTuple):
    """The logs of a run."""

    config: Row
    rows: Sequence[Row]
    evaluations: Sequence[Row]

    @staticmethod
    def of(folder: Path) -> Run:
        config = json.loads((folder / "config.json").read_text())
        files = ("metrics.jsonl", "evaluations.jsonl")
        return Run(config, *(logs.read(folder / name) for name in files))

    def names(self, name: str) -> list[str]:
        """The metrics that a name of `_CURVES` stands for."""
        if not name.endswith("/"):
            return [name]
        if name == "held_out/":
            last = self.evaluations[-1:]
            return [name + part for e in last for part in e.get("by", {}).get("held_out", {})]
        return list(dict.fromkeys(key for row in self.rows for key in row if key.startswith(name)))

    def curve(self, name: str) -> Points:
        """The values of a metric, by step."""
        kind, _, part = name.partition("/")
        if kind != "held_out":
            return [(row["step"], row[name]) for row in self.rows if row.get(name) is not None]
        if not part:
            return [(e["step"], e["accuracy"], e["low"], e["high"]) for e in self.evaluations]
        of_part = [(e["step"], e.get("by", {}).get(kind, {}).get(part)) for e in self.evaluations]
        return [(step, one["accuracy"]) for step, one in of_part if one is not None]


def write(folder: Path) -> Path:
    """Makes `report.html` from the logs in the folder, however many steps they have."""
    run, samples = Run.of(folder), logs.read(folder / "samples.jsonl")
    model = run.config["model"]
    model = Path(model).name if Path(model).is_absolute() else model
    answers = logs.read(folder / "answers.jsonl")
    parts = (
        _numbers(run), _warnings(run.rows), _pictures({"": run}),
        _evaluation(run.evaluations, answers), _samples(samples),
        "<details><summary>Options</summary>"
        + _table((), ((name, str(value)) for name, value in run.config.items())) + "</details>",
    )  # fmt: skip
    title = f"{run.config['name']}: {model} on {run.config['dataset']}"
    return _put(folder / "report.html", title, parts)


def compare(folders: Sequence[Path]) -> Path:
    """Makes `compare.html`, beside the first folder: the curves of several runs together."""
    names = [folder.name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    runs = {name: Run.of(folder) for name, folder in zip(names, folders, strict=True)}
    configs = [run.config for run in runs.values()]
    others = {
        key: [str(config.get(key, "")) for config in configs]
        for key in dict.fromkeys(key for config in configs for key in config)
        if key not in ("name", "output") and any(c.get(key) != configs[0].get(key) for c in configs)
    }
    parts = [f"<h2>{html.escape(name)}</h2>{_numbers(run)}" for name, run in runs.items()]
    parts += [_pictures(runs), "<h2>Options that differ</h2>"]
    parts += [_table(("", *names), ((key, *values) for key, values in others.items()))]
    return _put(folders[0].parent / "compare.html", " and ".join(names), parts)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1120px; padding: 0 1rem;
       color: #222; }}
h1 {{ font-size: 1.4rem; }} h2 {{ font-size: 1.1rem; margin-top: 2rem; }}
table {{ border-collapse: collapse; width: 100%; font-size: 13px; }}
th, td {{ text-align: left; vertical-align: top; padding: .3rem .6rem; white-space: pre-wrap;
         border-bottom: 1px solid #ddd; font-variant-numeric: tabular-nums; }}
.plots {{ display: grid; gap: .5rem;
         grid-template-columns: repeat(auto-fill, minmax(330px, 1fr)); }}
.plots svg {{ width: 100%; height: auto; }}
.numbers {{ display: flex; flex-wrap: wrap; gap: 1rem 2.5rem; }}
.numbers b {{ display: block; font-size: 1.5rem; }}
.warning {{ background: #fff4e0; border-left: 4px solid #e0902a; padding: .4rem .8rem;
           margin: .4rem 0; }}
</style></head><body><h1>{title}</h1>
{body}
</body></html>
"""


def _put(path: Path, title: str, parts: Iterable[str]) -> Path:
    """Writes a page, whatever is in its text: half of a surrogate pair, too."""
    page = _PAGE.format(title=html.escape(title), body="\n".join(parts))
    scratch = path.with_suffix(".tmp")
    scratch.write_text(page, encoding="utf-8", errors="replace")
    return scratch.replace(path)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts, none of which is taken for HTML."""

    def cells(tag: str, texts: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(x)}</{tag}>" for x in texts) + "</tr>"

    return f"<table>{cells('th', head)}{''.join(cells('td', row) for row in rows)}</table>"


def _numbers(run: Run) -> str:
    rows, evaluations = run.rows, run.evaluations
    if not rows:
        return "" if evaluations else "<p>No step yet.</p>"
    facts = {
        "steps": f"{rows[-1]['step']:,}",
        "reward, last 5 steps": f"{_smooth([r['reward'] for r in rows])[-1]:.3f}",
        "seconds per step": f"{sum(r['seconds'] for r in rows) / len(rows):.1f}",
        "peak memory": f"{max(r['peak_memory_gib'] for r in rows):.2f} GiB",
    }
    if evaluations:
        shares = dict.fromkeys(f"{e['accuracy']:.1%}" for e in (evaluations[0], evaluations[-1]))
        facts["held-out accuracy, before -> now"] = " &rarr; ".join(shares)
    cells = "".join(f"<div><b>{value}</b>{name}</div>" for name, value in facts.items())
    return f'<div class="numbers">{cells}</div>'


def _warnings(rows: Sequence[Row]) -> str:
    told = [(r["step"], text) for r in rows for text in r.get("warnings", [])]
    divs = "".join(
        f'<div class="warning">step {step}: {html.escape(text)}</div>' for step, text in told[-20:]
    )
    return f"<h2>Warnings</h2>{divs}" if divs else ""


def _evaluation(evaluations: Sequence[Row], answers: Sequence[Row]) -> str:
    """The last evaluation beside the first, by group, and some of its answers."""
    if not evaluations:
        return ""
    now = evaluations[-1]
    compared = [evaluations[0], now] if len(evaluations) > 1 else [now]
    rows = [("all", str(now["problems"]), *map(_interval, compared))]
    for column, values in now.get("by", {}).items():
        for value, part in values.items():
            parts = (e.get("by", {}).get(column, {}).get(value) for e in compared)
            rows.append((f"{column}: {value}", str(part["problems"]), *map(_interval, parts)))
    table = _table(("held out", "problems", *(f"step {e['step']}" for e in compared)), rows)
    if several := now.get("samples"):
        shares = {k: dict(zip(("accuracy", "low", "high"), v, strict=True))
                  for k, v in several.items()}  # fmt: skip
        table += "<p>Of several samples per problem:</p>"
        table += _table((), ((name, _interval(share)) for name, share in shares.items()))
    last = [a for a in answers if a["step"] == now["step"] and "sample" not in a]
    # Wrong ones say more.
    shown = sorted(last, key=lambda answer: bool(answer["correct"]))[:_ANSWERS]
    return (
        f"<h2>Held-out problems</h2>{table}<details><summary>{len(shown)} of {len(last)} answers, "
        "wrong ones first</summary>"
        + _table(
            ("prompt", "completion", "answer", ""),
            ((*_texts(a), "right" if a["correct"] else "wrong") for a in shown),
        )
        + "</details>"
    )


def _interval(one: Row | None) -> str:
    return "" if one is None else f"{one['accuracy']:.1%} ({one['low']:.1%} to {one['high']:.1%})"


def _samples(samples: Sequence[Row]) -> str:
    last = [s for s in samples if s["step"] == samples[-1]["step"]]
    if not last:
        return ""
    rows = ((*_texts(row), f"{row['reward']:.2f}", f"{row['advantage']:+.2f}") for row in last)
    head = ("prompt", "completion", "answer", "reward", "advantage")
    return f"<h2>Completions of step {last[0]['step']}</h2>{_table(head, rows)}"


def _texts(row: Row) -> tuple[str, str, str]:
    """Prompt, completion and answer, as they are shown."""
    cut = "" if row["ended"] else " [cut]"
    return _text_of(row["prompt"])[-600:], row["completion"] + cut, str(row["answer"])


def _pictures(runs: Mapping[str, Run]) -> str:
    """The curves of one run, or each metric with a line per run."""
    drawn: dict[str, dict[str, Points]] = {}
    for title, names in _CURVES.items():
        if len(runs) == 1:
            (run,) = runs.values()
            found = [known for name in names for known in run.names(name)]
            drawn[title] = {name.partition("/")[2] or name: run.curve(name) for name in found}
            continue
        shown = [name for name in names if not name.endswith("/")]
        for name in shown:
            lines = {label: run.curve(name) for label, run in runs.items()}
            # What is the same in every step, as a ratio of 1 is, says nothing.
            if len({point[1:] for points in lines.values() for point in points}) > 1:
                drawn[title if len(shown) == 1 else f"{title}: {name}"] = lines
    pictures = [
        _svg(title, {label: points for label, points in lines.items() if points})
        for title, lines in drawn.items() if any(lines.values())
    ]  # fmt: skip
    return f'<h2>Curves</h2><div class="plots">{"".join(pictures)}</div>' if pictures else ""


def _svg(title: str, lines: Mapping[str, Points]) -> str:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(4.4, 2.8), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    for label, points in lines.items():
        steps, values, *ends = zip(*points, strict=True)
        if ends:
            far = [[abs(a - b) for a, b in zip(end, values, strict=True)] for end in ends]
            axes.errorbar(steps, values, far, fmt="o-", markersize=3, capsize=3, label=label)
            axes.set_ylim(0, 1.02)
            continue
        smooth = "mean of" in title
        curve = _smooth(values) if smooth else values
        # A line of one point is not to be seen.
        (drawn,) = axes.plot(steps, curve, "o" if len(steps) == 1 else "-", label=label)
        if smooth:
            axes.plot(steps, values, ".", color=drawn.get_color(), alpha=0.3, markersize=3)
    if len(lines) > 1:
        axes.legend(fontsize=7)
    if "log scale" in title:
        axes.set_yscale("log")
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
    parser.add_argument(
        "folders", type=Path, nargs="+", metavar="FOLDER",
        help="of a run; several are drawn together, in compare.html beside the first",
    )  # fmt: skip
    folders = parser.parse_args(argv).folders
    for folder in folders:
        if not (folder / "config.json").exists():
            parser.error(f"folder: expected a run's folder, with config.json; got {folder}")
    print(write(folders[0]) if len(folders) == 1 else compare(folders))


if __name__ == "__main__":
    main()

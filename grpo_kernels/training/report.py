"""Views of a run: lines in the terminal, and `report.html`, a page that needs no network.

python -m grpo_kernels.training.report runs/NAME [runs/OTHER ...]
"""

from __future__ import annotations

import argparse
import html
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import logs
from .config import TrainingConfig

Row = Mapping[str, Any]
_SHOWN = 4
_SMOOTH = 5
_ANSWERS = 20


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


_PHASES = ("sync", "generate", "reward", "score", "train")


def sample_rows(samples: Any, group_size: int) -> list[dict[str, Any]]:
    """Rows of `samples.jsonl`: the best and the worst completion of the first groups."""
    shown = []
    for start in range(0, min(len(samples.texts), _SHOWN // 2 * group_size), group_size):
        group = range(start, start + group_size)
        by_advantage = sorted(group, key=lambda i: float(samples.advantages[i]))
        problem = samples.problems[samples.prompt_of[start]]
        for i in dict.fromkeys((by_advantage[-1], by_advantage[0])):
            shown.append({
                "prompt": problem["prompt"], "completion": samples.texts[i],
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


def write(folder: Path) -> Path:
    """Makes `report.html` from the logs in the folder, however many steps they have."""
    rows, evaluations = logs.read(folder / "metrics.jsonl"), logs.read(folder / "evaluations.jsonl")
    samples = logs.read(folder / "samples.jsonl")
    config = json.loads((folder / "config.json").read_text())
    parts = [_numbers(rows, evaluations), _warnings(rows)]
    if rows:
        parts.append(_pictures(rows, evaluations))
    answers = logs.read(folder / "answers.jsonl")
    parts += [_evaluation(evaluations, answers), _samples(samples), _options(config)]
    model = config["model"]
    model = Path(model).name if Path(model).is_absolute() else model
    title = html.escape(f"{config['name']}: {model} on {config['dataset']}")
    page = _PAGE.format(title=title, body="\n".join(parts))
    path = folder / "report.html"
    scratch = path.with_suffix(".tmp")
    _put(scratch, page)
    scratch.replace(path)
    return path


def _put(path: Path, page: str) -> None:
    """Writes a page, whatever is in its text: half of a surrogate pair, too."""
    path.write_text(page, encoding="utf-8", errors="replace")


def picture(folder: Path) -> Path:
    """`reward.png`: the reward of the samples and the accuracy on held-out problems."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows, evaluations = logs.read(folder / "metrics.jsonl"), logs.read(folder / "evaluations.jsonl")
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, label in (("reward", "reward"), ("accuracy", "accuracy while sampling")):
        known = [(r["step"], r[name]) for r in rows if _has(r, name)]
        if known:
            steps, values = zip(*known, strict=True)
            (drawn,) = axes.plot(steps, _smooth(values), label=f"{label}, mean of {_SMOOTH} steps")
            axes.plot(steps, values, ".", color=drawn.get_color(), alpha=0.4)
    if evaluations:
        points = [(e["step"], e["accuracy"], e["low"], e["high"]) for e in evaluations]
        x, y, low, high = zip(*points, strict=True)
        errors = [[b - a for a, b in zip(low, y, strict=True)],
                  [b - a for a, b in zip(y, high, strict=True)]]  # fmt: skip
        axes.errorbar(x, y, errors, fmt="o", capsize=3, label="held-out accuracy, 95 %")
    axes.set_xlabel("step")
    axes.set_ylim(bottom=0)
    axes.set_title(f"GRPO, {json.loads((folder / 'config.json').read_text())['dataset']}")
    axes.legend()
    axes.grid(alpha=0.3)
    path = folder / "reward.png"
    figure.savefig(path, dpi=120)
    return path


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1120px; padding: 0 1rem;
       color: #222; }}
h1 {{ font-size: 1.4rem; }} h2 {{ font-size: 1.1rem; margin-top: 2rem; }}
table {{ border-collapse: collapse; width: 100%; font-size: 13px; }}
th, td {{ text-align: left; vertical-align: top; padding: .3rem .6rem;
         border-bottom: 1px solid #ddd; }}
td.number {{ text-align: right; font-variant-numeric: tabular-nums; }}
pre {{ white-space: pre-wrap; margin: 0; font-size: 12px; max-height: 16rem; overflow: auto; }}
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


def _numbers(rows: Sequence[Row], evaluations: Sequence[Row]) -> str:
    if not rows:
        return "" if evaluations else "<p>No step yet.</p>"
    last = rows[-1]
    facts = {
        "steps": f"{last['step']:,}",
        "reward, last 5 steps": f"{_smooth([r['reward'] for r in rows])[-1]:.3f}",
        "seconds per step": f"{sum(r['seconds'] for r in rows) / len(rows):.1f}",
        "peak memory": f"{max(r['peak_memory_gib'] for r in rows):.2f} GiB",
    }
    if evaluations:
        e = evaluations[-1]
        before = f"{evaluations[0]['accuracy']:.1%}"
        if e is evaluations[0]:
            facts["held-out accuracy, before"] = before
        else:
            facts["held-out accuracy, before -> now"] = f"{before} &rarr; {e['accuracy']:.1%}"
    cells = "".join(f"<div><b>{value}</b>{name}</div>" for name, value in facts.items())
    return f'<div class="numbers">{cells}</div>'


def _warnings(rows: Sequence[Row]) -> str:
    told = [(r["step"], text) for r in rows for text in r.get("warnings", [])]
    if not told:
        return ""
    divs = "".join(
        f'<div class="warning">step {step}: {html.escape(text)}</div>' for step, text in told[-20:]
    )
    return f"<h2>Warnings</h2>{divs}"


def _evaluation(evaluations: Sequence[Row], answers: Sequence[Row]) -> str:
    """The last evaluation beside the first, by group, and some of its answers."""
    if not evaluations:
        return ""
    before, now = evaluations[0], evaluations[-1]
    rows = [("all", before, now)]
    for column, values in now.get("by", {}).items():
        known = before.get("by", {}).get(column, {})
        rows += [(f"{column}: {value}", known.get(value), new) for value, new in values.items()]
    compared = [before, now][now is before :]
    head = "".join(f"<th>step {one['step']}</th>" for one in compared)
    cells = "".join(
        f"<tr><td>{html.escape(name)}</td><td class='number'>{new['problems']}</td>"
        + "".join(
            f"<td class='number'>{_interval(one)}</td>" for one in [old, new][now is before :]
        )
        + "</tr>"
        for name, old, new in rows
    )
    table = f"<table><tr><th>held out</th><th>problems</th>{head}</tr>{cells}</table>"
    several = "".join(
        f"<tr><td>{html.escape(name)}</td><td class='number'>"
        f"{_interval(dict(zip(('accuracy', 'low', 'high'), value, strict=True)))}</td></tr>"
        for name, value in now.get("samples", {}).items()
    )
    if several:
        table += f"<p>Of several samples per problem:</p><table>{several}</table>"
    last = [a for a in answers if a["step"] == now["step"] and "sample" not in a]
    # Wrong ones say more.
    shown = sorted(last, key=lambda answer: bool(answer["correct"]))[:_ANSWERS]
    cells = "".join(
        f"<tr><td><pre>{html.escape(_text_of(a['prompt'])[-600:])}</pre></td>"
        f"<td><pre>{html.escape(a['completion'])}{'' if a['ended'] else ' <i>[cut]</i>'}</pre></td>"
        f"<td>{html.escape(str(a['answer']))}</td><td>{'right' if a['correct'] else 'wrong'}</td>"
        "</tr>"
        for a in shown
    )
    return (
        f"<h2>Held-out problems</h2>{table}<details><summary>{len(shown)} of {len(last)} answers, "
        "wrong ones first</summary><table><tr><th>prompt</th><th>completion</th><th>answer</th>"
        f"<th></th></tr>{cells}</table></details>"
    )


def _interval(one: Row | None) -> str:
    return "" if one is None else f"{one['accuracy']:.1%} ({one['low']:.1%} to {one['high']:.1%})"


def _samples(samples: Sequence[Row]) -> str:
    if not samples:
        return ""
    cells = []
    for row in [s for s in samples if s["step"] == samples[-1]["step"]]:
        cut = "" if row["ended"] else " <i>[cut]</i>"
        cells.append(
            f"<tr><td><pre>{html.escape(_text_of(row['prompt'])[-600:])}</pre></td>"
            f"<td><pre>{html.escape(row['completion'])}{cut}</pre></td>"
            f"<td>{html.escape(str(row['answer']))}</td><td class='number'>{row['reward']:.2f}</td>"
            f"<td class='number'>{row['advantage']:+.2f}</td></tr>"
        )
    return (
        f"<h2>Completions of step {samples[-1]['step']}</h2><table><tr><th>prompt</th>"
        f"<th>completion</th><th>answer</th><th>reward</th><th>advantage</th></tr>{''.join(cells)}"
        "</table>"
    )


def _options(config: Row) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(str(value))}</td></tr>"
        for name, value in config.items()
    )
    return f"<details><summary>Options</summary><table>{rows}</table></details>"


def _pictures(rows: Sequence[Row], evaluations: Sequence[Row]) -> str:
    x = [row["step"] for row in rows]

    def lines(*names: str, smooth: bool = False, log: bool = False) -> Callable[[Any], None]:
        def draw(axes: Any) -> None:
            for name in names:
                known = [(s, r[name]) for s, r in zip(x, rows, strict=True) if _has(r, name)]
                if not known:
                    continue
                steps, values = zip(*known, strict=True)
                label = name.removeprefix("reward/").removeprefix("accuracy/").replace("_", " ")
                line = "o" if len(steps) == 1 else "-"  # a line of one point is not to be seen
                curve = _smooth(values) if smooth else values
                (drawn,) = axes.plot(steps, curve, line, markersize=4, label=label)
                if smooth:
                    axes.plot(steps, values, ".", color=drawn.get_color(), alpha=0.3, markersize=3)
            if len(names) > 1 and axes.lines:
                axes.legend(fontsize=7)
            if log and axes.lines:
                axes.set_yscale("log")

        return draw

    def accuracy(axes: Any) -> None:
        steps = [e["step"] for e in evaluations]
        values = [e["accuracy"] for e in evaluations]
        axes.plot(steps, values, "o-", label="all")
        low, high = [e["low"] for e in evaluations], [e["high"] for e in evaluations]
        axes.fill_between(steps, low, high, alpha=0.2)
        for value in evaluations[-1].get("by", {}).get("held_out", {}):
            known = [(e["step"], e["by"]["held_out"][value]["accuracy"]) for e in evaluations
                     if value in e.get("by", {}).get("held_out", {})]  # fmt: skip
            axes.plot(*zip(*known, strict=True), "--", label=value)
        if len(axes.lines) > 1:
            axes.legend(fontsize=7)
        axes.set_ylim(0, 1.02)

    def split(axes: Any) -> None:
        parts = [p for p in _PHASES if any(_has(r, f"seconds/{p}") for r in rows)]
        ends, at = (x, rows) if len(x) > 1 else ([x[0] - 0.5, x[0] + 0.5], [*rows, *rows])
        axes.stackplot(ends, [[r.get(f"seconds/{p}", 0) for r in at] for p in parts], labels=parts)
        axes.legend(fontsize=7, loc="lower left")
        axes.set_ylim(bottom=0)

    functions = [name for name in rows[-1] if name.startswith("reward/")]
    panels: dict[str, Callable[[Any], None]] = {
        "reward, mean of 5 steps": lines("reward", *functions, smooth=True)
    }
    if _has(rows[-1], "accuracy"):
        levels = {name for r in rows for name in r if name.startswith("accuracy/level_")}
        panels["accuracy while sampling, mean of 5 steps"] = lines(
            "accuracy", *sorted(levels, key=lambda name: float(name.split("_")[-1])), smooth=True
        )
    if evaluations:
        panels["held-out accuracy, 95 % interval"] = accuracy
    for title, names in (
        ("KL to the reference", ("kl",)), ("entropy, nats", ("entropy",)),
        ("completion length, tokens", ("completion_length",)),
        ("share of completions cut, of equal groups", ("truncated", "groups_equal")),
        ("share of tokens clipped", ("clip_low", "clip_high")),
        ("gradient norm", ("grad_norm",)), ("importance ratio", ("ratio_mean", "ratio_max")),
    ):  # fmt: skip
        if any(_has(r, name) for r in rows for name in names):
            panels[title] = lines(*names)
    if any(_has(r, "sampler_gap") for r in rows):
        panels["gap to the sampler's log-probs, nats"] = lines(
            "sampler_gap", "sampler_gap_max", log=True
        )
    panels["seconds per step"] = split
    panels["peak memory, GiB"] = lines("peak_memory_gib")
    pictures = "".join(_svg(title, draw) for title, draw in panels.items())
    return f'<h2>Curves</h2><div class="plots">{pictures}</div>'


def compare(folders: Sequence[Path]) -> Path:
    """Makes `compare.html`, beside the first folder: the curves of several runs together."""
    names = [folder.name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    steps = [logs.read(folder / "metrics.jsonl") for folder in folders]
    held_out = [logs.read(folder / "evaluations.jsonl") for folder in folders]
    configs = [json.loads((folder / "config.json").read_text()) for folder in folders]

    def lines(name: str, rows: Sequence[Sequence[Row]], band: bool = False) -> Any:
        def draw(axes: Any) -> None:
            for label, own in zip(names, rows, strict=True):
                known = [r for r in own if _has(r, name)]
                x, values = [r["step"] for r in known], [r[name] for r in known]
                smooth = _smooth(values) if name in ("reward", "accuracy") and not band else values
                if band:
                    edges = [[r[name] - r["low"] for r in known],
                             [r["high"] - r[name] for r in known]]  # fmt: skip
                    axes.errorbar(x, values, edges, fmt="o-", markersize=3, capsize=3, label=label)
                else:
                    axes.plot(x, smooth, "o" if len(x) == 1 else "-", label=label)
            if name == "accuracy":
                axes.set_ylim(0, 1.02)
            axes.legend(fontsize=7)

        return draw

    panels = {
        title: lines(name, rows, band)
        for title, name, rows, band in (
            ("reward, mean of 5 steps", "reward", steps, False),
            ("held-out accuracy, 95 % interval", "accuracy", held_out, True),
            ("accuracy while sampling, mean of 5 steps", "accuracy", steps, False),
            ("KL to the reference", "kl", steps, False),
            ("entropy, nats", "entropy", steps, False),
            ("completion length, tokens", "completion_length", steps, False),
            ("share of tokens clipped, below", "clip_low", steps, False),
            ("share of tokens clipped, above", "clip_high", steps, False),
            ("largest importance ratio", "ratio_max", steps, False),
            ("share of groups with equal rewards", "groups_equal", steps, False),
            ("gradient norm", "grad_norm", steps, False),
            ("seconds per step", "seconds", steps, False),
            ("peak memory, GiB", "peak_memory_gib", steps, False),
        )
        # What is the same in every step, as a ratio of 1 is, says nothing.
        if band or len({r[name] for own in rows for r in own if _has(r, name)}) > 1
    }
    pictures = "".join(_svg(title, draw) for title, draw in panels.items())
    parts = [
        "".join(
            f"<h2>{html.escape(name)}</h2>{_numbers(rows, evaluations)}"
            for name, rows, evaluations in zip(names, steps, held_out, strict=True)
        ),
        f'<h2>Curves</h2><div class="plots">{pictures}</div>',
        _differences(names, configs),
    ]
    title = html.escape(" and ".join(names))
    path = folders[0].parent / "compare.html"
    _put(path, _PAGE.format(title=title, body="\n".join(parts)))
    return path


def _differences(names: Sequence[str], configs: Sequence[Row]) -> str:
    """The options that are not the same in all runs."""
    options = [
        key for key in dict.fromkeys(key for config in configs for key in config)
        if key not in ("name", "output") and any(c.get(key) != configs[0].get(key) for c in configs)
    ]  # fmt: skip
    if not options:
        return "<p>All options are the same.</p>"
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    rows = "".join(
        f"<tr><td>{html.escape(key)}</td>"
        + "".join(f"<td>{html.escape(str(config.get(key, '')))}</td>" for config in configs)
        + "</tr>"
        for key in options
    )
    return f"<h2>Options that differ</h2><table><tr><th></th>{head}</tr>{rows}</table>"


def _svg(title: str, draw: Callable[[Any], None]) -> str:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(4.4, 2.8), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    draw(axes)
    axes.set_title(title, fontsize=9)
    axes.set_xlabel("step", fontsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(labelsize=7, which="both")
    axes.grid(alpha=0.3)
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def _has(row: Row, name: str) -> bool:
    return row.get(name) is not None


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

"""Does a model train alike on sampled gradients? The demo's task, several seeds per setting.

    python -m benchmarks.sampled_training [--tolerances 0 0.005 0.02] [--seeds 0 1 2] [--train-head]

A tolerance of 0 is the exact backward. Runs that are already there are not repeated, so that a long
comparison can be interrupted. Writes a picture with a band from the lowest to the highest seed, and
a table of the last steps and of the held-out problems.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.measure import header
from benchmarks.trainers import MODEL, additions
from grpo_kernels.training import Trainer, load_model, load_problems

LAST = 5
KEPT = ("reward", "accuracy", "entropy", "kl", "grad_norm")


def run(tolerance: float, seed: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The steps of one training run, from its file if it was finished before."""
    head = "-head" if args.train_head else ""
    name = f"sampled{head}-{tolerance:g}-{seed}"
    path = args.output / name / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if len(rows) < args.steps:
        options = ["--name", name, "--output", str(args.output), "--seed", str(seed)]
        options += ["--steps", str(args.steps), "--show_every", str(args.steps), "--resume"]
        options += ["--model", args.model, "--save_every", "10"]
        options += ["--eval_every", str(args.steps)]
        if tolerance:
            options += ["--backward", "sampled", "--tolerance", str(tolerance)]
        config = additions(options)
        if args.train_head:
            config = replace(config, trainable=f"{config.trainable}|embed_tokens|lm_head")
        Trainer(config, *load_model(config), *load_problems(config)).train()
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    evaluations = (path.parent / "evaluations.jsonl").read_text().splitlines()
    at = {e["step"]: e["accuracy"] for e in map(json.loads, evaluations)}
    rows = rows[: args.steps]
    rows[-1]["held_out_accuracy"] = at[args.steps]
    return rows


def smoothed(rows: list[dict[str, Any]], name: str) -> list[float]:
    values = [row[name] for row in rows]
    return [statistics.mean(values[max(0, i - LAST + 1) : i + 1]) for i in range(len(values))]


def table(runs: dict[float, list[list[dict[str, Any]]]]) -> str:
    lines = [
        "| backward | seeds | reward, last steps | accuracy, last steps | held-out accuracy "
        "| columns kept | noise |",
        "|---|---|---|---|---|---|---|",
    ]
    for tolerance, seeds in runs.items():
        ends = [[smoothed(rows, name)[-1] for rows in seeds] for name in ("reward", "accuracy")]
        ends.append([rows[-1]["held_out_accuracy"] for rows in seeds])
        told = [f"{statistics.mean(x):.3f} ({min(x):.3f} to {max(x):.3f})" for x in ends]
        sampled = [
            statistics.mean(row[name] for rows in seeds for row in rows)
            for name in ("columns_kept", "gradient_noise")
            if tolerance
        ]
        told += [f"{sampled[0]:.1%}", f"{sampled[1]:.1e}"] if sampled else ["all", "0"]
        lines.append(f"| {label(tolerance)} | {len(seeds)} | {' | '.join(told)} |")
    return "\n".join(lines)


def label(tolerance: float) -> str:
    return f"sampled, {tolerance:g}" if tolerance else "exact"


def plot(runs: dict[float, list[list[dict[str, Any]]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
    titles = {"reward": "reward", "accuracy": "accuracy while sampling"}
    for panel, (name, title) in zip(panels, titles.items(), strict=True):
        for color, (tolerance, seeds) in enumerate(runs.items()):
            curves = list(zip(*(smoothed(rows, name) for rows in seeds), strict=True))
            steps = range(1, len(curves) + 1)
            middle = [statistics.mean(x) for x in curves]
            panel.plot(steps, middle, color=f"C{color}", label=label(tolerance))
            low, high = [min(x) for x in curves], [max(x) for x in curves]
            panel.fill_between(steps, low, high, color=f"C{color}", alpha=0.15)
        panel.set(xlabel="step", title=f"{title}, mean of {LAST} steps", ylim=(0, 1.02))
        panel.grid(alpha=0.3)
    panels[0].legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sampled_training", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--tolerances", type=float, nargs="+", default=[0.0, 5e-3, 2e-2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--train-head", action="store_true")
    parser.add_argument("--output", type=Path, default=Path("runs"))
    args = parser.parse_args(argv)
    runs: dict[float, list[list[dict[str, Any]]]] = {t: [] for t in args.tolerances}
    # Seed by seed, so that what is there when it is stopped can be compared.
    for seed in args.seeds:
        for tolerance in args.tolerances:
            runs[tolerance].append(run(tolerance, seed, args))
        print(table(runs), flush=True)
        name = "sampled-training-head" if args.train_head else "sampled-training"
        plot(runs, args.output / f"{name}.png")
        curves = {label(t): [{k: [row[k] for row in rows] for k in KEPT} for rows in seeds]
                  for t, seeds in runs.items()}  # fmt: skip
        result = {**header("cpu"), "seeds": args.seeds, "runs": curves}
        (args.output / f"{name}.json").write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()

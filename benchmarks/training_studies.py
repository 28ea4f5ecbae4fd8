"""Does a model train alike under another option? The demo's task, several seeds per setting.

    python -m benchmarks.training_studies support [--seeds 0 1 2] [--steps 30]

`support` samples at top-p 0.8 and compares log-probs over the ids that this kept with those of the
whole softmax; it also notes the ratio of the policy that is trained to the one that samples, both
with the weights after the step. `accumulation`, `updates`, `spikes`, `processes` and
`word_problems` (22 steps) show what LOG.md says of them. What comes after `--options` is
added to all settings.

Runs that are already there are not repeated, so that a long comparison can be interrupted. Writes a
picture with a band from the lowest to the highest seed, and a table of the last steps and of the
held-out problems.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.measure import header
from benchmarks.trainers import additions
from examples.demo_model import MODEL, resolved, upper_half
from grpo_kernels import batch_support
from grpo_kernels.training import (
    Samples,
    Trainer,
    TrainingConfig,
    load_model,
    load_problems,
    parse_config,
)
from grpo_kernels.training.rollout import GenerateRollout

LAST = 5
KEPT = ("reward", "accuracy", "entropy", "kl", "grad_norm", "loss")


def word_problems(argv: Sequence[str]) -> TrainingConfig:
    """The settings of examples/train_gsm8k.py, and options that override them."""
    config = parse_config(
        argv, model=MODEL, dataset="examples.word_problems:easy", stop=["</answer>"], steps=22,
        prompts_per_step=12, temperature=0.9, rewards=["answer"], epochs_per_rollout=2,
        learning_rate=5e-6, warmup_steps=2, max_completion_length=32, micro_batch_size=24,
        eval_size=200, save_model=False,
    )  # fmt: skip
    config = resolved(config)
    return replace(config, trainable=config.trainable or upper_half(config.model))


class Study(NamedTuple):
    """Settings by name, each with its options; columns of the table besides, with their format."""

    settings: dict[str, list[str]]
    columns: dict[str, tuple[str, str]]
    config: Callable[[Sequence[str]], TrainingConfig] = additions
    observes_ratios: bool = False
    curves: tuple[str, str] = ("reward", "accuracy")
    smooth: bool = True


_TOP_P = ["--top_p", "0.8"]
STUDIES = {
    "support": Study(
        {"replayed": _TOP_P, "whole softmax": [*_TOP_P, "--no_replay_support"]},
        {
            "ratio, mean": ("ratio_to_sampler", ".3f"),
            "outside 0.9 to 1.1": ("outside", ".1%"),
            "entries per token": ("entries", ".1f"),
        },
        observes_ratios=True,
    ),
    "accumulation": Study(
        {
            "1 x 8 completions": ["--prompts_per_step", "1", "--micro_batch_size", "8"],
            "8 x 1 completion": ["--prompts_per_step", "1", "--micro_batch_size", "1"],
        },
        {"loss": ("loss", ".6f"), "gradient's norm": ("grad_norm", ".5f")},
        curves=("reward", "grad_norm"), smooth=False,
    ),
    "updates": Study(
        {
            "1 update": [],
            "4 epochs": ["--epochs_per_rollout", "4"],
            "4 epochs, rate x 5": ["--epochs_per_rollout", "4", "--learning_rate", "1e-4"],
        },
        {"clipped": ("clip_ratio/region_mean", ".2%"), "largest ratio": ("ratio_max", ".2f")},
        curves=("accuracy", "clip_ratio/region_mean"),
    ),
    "spikes": Study(
        {
            "no bound": ["--beta", "0.04"],
            "kl_clamp 10": ["--beta", "0.04", "--kl_clamp", "10"],
            "a quarter of the rate": ["--beta", "0.04", "--learning_rate", "5e-6"],
        },
        {"loss": ("loss", ".3f"), "largest KL of a token": ("kl_max", ".3g")},
        curves=("kl_max", "reward"), smooth=False,
    ),
    "processes": Study(
        {"one process": [], "two processes": []},
        {"loss": ("loss", ".6f"), "gradient's norm": ("grad_norm", ".5f")},
        curves=("reward", "grad_norm"), smooth=False,
    ),
    "word_problems": Study(
        {
            "as the example": [],
            "6 problems x 16": ["--prompts_per_step", "6", "--num_generations", "16"],
        },
        {"equal groups": ("groups_equal", ".0%"), "entropy": ("entropy", ".2f"),
         "seconds per step": ("seconds", ".0f")},
        config=word_problems, curves=("accuracy", "entropy"),
    ),
}  # fmt: skip


class Recording(GenerateRollout):
    """Records the ids that sampling kept, whether they are trained on or not."""

    def __call__(self, prompts: Any, count: int, sampling: Any) -> Any:
        truncated = sampling.temperature > 0 and sampling.top_p < 1
        return super().__call__(prompts, count, replace(sampling, record_support=truncated))


class ByPrompt(GenerateRollout):
    """Draws with a seed per prompt and step, so that it does not matter which process samples."""

    calls = 0  # one run of these does not resume another

    def __call__(self, prompts: Any, count: int, sampling: Any) -> Any:
        self.calls += 1
        done = []
        for prompt in prompts:
            torch.manual_seed(zlib.crc32(repr((self.calls, prompt)).encode()))
            done += super().__call__([prompt], count, sampling)
        return done


@torch.no_grad()
def ratio_to_sampler(trainer: Trainer, samples: Samples) -> dict[str, float]:
    """The ratio of the policy that is trained to the one that samples, of the same weights."""
    config, everyone = trainer.config, range(len(samples.texts))
    batch, _ = samples.batch(list(everyone), trainer.tokenizer.pad_token_id)
    supports = [completion.support for completion in samples.completions]
    support = batch_support(supports, batch.mask.shape[1], batch.mask.device)
    kept, whole = (trainer.policy("logps", replace(batch, support=x))[0] for x in (support, None))
    trained = kept if config.replay_support else whole
    ratios = (trained - kept).exp()[batch.mask != 0]
    return {
        "ratio_to_sampler": float(ratios.mean()),
        "outside": float(((ratios < 0.9) | (ratios > 1.1)).float().mean()),
        "entries": float(samples.support_sizes.float().mean()),
    }


def run(study: str, setting: str, seed: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The steps of one training run, from its file if it was finished before."""
    name = f"{study}-{setting.replace(', ', '-').replace(' ', '-')}-{seed}"
    folder = args.output / name
    if len(_lines(folder / "metrics.jsonl")) < args.steps:
        options = ["--name", name, "--output", str(args.output), "--seed", str(seed)]
        options += ["--steps", str(args.steps), "--show_every", str(args.steps)]
        options += [] if study == "processes" else ["--resume"]
        options += ["--model", args.model, "--save_every", "10"]
        options += ["--eval_every", str(args.steps), *STUDIES[study].settings[setting]]
        config = STUDIES[study].config([*options, *args.options])
        if setting == "two processes" and "RANK" not in os.environ:
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
            again = ["--settings", setting, "--seeds", str(seed), "--steps", str(args.steps)]
            again += ["--model", args.model, "--output", str(args.output)]
            again += ["--options", *args.options]
            command = [sys.executable, *launch, "benchmarks.training_studies", study, *again]
            subprocess.run(command, check=True, env={**os.environ, "ACCELERATE_USE_CPU": "true"})
        else:
            _train(config, study)
            if "RANK" in os.environ:
                sys.exit()  # the process that launched this one goes on
    rows, more = (_lines(folder / f"{x}.jsonl")[: args.steps] for x in ("metrics", "ratios"))
    evaluations = {e["step"]: e for e in _lines(folder / "evaluations.jsonl")}
    rows = [row | (more[i] if more else {}) for i, row in enumerate(rows)]
    rows[-1]["evaluations"] = [evaluations[0], evaluations[args.steps]]
    return rows


def _train(config: Any, study: str) -> None:
    model, tokenizer = load_model(config)
    problems = load_problems(config)
    if not STUDIES[study].observes_ratios:
        by_prompt = (lambda policy: ByPrompt(policy, tokenizer)) if study == "processes" else None
        Trainer(config, model, tokenizer, *problems, rollout=by_prompt).train()
        return
    trainer = Trainer(
        config, model, tokenizer, *problems, rollout=lambda policy: Recording(policy, tokenizer)
    )
    ratios: list[dict[str, float]] = []

    def observe(_: Mapping[str, Any], samples: Samples) -> None:
        ratios.append(ratio_to_sampler(trainer, samples))
        path = config.folder / "ratios.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in ratios))

    trainer.train(observe)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def smoothed(rows: list[dict[str, Any]], name: str) -> list[float]:
    values = [row[name] for row in rows]
    return [statistics.mean(values[max(0, i - LAST + 1) : i + 1]) for i in range(len(values))]


Runs = Mapping[str, Sequence[list[dict[str, Any]]]]


def table(study: str, runs: Runs) -> str:
    columns = STUDIES[study].columns
    names = ["setting", "seeds", "reward, last steps", "accuracy, last steps"]
    names += ["held-out accuracy before", "after"]
    lines = [f"| {' | '.join([*names, *columns])} |", "|---" * (len(names) + len(columns)) + "|"]
    for setting, seeds in runs.items():
        ends = [[smoothed(rows, name)[-1] for rows in seeds] for name in ("reward", "accuracy")]
        for evaluation in (0, 1):
            ends.append([rows[-1]["evaluations"][evaluation]["accuracy"] for rows in seeds])
        told = [f"{statistics.mean(x):.3f} ({min(x):.3f} to {max(x):.3f})" for x in ends]
        for name, form in columns.values():
            values = [row[name] for rows in seeds for row in rows if name in row]
            told.append(format(statistics.mean(values), form) if values else "-")
        lines.append(f"| {setting} | {len(seeds)} | {' | '.join(told)} |")
    return "\n".join(lines)


def plot(study: str, runs: Runs, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    titles = {
        "reward": "reward", "accuracy": "accuracy while sampling", "loss": "loss",
        "kl_max": "largest KL of a token", "grad_norm": "norm of the gradient",
        "clip_ratio/region_mean": "share of tokens clipped", "entropy": "entropy per token, nats",
    }  # fmt: skip
    smooth = STUDIES[study].smooth
    for panel, name in zip(panels, STUDIES[study].curves, strict=True):
        title = f"{titles[name]}, mean of {LAST} steps" if smooth else titles[name]
        for color, (setting, seeds) in enumerate(runs.items()):
            drawn = [
                smoothed(rows, name) if smooth else [row[name] for row in rows] for rows in seeds
            ]
            curves = list(zip(*drawn, strict=True))
            steps = range(1, len(curves) + 1)
            middle = [statistics.mean(x) for x in curves]
            # The later ones are dashed: where they lie on an earlier one, both are seen.
            style = "-" if color == 0 else (0, (2, 1 + color))
            panel.plot(steps, middle, color=f"C{color}", label=setting, linestyle=style)
            low, high = [min(x) for x in curves], [max(x) for x in curves]
            panel.fill_between(steps, low, high, color=f"C{color}", alpha=0.15)
        panel.set(xlabel="step", title=title)
        if name in ("reward", "accuracy"):
            panel.set(ylim=(0, 1.02))
        panel.locator_params(axis="x", integer=True)
        panel.grid(alpha=0.3)
    panels[0].legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training_studies", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--settings", nargs="+", help="some of the study's; default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--output", type=Path, default=Path("runs"))
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="of the training")
    args = parser.parse_args(argv)
    settings = args.settings or list(STUDIES[args.study].settings)
    unknown = [name for name in settings if name not in STUDIES[args.study].settings]
    if unknown:
        parser.error(f"settings: expected some of {list(STUDIES[args.study].settings)}; {unknown}")
    runs: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in settings}
    # Seed by seed, so that what is there when it is stopped can be compared.
    for seed in args.seeds:
        for setting in settings:
            runs[setting].append(run(args.study, setting, seed, args))
        print(table(args.study, runs), flush=True)
        name = f"{args.study}-training"
        plot(args.study, runs, args.output / f"{name}.png")
        study = STUDIES[args.study]
        kept = (*KEPT, *study.curves, *(metric for metric, _ in study.columns.values()))
        curves = {
            setting: [
                {k: [row[k] for row in rows] for k in kept if k in rows[0]}
                | {"evaluations": rows[-1]["evaluations"]}
                for rows in seeds
            ]
            for setting, seeds in runs.items()
        }
        result = {**header("cpu"), "seeds": args.seeds, "runs": curves}
        (args.output / f"{name}.json").write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()

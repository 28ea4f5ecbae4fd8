"""Steps of the trainer by each of its samplers, in turns: tokens per second, and the whole step.

    python -m benchmarks.rollouts [--tasks additions gsm_symbolic] [--steps 3] [--rounds 2]

In an environment with vLLM (`make vllm`). The tasks are those of `benchmarks.trainers`, with which
the samplers share the model, the seeds and what is trained; every round starts each of them in a
fresh process and leaves out the first step. Tokens per second are of sampling alone, without the
weights that are sent (`sync`); `--trl` adds TRL's trainer with its own sampling.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import header, spread, write_json
from benchmarks.trainers import TASKS, config_of, in_a_process, ours, trl
from examples.demo_model import model_path

# Prompts longer than the longest of the task are left out of none of the runs.
_PROMPT = ["--max_prompt_length", "256"]
TASKS |= {
    "gsm_symbolic_512": [
        *TASKS["gsm_symbolic"], "--max_completion_length", "512", "--prompts_per_step", "2",
        "--num_generations", "4",
    ]
}  # fmt: skip
SAMPLERS: dict[str, list[str]] = {
    "generate": [],
    "vllm": ["--rollout", "vllm"],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rollouts", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--samplers", nargs="+", choices=SAMPLERS, default=list(SAMPLERS))
    parser.add_argument("--steps", type=int, default=3, help="of each sampler, in each round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--trl", action="store_true", help="TRL's trainer, too")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.steps < 2:
        parser.error("--steps: expected at least 2, as the first is not counted")
    model_path()  # made before anything is timed
    result: dict[str, Any] = {**header("cpu"), "tasks": {}}
    for task in args.tasks:
        result["tasks"][task] = measure(task, args)
        write_json(args.json, result)


def measure(task: str, args: argparse.Namespace) -> dict[str, Any]:
    """The steps of each sampler by name, printed as a table."""
    contenders: dict[str, Any] = {}
    for name in args.samplers:
        contenders[name] = partial(ours, options=[*_PROMPT, *SAMPLERS[name]])
    contenders |= {"TRL": trl} if args.trl else {}
    steps: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(task, args.steps, folder, _PROMPT)
        for _ in range(args.rounds):
            for name, contender in contenders.items():
                steps[name] += in_a_process(contender, task, args.steps)
    rows = config.prompts_per_step * config.num_generations
    print(
        f"{task}: {rows} completions of up to {config.max_completion_length} tokens, "
        f"{args.rounds} x {args.steps - 1} steps; median [p20, p80], and its ratio to the first one"
    )
    first: dict[str, float] = {}
    for name, own in steps.items():
        length = statistics.mean(step["tokens"] for step in own)
        parts = [f"{name:20} {length:6.1f} tokens"]
        seconds = [step["seconds"] for step in own]
        parts.append(_figures("step", seconds, "s", first, faster=False))
        if "generate" in own[0]:
            speeds = [rows * step["tokens"] / step["generate"] for step in own]
            parts.append(_figures("sampling", speeds, "tokens/s", first, faster=True))
            parts.append(f"sync {statistics.median(step['sync'] for step in own):.2f} s")
        print("  ".join(parts), flush=True)
    told = {k: v for k, v in asdict(config).items() if k not in ("model", "output")}
    return {"config": told, "steps": steps}


def _figures(
    name: str, values: list[float], unit: str, first: dict[str, float], *, faster: bool
) -> str:
    median, low, high = spread(values)
    base = first.setdefault(name, median)
    ratio = median / base if faster else base / median
    return f"{name} {median:6.1f} [{low:.1f}, {high:.1f}] {unit} {ratio:5.2f} x"


if __name__ == "__main__":
    main()

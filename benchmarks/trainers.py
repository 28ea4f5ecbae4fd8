"""Steps of this library's trainer and of TRL's, in turns; both compute the same.

    python -m benchmarks.trainers [--steps 4] [--rounds 2] [OPTIONS OF THE TRAINER]
    python -m benchmarks.trainers --dataset examples.problems:gsm_symbolic --rewards answer format
        --beta 0 --max_completion_length 128 --micro_batch_size 8 --learning_rate 1e-5

By default on the demo's additions. Same model, problems, rewards, completions per prompt, sampling,
trained weights, optimizer, precision (float32), reference model. Each round starts both in fresh
processes and leaves out the first step. A step is timed from the end of the one before to its own
end.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.measure import alone, new_result, parser_of, spread, write_json
from examples.demo_model import MODEL, load_model, model_path, resolved
from grpo_kernels.training import Trainer, TrainingConfig, load_problems, parse_config


def config_of(options: Sequence[str], steps: int, output: str) -> TrainingConfig:
    """The demo's settings, and options that override them."""
    common = ["--steps", str(steps), "--output", output]
    config = parse_config(
        [*options, *common], model=MODEL, dataset="examples.problems:additions",
        rewards=["examples.problems:addition"], prompts_per_step=4, num_generations=8,
        max_completion_length=16, eval_size=0, micro_batch_size=32, learning_rate=2e-5, beta=0.01,
        save_model=False, save_every=-1,
    )  # fmt: skip
    return resolved(config)


def ours(options: Sequence[str], steps: int) -> list[dict[str, float]]:
    rows: list[dict[str, float]] = []
    last = time.perf_counter()

    def on_step(row: dict[str, Any], _: Any) -> None:
        nonlocal last
        now = time.perf_counter()
        parts = ("generate", "sync", "score", "train")
        rows.append({
            "seconds": now - last, "tokens": row["completion_length"], "loss": row["loss"],
            "grad_norm": row["grad_norm"], **{p: row.get(f"seconds/{p}", 0.0) for p in parts},
        })  # fmt: skip
        last = now

    with tempfile.TemporaryDirectory() as output:
        config = config_of(options, steps, output)
        Trainer(config, *load_model(config), *load_problems(config)).train(on_step)
    return rows[1:]


def trl(options: Sequence[str], steps: int) -> list[dict[str, float]]:
    import datasets
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from grpo_kernels.training.problems.rewards import resolve_rewards
    from grpo_kernels.training.run.schedule import index_at_turn

    rows: list[dict[str, float]] = []

    class Timed(TrainerCallback):
        def __init__(self) -> None:
            self.last = time.perf_counter()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "completions/mean_length" in logs:
                now = time.perf_counter()
                rows.append({
                    "seconds": now - self.last, "tokens": logs["completions/mean_length"],
                    "loss": logs["loss"], "grad_norm": logs["grad_norm"],
                })  # fmt: skip
                self.last = now

    with tempfile.TemporaryDirectory() as output:
        config = config_of(options, steps, output)
        model, tokenizer = load_model(config)
        problems, _ = load_problems(config)
        num_prompts = config.prompts_per_step * steps
        order = [index_at_turn(turn, len(problems), config.seed) for turn in range(num_prompts)]
        columns = [{k: problems[i][k] for k in ("prompt", "answer")} for i in order]

        def reward(name: str) -> Any:
            function = resolve_rewards([name])[0].function

            def by_trl(prompts: Any, completions: Any, answer: Any, **_: Any) -> Any:
                return function(prompts, completions, answer=answer)

            by_trl.__name__ = name
            return by_trl

        batch = config.prompts_per_step * config.num_generations
        micro = config.micro_batch_size
        arguments = GRPOConfig(
            output_dir=output, max_steps=steps, use_cpu=True, bf16=False, report_to="none",
            gradient_checkpointing=False, per_device_train_batch_size=micro,
            gradient_accumulation_steps=batch // micro, num_generations=config.num_generations,
            max_completion_length=config.max_completion_length, beta=config.beta,
            loss_type=config.loss_type, learning_rate=config.learning_rate, logging_steps=1,
            save_strategy="no", lr_scheduler_type="constant", seed=config.seed,
            shuffle_dataset=False, temperature=config.temperature, disable_tqdm=True,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=model, args=arguments, processing_class=tokenizer,
            reward_funcs=[reward(name) for name in config.rewards],
            train_dataset=datasets.Dataset.from_list(columns), callbacks=[Timed()],
        )  # fmt: skip
        trainer.train()
    return rows[1:]


def main() -> None:
    parser = parser_of("benchmarks.trainers", __doc__, rounds=2)
    parser.add_argument(
        "--steps",
        type=int,
        default=4,
        help="of each trainer, in each round; the first is not counted",
    )
    args, options = parser.parse_known_args()
    result = new_result("cpu")
    model_path()  # made before anything is timed
    with tempfile.TemporaryDirectory() as output:
        config = config_of(options, args.steps, output)
    contenders: dict[str, tuple[Any, list[str]]] = {"ours": (ours, options), "TRL": (trl, options)}
    if not config.beta:
        # With a KL every completion has a gradient.
        contenders["ours, none skipped"] = ours, [*options, "--no_skip_untrained"]
    steps: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for _ in range(args.rounds):
        for name, (trainer, its_options) in contenders.items():
            steps[name] += alone(trainer, its_options, args.steps)
    theirs = statistics.median(step["seconds"] for step in steps["TRL"])
    print("seconds per step [p20, p80], tokens per completion, TRL's time / its own")
    for name, rows in steps.items():
        length = statistics.mean(row["tokens"] for row in rows)
        median, low, high = spread([row["seconds"] for row in rows])
        figures = f"{median:6.1f} [{low:.1f}, {high:.1f}] {length:6.1f} {theirs / median:6.2f}"
        print(f"{name:20} {figures}", flush=True)
    known = {k: v for k, v in asdict(config).items() if k not in ("model", "output")}
    write_json(args.json, result | {"config": known, "steps": steps})


if __name__ == "__main__":
    main()

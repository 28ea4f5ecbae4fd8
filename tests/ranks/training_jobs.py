"""A job of the ranks: one run of the trainer, and its weights."""

import os
import signal
from pathlib import Path

import torch

from grpo_kernels.training import Metric, Trainer, evaluate, load_model, load_problems, logs
from grpo_kernels.training.answers import is_correct
from tests.helpers.trainer_runs import config_of, no_curves, noise, support_around


def train(model: str, output: str, options: dict) -> dict[str, torch.Tensor]:
    config = config_of(model, Path(output), **options)
    train, held_out = load_problems(config)
    trainer = Trainer(
        config, *load_model(config), train, held_out, rewards={"noise": noise},
        rollout=lambda _: SameForAnyRanks(),
    )  # fmt: skip
    add_lengths(trainer)
    several = torch.distributed.is_initialized()
    expected = ("MULTI_CPU", 2) if several else ("NO", 1)
    found = trainer.accelerator
    assert (found.distributed_type.value, found.num_processes) == expected
    with no_curves():
        trainer.train()
    return trainer.accelerator.get_state_dict(trainer.policy)


def add_lengths(trainer) -> None:
    """Adds metrics of user code, which wraps what samples."""
    rollout = trainer.rollout
    trainer.metrics.register(Metric("ids", merge="sum"), Metric("longest", merge="max"))

    def counted(*args):
        completions = rollout(*args)
        for name in ("ids", "longest"):
            trainer.metrics.add(name, [len(one.token_ids) for one in completions])
        return completions

    trainer.rollout = counted


def with_fault(fault: str, call: int, model: str, output: str, options: dict):
    """A run in which something happens to one rank; what each has met, and its weights.

    Memory runs out, or a signal comes, in the call of this number; a reward function, or
    `is_correct`, fails in its call of this number.
    """
    config = config_of(model, Path(output), **options)
    calls: list[int] = []

    def now():
        calls.append(1)
        return len(calls) == call and trainer.accelerator.process_index == 1

    def of_rank(prompts, completions, **_):
        if fault == "reward" and now():
            raise ConnectionError("the judge is gone")
        return noise(prompts, completions)

    def answered(text, answer):
        if fault == "is_correct" and now():
            raise ConnectionError("the judge is gone")
        return is_correct(text, answer)

    train, held_out = load_problems(config)
    trainer = Trainer(
        config, *load_model(config), train, held_out, rewards={"noise": of_rank},
        rollout=lambda _: SameForAnyRanks(), is_correct=answered,
    )  # fmt: skip
    add_lengths(trainer)
    policy = trainer.accelerator.unwrap_model(trainer.policy)
    backward = trainer.accelerator.backward

    def faulty(work, *faults):
        def done(*args, **kwargs):
            here = fault in faults and now()
            if here and fault == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
            elif here:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return work(*args, **kwargs)

        return done

    policy.loss = faulty(policy.loss, "memory", "signal")
    policy.logps = faulty(policy.logps, "scoring")
    trainer.accelerator.backward = faulty(backward, "backward")
    met = "nothing"
    try:
        with no_curves():
            trainer.train()
    except (SystemExit, RuntimeError) as error:
        met = f"{type(error).__name__}: {error}"
    return met, trainer.run.step, trainer.run.micro_batch_size, policy.state_dict()


class SameForAnyRanks:
    """Completions that depend on their prompt alone, so that any number of ranks sees the same."""

    def __call__(self, prompts, count, sampling):
        import random

        from grpo_kernels.training import Completion

        done = []
        for prompt in prompts:
            draw = random.Random(str(prompt))
            for _ in range(count):
                length = draw.randrange(1, sampling.max_new_tokens + 1)
                ids = [draw.randrange(33, 90) for _ in range(length)]
                # Some from the whole vocabulary.
                says = sampling.record_support and draw.random() < 0.7
                support = support_around(ids, draw) if says else None
                done.append(Completion(ids, True, support=support))
        return done


def evaluated(model: str, output: str, dataset: str) -> list[str]:
    """The samples that an evaluation by the command has of both ranks."""
    flags = {"model": model, "output": f"{output}/t", "dataset": dataset, "num_generations": 4,
             "max_completion_length": 8}  # fmt: skip
    with no_curves():
        evaluate.main([f"--{name}={value}" for name, value in flags.items()])
    rows = logs.read(Path(output) / "t" / "answers.jsonl")
    return [row["completion"] for row in rows if "sample" in row]

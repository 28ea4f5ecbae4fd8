"""A job of the ranks: one run of the trainer, and its weights."""

import os
import signal
from pathlib import Path
from warnings import catch_warnings, simplefilter

import torch

from grpo_kernels.head.chunked_head import LogitStrips
from grpo_kernels.training import Trainer, load_model, load_problems
from grpo_kernels.training.answers import is_correct
from tests.helpers.trainer_runs import config_of, no_curves, noise, support_around


def train(kind: str, model: str, output: str, options: dict) -> dict[str, torch.Tensor]:
    if kind in ("fsdp2", "zero3"):
        # accelerate has these for GPUs alone, though they work with gloo as well.
        from accelerate import PartialState
        from accelerate.utils import DistributedType

        PartialState(cpu=True)
    if kind == "fsdp2":
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    config = config_of(model, Path(output), **options)
    train, held_out = load_problems(config)
    trainer = Trainer(
        config, *load_model(config), train, held_out, rewards={"noise": noise},
        rollout=lambda _: SameForAnyRanks(),
    )  # fmt: skip
    told = (trainer.accelerator.distributed_type.value, trainer.accelerator.num_processes)
    kinds = {"": "NO", "ddp": "MULTI_CPU", "fsdp2": "FSDP", "zero3": "DEEPSPEED"}
    assert told == (kinds[kind], 2 if kind else 1)
    if kind == "fsdp2":
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.tensor import DTensor

        for part in filter(None, (trainer.policy, trainer.reference and trainer.reference.copy)):
            # The whole, and each of the two layers.
            assert sum(isinstance(module, FSDPModule) for module in part.modules()) == 3
        assert trainer.accelerator.is_fsdp2
        assert all(isinstance(p, DTensor) for p in trainer.policy.parameters())
    with no_curves():
        trainer.train()
    return trainer.accelerator.get_state_dict(trainer.policy)


def train_with_little_memory(kind: str, model: str, output: str, options: dict):
    """As `train`, with memory for fewer rows of logits in the second process than it asks for.

    Also how often it asked for too many.
    """
    new_rows, refused = LogitStrips.new_rows, 0

    def limited(self, count, dtype):
        nonlocal refused
        if count > 16 and torch.distributed.get_rank() == 1:
            refused += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return new_rows(self, count, dtype)

    LogitStrips.new_rows = limited
    try:
        with catch_warnings():
            simplefilter("ignore")  # that says so
            return train(kind, model, output, options), refused
    finally:
        LogitStrips.new_rows = new_rows


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

"""Runs of one option each, beside a setting, and what they left."""

from dataclasses import replace

import datasets
import pytest
import torch
from transformers import modeling_utils

from grpo_kernels.training import load_model
from grpo_kernels.training.problems.rewards import as_text
from grpo_kernels.training.run import about
from grpo_kernels.training.run.interruptions import StepError
from tests.helpers import fake_vllm, plain_loop
from tests.helpers.tiny_models import make_model, make_tokenizer
from tests.helpers.trainer_runs import (
    SameForAnyRanks,
    config_of,
    rows_of,
    trainer_of,
)

# Two updates on a rollout, so that ratios are not 1 and a clipped gradient is another step.
BASE = {
    "steps": 1, "prompts_per_step": 4, "num_generations": 3, "epochs_per_rollout": 2,
    "max_completion_length": 5, "max_prompt_length": 60, "learning_rate": 3e-3, "save_every": -1,
    "micro_batch_size": 5, "dataset": "some/sums", "system_prompt": "Sum:", "explain_every": 0,
}  # fmt: skip
# `plain` and `turns` have a stand-in for a sampler; in `turns` it puts tokens of its own between.
SETTINGS = {
    "plain": {},
    "turns": {},
    # Some completions end early.
    "lora": {"lora_rank": 2, "learning_rate": 1e-2, "stop": [chr(i) for i in range(33, 80)]},
    "vllm": {"rollout": "vllm", "seed": 2},  # with no two equal rewards, which train nothing
}
SPLITS = {
    name: [{"question": f"{i} + {7 * i % 5} =", "answer": str(i)} for i in numbers]
    for name, numbers in (("train", range(20)), ("test", range(20, 24)))
}


class Scripted(SameForAnyRanks):
    """Completions that depend on their prompts alone; the second of each prompt is cut.

    With `turns` every third token is not the policy's, which is to predict it, and the sampler
    reports log-probs.
    """

    def __init__(self, turns):
        self.turns = turns

    def __call__(self, prompts, count, sampling):
        done = super().__call__(prompts, count, sampling)
        done = [replace(c, ended=i % count != 1) for i, c in enumerate(done)]
        return [with_turns(c) for c in done] if self.turns else done


def with_turns(one):
    own = [t % 3 < 2 for t in range(len(one.token_ids))]
    return replace(
        one, sampled=own, logps=[-5.0 - 0.2 * (i % 5) for i in one.token_ids],
        ce_weights=[0.0 if x else 0.5 for x in own],
    )  # fmt: skip


def save_models(factory):
    """Saves the model of the runs and another one; returns their folders.

    Dropout of the first would be in every number, if it were not turned off.
    """
    folders = factory.mktemp("model"), factory.mktemp("other")
    for folder, options in zip(
        folders, ({"attention_dropout": 0.5}, {"intermediate_size": 32}), strict=True
    ):
        make_model("llama", **options).save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)
    return folders


class Watched:
    """A rollout that keeps what it was asked for: the number of completions, and the sampling."""

    def __init__(self):
        self.asked = []

    def around(self, rollout):
        self.rollout = rollout
        return self

    def __getattr__(self, name):
        return getattr(self.rollout, name)

    def __call__(self, prompts, count, sampling):
        self.asked.append((count, sampling))
        return self.rollout(prompts, count, sampling)


class Run:
    """A run of the options: its trainer, rows and weights, and what each step had."""

    def __init__(self, model, folder, options, setting="plain"):
        rewards = {
            name: lambda prompts, completions, f=f, **_: [f(as_text(x)) for x in completions]
            for name, f in plain_loop.REWARDS.items()
        }
        with pytest.MonkeyPatch.context() as patch:
            fake_vllm.install(patch)
            options = {"model": str(model), **BASE, **options}
            config = config_of(options.pop("model"), folder, **options)
            scripted = {"plain": Scripted(turns=False), "turns": Scripted(turns=True)}.get(setting)
            own = None if scripted is None else lambda policy: scripted
            self.loaded, self.steps, self.watched, self.layers = [], [], Watched(), []
            layer = modeling_utils.checkpoint
            patch.setattr(
                modeling_utils,
                "checkpoint",
                lambda *a, **k: self.layers.append(1) or layer(*a, **k),
            )
            patch.setattr(datasets, "load_dataset", self.load_dataset)
            patch.setattr(about, "versions", dict)  # takes long
            # A run that goes on is one after the first step.
            for steps in (1, config.steps) if config.resume else (config.steps,):
                model, tokenizer = load_model(replace(config, chat=False))
                tokenizer.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}:"
                self.trainer = trainer_of(
                    replace(config, steps=steps), model, tokenizer, rewards=rewards, rollout=own
                )
                self.trainer.rollout = self.watched.around(self.trainer.rollout)
                self.folder = self.trainer.train(
                    lambda _, samples: self.steps.append((samples.prompts, samples.completions))
                )
        self.rows = rows_of(self.folder) if self.trainer.accelerator.is_main_process else []
        self.weights = {
            name.removeprefix("module.").removeprefix("model."): p.detach().float()
            for name, p in self.trainer.policy.named_parameters()
        }
        self.options = {x: getattr(config, x) for x in config.__dataclass_fields__}
        self.options |= options

    def load_dataset(self, name, part):
        self.loaded.append((name, part))
        return SPLITS


def compare(weights, rows, options, steps, world=1, tolerance=1e-3):
    """Compares weights and numbers of a run with those of the plain loop."""
    start, expected, numbers = plain_loop.plain_loop(options, steps, world)
    assert weights.keys() == expected.keys()
    # The whole way that the weights went: AdamW steps as far for a gradient that is rounding.
    far = {n: (expected[n] - start[n]).norm() for n in expected}
    way = torch.stack([*far.values()]).norm()
    error = torch.stack([(weights[n] - expected[n]).norm() for n in expected]).norm()
    assert way > 0 and error <= tolerance * way, f"weights: {float(error / way):.2g} of their way"
    for mine, theirs in zip(rows, numbers, strict=True):
        for name, value in theirs.items():
            close = max(1e-4, tolerance / 100)
            assert mine[name] == pytest.approx(value, rel=tolerance, abs=close), name


def of_rank(model, folder, cases):
    """A run for each case in this process: an error's text, or what `compare` wants."""
    done = {}
    for number, (name, options) in enumerate(cases.items()):
        try:
            run = Run(model, f"{folder}/{number}", options)
        except (ValueError, StepError) as error:
            done[name] = str(error)
        else:
            done[name] = run.weights, run.rows, run.options, run.steps
    return done

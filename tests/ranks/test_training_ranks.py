"""Two processes of DDP against one: the same losses, the same weights."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from grpo_kernels.explain.records import read_rows
from grpo_kernels.training import Metric, evaluate
from grpo_kernels.training.problems.answers import is_correct
from grpo_kernels.training.problems.held_out import write_problems
from grpo_kernels.training.run import checkpoint, logs
from tests.helpers.ranks import JOB_S, ROOT
from tests.helpers.tiny_models import COMMON, make_tokenizer
from tests.helpers.trainer_runs import (
    assert_same_rows,
    assert_same_weights,
    config_of,
    noise,
    rows_of,
    same_for_any_ranks,
    trainer_of,
)

pytestmark = pytest.mark.usefixtures("real_memory")
ON_CPUS = {"ACCELERATE_USE_CPU": "true"}
SMALL = {"steps": 3, "learning_rate": 1e-3}
CLOSE = {"rtol": 1e-4, "atol": 2e-5}


def trained(model, output, options, fault="", call=0):
    """A run in which something may happen to the second rank: what each has met, and its weights.

    Memory runs out, or a signal comes, in the call of this number; a reward function, `is_correct`,
    `on_step`, the rollout or a loss fails in its call of this number. Every run has metrics of user
    code.
    """
    calls = []
    if fault == "loss":
        options = options | {"loss_type": lambda tokens: of_loss(tokens)}

    def due(kind):
        if fault == kind:
            calls.append(kind)
        return len(calls) == call and fault == kind and trainer.accelerator.process_index == 1

    def of_rank(prompts, completions, **_):
        if due("reward"):
            raise ConnectionError("the judge is gone")
        return noise(prompts, completions)

    def answered(text, answer):
        if due("is_correct"):
            raise ConnectionError("the judge is gone")
        return is_correct(text, answer)

    def of_loss(tokens):
        if due("loss"):
            raise ConnectionError("the judge is gone")
        return -tokens.advantages * tokens.logps

    def on_step(*_):
        if due("on_step"):
            sys.exit(0)

    def counted(*args):
        if due("rollout"):
            raise ConnectionError("the judge is gone")
        completions = rollout(*args)
        for name in ("ids", "longest"):
            trainer.metrics.add(name, [len(one.token_ids) for one in completions])
        return completions

    def faulty(work, *kinds):
        def done(*args, **kwargs):
            if "signal" in kinds and due("signal"):
                os.kill(os.getpid(), signal.SIGTERM)
            if due(kinds[0]):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return work(*args, **kwargs)

        return done

    trainer = trainer_of(
        config_of(**{"model": model, "tmp_path": output, **options}), rollout=same_for_any_ranks,
        rewards={"noise": of_rank}, is_correct=answered,
    )  # fmt: skip
    trainer.metrics.register(Metric("ids", merge="sum"), Metric("longest", merge="max"))
    trainer.rollout, rollout = counted, trainer.rollout
    accelerator = trainer.accelerator
    expected = ("MULTI_CPU", 2) if torch.distributed.is_initialized() else ("NO", 1)
    assert (accelerator.distributed_type.value, accelerator.num_processes) == expected
    policy = accelerator.unwrap_model(trainer.policy)
    policy.loss = faulty(policy.loss, "memory", "signal")
    policy.logps = faulty(policy.logps, "scoring")
    accelerator.backward = faulty(accelerator.backward, "backward")
    met = "nothing"
    try:
        trainer.train(on_step)
    except (SystemExit, RuntimeError) as error:
        met = f"{type(error).__name__}: {error}"
    return met, trainer.run.step, trainer.run.micro_batch_size, policy.state_dict()


@pytest.fixture(scope="module")
def alone(tiny_model, tmp_path_factory):
    """The rows and weights of a run of one process, which is made once for the same options."""

    @functools.cache
    def run(**options):
        folder = tmp_path_factory.mktemp("alone")
        *_, weights = trained(tiny_model, folder, options)
        return rows_of(folder / "t"), weights

    return run


ANSWER = "RewardError: is_correct: ConnectionError: the judge is gone"
JUDGE = "RewardError: reward function noise: ConnectionError: the judge is gone"
MEMORY = (
    "StepError: memory ran out with micro_batch_size=2: lower micro_batch_size, or set "
    "gradient_checkpointing, lora_rank or dtype bf16"
)
FAULTS = {
    # fault, call: what both ranks meet, the last step that is kept, and the size of micro-batches
    **{("memory", call): (MEMORY, (call - 1) // 4, 2) for call in (1, 6)},  # four in a step
    ("scoring", 2): (MEMORY, 0, 2),
    ("backward", 1): (MEMORY, 0, 2),
    ("signal", 2): ("Preempted: 75", 0, 2),
    # The calls are of an evaluation, the first step, an evaluation, ...
    ("reward", 3): (JUDGE, 1, 2),
    ("is_correct", 1): (ANSWER, 0, 2),
    ("rollout", 2): ("RolloutError: rollout: ConnectionError: the judge is gone", 1, 2),
    ("on_step", 2): ("StepError: on_step: SystemExit: 0", 2, 2),
}


@pytest.mark.parametrize(("fault", "call"), FAULTS)
def test_a_fault_of_one_rank(fault, call, ranks, alone, tiny_model, tmp_path):
    """Both end or go on alike, and nothing but the step is lost."""
    options = {
        **SMALL, "micro_batch_size": 2, "skip_untrained": False,
        "eval_every": int(fault == "reward"), "eval_size": 2 * (fault == "reward"),
        "minibatches": 1 + (fault == "scoring"),  # of which the second one has old log-probs
    }  # fmt: skip
    rows, expected = alone(**options)
    both = ranks(trained, tiny_model, tmp_path, options, fault, call, environment=ON_CPUS)
    assert [results[:3] for results in both] == [FAULTS[fault, call]] * 2
    again = options | {"resume": True}
    both = ranks(trained, tiny_model, tmp_path, again, environment=ON_CPUS)
    assert_same_rows(rows_of(tmp_path / "t"), rows)
    for *_, weights in both:
        assert_same_weights(weights, expected, **CLOSE)


def test_a_loss_that_fails_on_one_rank(ranks, tiny_model, tmp_path):
    """Both ranks end, with a checkpoint of the step before."""
    options = {**SMALL, "micro_batch_size": 2}
    both = ranks(trained, tiny_model, tmp_path, options, "loss", 10, environment=ON_CPUS)
    (first, *_), (second, *_) = both
    assert second.startswith("StepError: loss_type ") and "ConnectionError: the judge" in second
    assert first.startswith("StepError: ")
    assert [results[1] for results in both] == [1, 1]
    assert checkpoint.latest(tmp_path / "t").name == "step-000001.pt"


def test_weights_that_no_text_reaches(ranks, alone, tmp_path):
    """An image tower's, which DDP would wait for; their decay is that of one process, too: none."""
    text = {**COMMON, "head_dim": 16, "layer_types": ["full_attention"] * 2}
    image = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
             "num_attention_heads": 1, "image_size": 28, "patch_size": 14}  # fmt: skip
    torch.manual_seed(0)
    config = Gemma3Config(text_config=text, vision_config=image, mm_tokens_per_image=4)
    model = Gemma3ForConditionalGeneration(config)
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    options = {**SMALL, "micro_batch_size": 1, "weight_decay": 0.1, "epochs_per_rollout": 2}
    options["model"] = str(tmp_path / "model")
    rows, expected = alone(**options)
    (*_, weights), _ = ranks(trained, tmp_path, tmp_path, options, environment=ON_CPUS)
    assert_same_rows(rows_of(tmp_path / "t"), rows)
    assert_same_weights(weights, expected, **CLOSE)


def evaluated(folder, output):
    """The samples that an evaluation by the command has of both ranks."""
    evaluate.main([str(folder), f"--output={output}"])
    rows = read_rows(output / "answers.jsonl")
    return [row["completion"] for row in rows if "sample" in row]


def test_ranks_of_an_evaluation_draw_different_samples(ranks, tiny_model, tmp_path):
    """Two ranks answer one prompt, each of them once."""
    row, config = {"prompt": "1 + 1 = ", "answer": 2}, config_of(tiny_model, tmp_path)
    config.folder.mkdir()
    logs.write_json(config.folder / "config.json", config.as_json() | {"max_completion_length": 8})
    write_problems(config.folder, [], [row] * 2, is_correct, print)
    shutil.copytree(tiny_model, config.folder / "model")
    samples, _ = ranks(evaluated, config.folder, tmp_path / "new", environment=ON_CPUS)
    assert len(samples) == 8 and samples[:4] != samples[4:]


def test_the_tutorial_s_file_trains_and_goes_on(tiny_model, tmp_path):
    """Runs the tutorial's command on problems of GSM8K's form, by either launcher on two CPUs."""
    text = (ROOT / "docs/tutorials.md").read_text()
    options = text.split("```yaml\n")[1].split("```")[0]
    (tmp_path / "run.yaml").write_text(options.replace("dataset_config: main\n", ""))
    rows = ({"question": f"{n} + 3?", "answer": f"<<{n}+3={n + 3}>>\n#### {n + 3}"}
            for n in range(20))  # fmt: skip
    (tmp_path / "gsm8k.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {
        "model": tiny_model, "dataset": tmp_path / "gsm8k.jsonl", "output": tmp_path / "t",
        "sync_ref_every": 2, "prompts_per_step": 2, "num_generations": 2, "eval_size": 4,
        "max_completion_length": 5,
    }  # fmt: skip
    flags = [str(x) for name, value in options.items() for x in (f"--{name}", value)]
    launchers = (
        ("accelerate.commands.launch", "--config_file", "examples/configs/ddp.yaml"),
        ("torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
    )
    for steps, launcher in zip((2, 3), launchers, strict=True):
        done = subprocess.run(
            [sys.executable, "-m", *launcher, "examples/train_gsm8k.py", str(tmp_path / "run.yaml"),
             *flags, "--steps", str(steps), "--resume"],
            cwd=ROOT, env={**os.environ, **ON_CPUS}, capture_output=True,
            text=True, timeout=JOB_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
    assert " on 2 x cpu: " in done.stdout and "Going on after step 2" in done.stdout
    assert [row["step"] for row in rows_of(tmp_path / "t")] == [1, 2, 3]
    assert {"reward/correctness", "reward/format", "kl"} <= rows_of(tmp_path / "t")[0].keys()

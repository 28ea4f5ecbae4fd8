"""Two processes of DDP against one: the same losses, the same weights."""

import functools
import json
import os
import subprocess
import sys

import pytest
import torch

from tests.helpers.ranks import JOB_S, ROOT
from tests.helpers.trainer_runs import assert_same_rows, rows_of
from tests.ranks.training_jobs import train

pytestmark = pytest.mark.usefixtures("real_memory")


ON_CPUS = {"ACCELERATE_USE_CPU": "true"}


def assert_same_weights(actual, expected):
    for key, weight in actual.items():
        torch.testing.assert_close(weight, expected[key], rtol=1e-4, atol=2e-5)


@pytest.fixture(scope="module")
def alone(tiny_model, tmp_path_factory):
    """The rows and weights of a run of one process, which is made once for the same options."""

    @functools.cache
    def run(**options):
        folder = tmp_path_factory.mktemp("alone")
        weights = train(str(tiny_model), str(folder), options)
        return rows_of(folder / "t"), weights

    return run


OPTIONS = {
    "bnpo, replayed": {"loss_type": "bnpo", "top_k": 20},
    "dapo, a reference that follows": {
        "beta": 0.1, "epochs_per_rollout": 2, "minibatches": 2, "sync_ref_every": 1,
        "ref_mixup_alpha": 0.5,
    },
    "grpo, entropy": {"loss_type": "grpo", "entropy_coef": 0.05, "micro_batch_size": 3},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_two_processes_are_as_one(name, ranks, alone, tiny_model, tmp_path):
    options = {"steps": 3, "learning_rate": 1e-3, "eval_size": 3, **OPTIONS[name]}
    rows, expected = alone(**options)
    weights, _ = ranks(
        "tests.ranks.training_jobs:train", str(tiny_model), str(tmp_path), options,
        environment=ON_CPUS,
    )  # fmt: skip
    assert {"ids", "longest"} <= rows[0].keys()
    assert_same_rows(rows_of(tmp_path / "t"), rows)
    assert_same_weights(weights, expected)


ANSWER = "RewardError: is_correct: ConnectionError: the judge is gone"
JUDGE = "RewardError: reward function noise: ConnectionError: the judge is gone"
FAULTS = {
    # fault, call: what both ranks meet, the last step that is kept, and the size of micro-batches
    **{("memory", call): ("nothing", 3, 1) for call in (1, 4)},  # of the four of the first step
    ("scoring", 2): ("nothing", 3, 1),
    ("backward", 1): ("nothing", 3, 1),
    ("signal", 2): ("Preempted: 75", 0, 2),
    # The calls are of an evaluation, the first step, an evaluation, ...
    ("reward", 3): (JUDGE, 1, 2),
    ("reward", 4): (JUDGE, 1, 2),
    ("is_correct", 1): (ANSWER, 0, 2),
}


@pytest.mark.parametrize(("fault", "call"), FAULTS)
def test_a_fault_of_one_rank(fault, call, ranks, alone, tiny_model, tmp_path):
    """Both end or go on alike, and nothing but the step is lost."""
    options = {
        "steps": 3, "learning_rate": 1e-3, "micro_batch_size": 2, "skip_untrained": False,
        "eval_every": int(fault == "reward"), "eval_size": 2 * (fault == "reward"),
        "minibatches": 1 + (fault == "scoring"),  # of which the second one has old log-probs
    }  # fmt: skip
    rows, expected = alone(**options)
    given = (str(tiny_model), str(tmp_path))
    job = "tests.ranks.training_jobs:with_fault"
    both = ranks(job, fault, call, *given, options, environment=ON_CPUS)
    assert [found[:3] for found in both] == [FAULTS[fault, call]] * 2
    if fault in ("signal", "reward", "is_correct"):
        again = options | {"resume": True}
        both = ranks(job, "", 0, *given, again, environment=ON_CPUS)
    assert_same_rows(rows_of(tmp_path / "t"), rows)
    for *_, weights in both:
        assert_same_weights(weights, expected)


def test_ranks_of_an_evaluation_draw_different_samples(ranks, tiny_model, tmp_path):
    """Two ranks answer one prompt, each of them once."""
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([json.dumps({"prompt": "1 + 1 = ", "answer": 2})] * 2))
    job = "tests.ranks.training_jobs:evaluated"
    samples, _ = ranks(job, str(tiny_model), str(tmp_path), str(path), environment=ON_CPUS)
    assert len(samples) == 8 and samples[:4] != samples[4:]


def test_the_tutorial_s_file_trains_and_goes_on(tiny_model, tmp_path):
    """Runs the tutorial's command on problems of GSM8K's form, by either launcher on two CPUs."""
    text = (ROOT / "docs/tutorials.md").read_text()
    (tmp_path / "run.yaml").write_text(text.split("```yaml\n")[1].split("```")[0])
    rows = ({"question": f"{n} + 3?", "answer": f"<<{n}+3={n + 3}>>\n#### {n + 3}"}
            for n in range(20))  # fmt: skip
    (tmp_path / "gsm8k.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {
        "model": tiny_model, "dataset": tmp_path / "gsm8k.jsonl", "output": tmp_path / "t",
        "sync_ref_every": 2, "prompts_per_step": 2, "num_generations": 2, "eval_size": 4,
        "max_completion_length": 5,
    }  # fmt: skip
    given = [str(x) for name, value in options.items() for x in (f"--{name}", value)]
    launchers = (
        ("accelerate.commands.launch", "--config_file", "examples/configs/ddp.yaml"),
        ("torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
    )
    for steps, launcher in zip((2, 3), launchers, strict=True):
        done = subprocess.run(
            [sys.executable, "-m", *launcher, "examples/train_gsm8k.py", str(tmp_path / "run.yaml"),
             *given, "--steps", str(steps), "--resume"],
            cwd=ROOT, env={**os.environ, **ON_CPUS}, capture_output=True,
            text=True, timeout=JOB_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-4000:]
    assert " on 2 x cpu: " in done.stdout and "Going on after step 2" in done.stdout
    assert [row["step"] for row in rows_of(tmp_path / "t")] == [1, 2, 3]
    assert {"reward/correctness", "reward/format", "kl"} <= rows_of(tmp_path / "t")[0].keys()

"""Two processes around a fused head against one: DDP, FSDP2, and TRL's trainer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpo_kernels.integrations.transformers import Objective
from tests.ranks.head_ranks import WORLD, case, scored, wrapped_gradients
from tests.support.batches import relative_error

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("real_memory")


def rank_main(rank: int, kind: str, folder: str) -> None:
    wrapped_gradients(kind, rank, folder)


KINDS = (
    "ddp", "ddp, lora, checkpointed", "fsdp2", "fsdp2, checkpointed", "fsdp2, head apart",
    "fsdp2, lora", "fsdp2, lora, head apart", "fsdp2, mixed",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind, tmp_path):
    torch.multiprocessing.spawn(rank_main, args=(kind, str(tmp_path)), nprocs=WORLD)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(WORLD)]
    model, inputs, labels, given = case(kind)
    objective = Objective(**given, num_items=scored(labels))
    model(**inputs, labels=labels, fused_head=objective).loss.backward()
    assert scored(labels[:2]) != scored(labels[2:])
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert any("lm_head" in name for name in expected)
    for grads in ranks:
        assert grads.keys() == expected.keys()
        for name, gradient in expected.items():
            if gradient.norm() > 1e-6:
                tolerance = 0.2 if "mixed" in kind else 2e-5
                assert relative_error(grads[name], gradient) < tolerance, name


def run(ranks, model, output, **options):
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    output.mkdir()
    done = subprocess.run(
        [*command, "-m", "tests.ranks.head_ranks", model, str(output), json.dumps(options)],
        capture_output=True, text=True, timeout=300, cwd=ROOT,
        env={
            **os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(output / "run.pt")


@pytest.mark.parametrize(
    "options", ({"loss_type": "dapo", "num_iterations": 2}, {"loss_type": "grpo", "beta": 0.1})
)
def test_trl(options, tmp_path):
    from tests.support.trl_runs import folder_of

    model = folder_of("qwen2")
    log, weights = run(1, model, tmp_path / "one", per_device_train_batch_size=8, **options)
    both, of_both = run(2, model, tmp_path / "two", per_device_train_batch_size=4, **options)
    for row, wanted in zip(both[:-1], log[:-1], strict=True):
        for name in (
            "loss",
            "grad_norm",
            "entropy",
            "reward",
            *(["kl"] if "beta" in options else []),
        ):
            if name in wanted:
                assert row[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-5), name
    for name, weight in weights.items():
        torch.testing.assert_close(of_both[name], weight, rtol=1e-4, atol=1e-5, msg=name)

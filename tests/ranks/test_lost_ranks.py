"""One of three processes is gone: the others end, and say which."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import leave

ROOT = Path(__file__).parents[2]
WORLD, LOST, TIMEOUT_S = 3, 1, 30
FAULTS = {
    "killed": r"rank 1 of 3 \(.+, process {pid}\) has not answered for 5 seconds",
    "stopped": r"rank 1 of 3 \(.+, process {pid}\) has not answered for 5 seconds",
    "raises": r"rank 1 of 3 \(.+, process {pid}\) has ended: ZeroDivisionError: division by zero",
    "elsewhere": r"rank 1 of 3 \(.+, process {pid}\) is there, but did not come",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_others_name_the_one_that_is_gone(fault, tiny_model, tmp_path):
    command = [sys.executable, "-m", "tests.ranks.test_lost_ranks", fault, tiny_model, tmp_path]
    processes = [
        subprocess.Popen(
            [*map(str, command), str(rank)], cwd=ROOT, text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        )
        for rank in range(WORLD)
    ]  # fmt: skip
    try:
        survivors = [rank for rank in range(WORLD) if rank != LOST]
        printed = {rank: processes[rank].communicate(timeout=120)[1] for rank in survivors}
    finally:
        for process in processes:
            process.kill()
    for rank in survivors:
        assert processes[rank].returncode == 1, printed[rank][-3000:]
        said = re.findall(r"^grpo_kernels\S+RankError: (.*)", printed[rank], re.MULTILINE)
        assert len(said) == 1, printed[rank][-3000:]
        assert re.match(FAULTS[fault].format(pid=processes[LOST].pid), said[0]), said
        assert said[0].endswith(f"Rank {rank} waited for it, and ends; what was saved is whole: "
                                "go on with --resume")  # fmt: skip


def main(fault: str, model: str, output: str, rank: int) -> None:
    import signal
    import time
    from datetime import timedelta

    import torch.distributed as dist

    from grpo_kernels.training import Trainer, load_model, load_problems
    from tests.ranks.training_jobs import SameForAnyRanks
    from tests.support.trainer_runs import config_of, no_curves, noise

    def lost(row, samples):
        if rank != LOST or row["step"] != 2:
            return
        if fault == "raises":
            1 / 0  # noqa: B018
        elif fault == "elsewhere":
            time.sleep(10 * TIMEOUT_S)
        else:
            os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_WORLD_SIZE=str(WORLD),
        MASTER_ADDR="localhost", MASTER_PORT="1",
    )  # fmt: skip
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{output}/store", WORLD), rank=rank, world_size=WORLD,
        timeout=timedelta(seconds=TIMEOUT_S),
    )  # fmt: skip
    options = {"prompts_per_step": WORLD, "steps": 4, "eval_size": 0, "save_every": 1}
    config = config_of(model, Path(output), **options)
    train, held_out = load_problems(config)
    trainer = Trainer(
        config, *load_model(config), train, held_out, rewards={"noise": noise},
        rollout=lambda _: SameForAnyRanks(),
    )  # fmt: skip
    with no_curves():
        trainer.train(lost)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:4], int(sys.argv[4]))
    except BaseException:
        import traceback

        traceback.print_exc()
        leave(1)

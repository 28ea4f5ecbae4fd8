"""One of three processes is gone: the others end, and say which."""

import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest

from tests.helpers.ranks import leave

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).parents[2]
WORLD, TIMEOUT_S = 3, 30
SILENT = r"rank {lost} of 3 \(.+, process {pid}\) has not answered for 5 seconds"
# Rank 0 holds the store.
STORE = r"the store of the process group does not answer: .* rank 0 of 3 \(.+, process {pid}\)"
ENDED = r"rank {lost} of 3 \(.+, process {pid}\) has ended: ZeroDivisionError: division by zero"
FAILED = (
    r"a collective of rank {lost} of 3 \(.+, process {pid}\) has failed: DistBackendError: NCCL"
)
ELSEWHERE = (
    r"a collective of rank [02] .*rank {lost} of 3 \(.+, process {pid}\).* is there, and did"
)
FAULTS = {
    ("killed", 1): SILENT, ("killed", 0): f"{STORE}|{SILENT}", ("raises", 1): ENDED,
    ("raises", 0): ENDED, ("stopped", 0): STORE, ("elsewhere", 1): ELSEWHERE, ("fails", 1): FAILED,
}  # fmt: skip


@pytest.mark.parametrize(("fault", "lost"), FAULTS)
def test_the_others_name_the_one_that_is_gone(fault, lost, tiny_model, tmp_path):
    given = map(str, (fault, lost, tiny_model, tmp_path))
    command = [sys.executable, "-m", "tests.ranks.test_lost_ranks", *given]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    processes = [
        subprocess.Popen(
            [*command, str(rank)], cwd=ROOT, text=True, env=environment,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )
        for rank in range(WORLD)
    ]  # fmt: skip
    try:
        survivors = [rank for rank in range(WORLD) if rank != lost]
        printed = {rank: processes[rank].communicate(timeout=180)[1] for rank in survivors}
    finally:
        for process in processes:
            process.kill()
    expected = FAULTS[fault, lost].format(lost=lost, pid=processes[lost].pid)
    for rank in survivors:
        assert processes[rank].returncode == 1, printed[rank][-3000:]
        said = re.findall(r"^grpo_kernels\S+RankError: (.*)", printed[rank], re.MULTILINE)
        assert len(said) == 1, printed[rank][-3000:]
        assert re.match(expected, said[0]), said
        assert said[0].endswith(f"Rank {rank} waited, and ends; what was saved is whole: go on "
                                "with --resume")  # fmt: skip


def main(fault: str, lost: int, model: str, output: str, rank: int) -> None:
    import signal

    import torch.distributed as dist

    from grpo_kernels.training import Trainer, load_model, load_problems
    from tests.helpers.trainer_runs import config_of, no_curves, noise
    from tests.ranks.training_jobs import SameForAnyRanks

    def happens(row, samples):
        if rank != lost or row["step"] != 2:
            return
        time.sleep(2)  # some beats
        if fault == "raises":
            1 / 0  # noqa: B018
        elif fault == "fails":
            raise dist.DistBackendError("NCCL error: out of memory")
        elif fault == "elsewhere":
            time.sleep(10 * TIMEOUT_S)
        else:
            os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD), LOCAL_WORLD_SIZE=str(WORLD),
        MASTER_ADDR="localhost", MASTER_PORT="1",
    )  # fmt: skip
    timeout = timedelta(seconds=TIMEOUT_S)
    store = store_of(rank, Path(output) / "port", timeout)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=WORLD, timeout=timeout,
    )  # fmt: skip

    def run(steps, name, on_step):
        options = {"prompts_per_step": WORLD, "steps": steps, "eval_size": 0, "save_every": 1}
        config = config_of(model, Path(output), name=name, **options)
        train, held_out = load_problems(config)
        trainer = Trainer(
            config, *load_model(config), train, held_out, rewards={"noise": noise},
            rollout=lambda _: SameForAnyRanks(),
        )  # fmt: skip
        trainer.train(on_step)

    def fails(row, samples):
        raise ValueError("another run")

    with no_curves():
        # What earlier runs of these processes have met is none of this one's.
        run(1, "whole", None)
        with suppress(ValueError):
            run(1, "failed", fails)
        run(4, "t", happens)


def store_of(rank, file, timeout):
    """In rank 0, as without a launcher."""
    from torch.distributed import TCPStore

    if rank == 0:
        store = TCPStore("localhost", 0, WORLD, True, timeout, wait_for_workers=False)
        file.with_suffix(".tmp").write_text(str(store.port))
        file.with_suffix(".tmp").rename(file)
        return store
    while not file.exists():
        time.sleep(0.05)
    return TCPStore("localhost", int(file.read_text()), WORLD, False, timeout)


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:5], int(sys.argv[5]))
    except BaseException:
        import traceback

        traceback.print_exc()
        leave(1)

"""A run that is killed goes on as if it had not been."""

import signal
import sys

import pytest

from benchmarks import soak

pytestmark = pytest.mark.usefixtures("real_memory")


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_a_killed_run_goes_on_as_if_it_had_not_been(tiny_model, tmp_path):
    """Killed at moments that are drawn, half of them while a checkpoint gets its name."""
    faults = soak.faults_at(20, 2, ("kill", "rename"))
    options = soak.options_of(str(tiny_model), 20) | {
        "save_every": 1, "learning_rate": 1e-3, "beta": 0.05, "eval_every": 4,
        "schedule": "linear",
    }  # fmt: skip
    soak.soak(options | {"name": "whole"}, {}, tmp_path)
    codes = soak.soak(options | {"name": "killed"}, faults, tmp_path)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    met = soak.rows_of(killed / "faults.jsonl")
    assert len(met) == len(faults) == codes.count(-signal.SIGKILL) == 9
    assert soak.compare(whole, killed) == {"rows": True, "weights": True}
    for log in ("evaluations.jsonl", "answers.jsonl"):
        assert (killed / log).read_text() == (whole / log).read_text()

"""The experiment's GEMM that stores exponentials, as PTX; a GPU's day checks it on a CPU."""

import pytest
import torch
import triton

from benchmarks import exp_gemm
from benchmarks.exp_gemm import TILES, Tile
from grpo_kernels.kernels import TokenStats

# Sums that are out of reach are infinite.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.compiled
@pytest.mark.parametrize("tile", (Tile(32, 64, 32, warps=4), *TILES[8]), ids=str)
def test_the_tiles_of_a_gpu(tile):
    """Values by the PTX for an A100; nothing here runs what the tiles of newer GPUs take."""
    arch = triton.runtime.driver.active.get_current_target().arch
    if arch != 80:
        pytest.skip(f"tiles of sm_80, not of sm_{arch}")
    shape, dtype = (150, 403, 200), torch.bfloat16
    _, peaked, weight, targets = exp_gemm.operands(*shape, torch.device("cpu"), dtype)
    out = TokenStats.empty(peaked, entropy=True, total=True)
    exps = torch.empty(shape[:2], dtype=dtype)
    for x in (*out, exps):
        x.fill_(torch.nan)  # where nothing is written
    exp_gemm.exp_gemm(peaked, weight, targets, exps, out, tile=tile)
    # Some rows are out of their target's reach, and begin at another logit.
    assert (out.logps < -60).any() and (out.logps > -0.2).any()
    off = exp_gemm.errors(peaked, weight, targets, exps, out)
    assert all(x <= 5e-5 for name, x in off.items() if name in ("logps", "entropy")), off
    assert all(x <= exp_gemm.LARGEST for x in off.values()), off

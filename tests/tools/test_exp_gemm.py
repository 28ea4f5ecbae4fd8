"""The experiment's GEMM that stores exponentials: its kernels, and what is said of a wrong one."""

import pytest
import torch
import triton

from benchmarks import exp_gemm
from benchmarks.exp_gemm import SMALL, TILES, Tile
from grpo_kernels.kernels import TokenStats

# Sums that are out of reach are infinite.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
CPU = torch.device("cpu")
ON_SM_80 = Tile(32, 64, 32, warps=4), *TILES[8]


def stored(M, V, H, tile, dtype=torch.float32):
    """Operands, X and statistics; NaN where nothing was written."""
    _, peaked, weight, targets = exp_gemm.operands(M, V, H, CPU, dtype)
    out = TokenStats.empty(peaked, entropy=True, total=True)
    for x in out:
        x.fill_(torch.nan)
    exps = torch.full((M, V), torch.nan, dtype=dtype)
    exp_gemm.exp_gemm(peaked, weight, targets, exps, out, tile=tile)
    # Some rows are out of their target's reach, and begin at another logit.
    assert (out.logps < -60).any() and (out.logps > -0.2).any()
    assert (out.total.log() + out.logps).abs().max() > 60
    return peaked, weight, targets, exps, out


@pytest.mark.parametrize("tile", SMALL)
def test_values(tile):
    """Rows, columns and inner sizes that no tile divides, and more rows than a group has."""
    for M, V, H in ((37, 203, 40), (37, 64, 16), (16 * tile.rows + 5, 31, 33)):
        off = exp_gemm.errors(*stored(M, V, H, tile))
        assert all(x <= 5e-5 for x in off.values()), off


@pytest.mark.compiled
@pytest.mark.parametrize("tile", ON_SM_80, ids=str)
def test_the_tiles_of_a_gpu(tile):
    """Values by the PTX for an A100; nothing here runs what the tiles of newer GPUs take."""
    arch = triton.runtime.driver.active.get_current_target().arch
    if arch != 80:
        pytest.skip(f"tiles of sm_80, not of sm_{arch}")
    off = exp_gemm.errors(*stored(150, 403, 200, tile, torch.bfloat16))
    assert all(x <= 5e-5 for name, x in off.items() if name in ("logps", "entropy")), off
    assert all(x <= exp_gemm.LARGEST for x in off.values()), off

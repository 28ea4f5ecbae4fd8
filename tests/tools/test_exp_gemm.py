"""The experiment's GEMM that stores exponentials: its kernels, and what is said of a wrong one."""

import pytest
import torch
import triton

from benchmarks import exp_gemm, gpu_day
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
@pytest.mark.parametrize("V, H", [(203, 40), (64, 16), (31, 33)])
def test_values(V, H, tile):
    """Rows, columns and inner sizes that no tile divides, and more rows than a group has."""
    for M in (37, 16 * tile.rows + 5):
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


@pytest.mark.parametrize("name", ("logps", "logsumexp", "entropy", "total", "exps"))
@pytest.mark.parametrize("factor", (0.0, 1.02, float("nan")))
def test_what_is_wrong_is_seen(name, factor):
    *operands, exps, out = stored(37, 203, 40, SMALL[0])
    (exps if name == "exps" else getattr(out, name)).mul_(factor)
    assert not all(x <= exp_gemm.LARGEST for x in exp_gemm.errors(*operands, exps, out).values())


class Quack:
    """Torch computes what quack's GEMM is asked for, in parts of the columns."""

    def gemm(self, hidden, weight, exps, *, epi_args, tile_M, tile_N, **_):
        anchor, target = epi_args["anchor"][0], epi_args["target"]
        assert tile_M == tile_N == 128 and len(weight) % tile_N == 0
        logits = hidden @ weight.T
        shifted = (logits - anchor[:, None]) / torch.tensor(2.0).log()
        exps.copy_(shifted.exp2())
        epi_args["target_logit"].copy_(logits.gather(1, target[:, None])[:, 0])
        for name, values in (("total", shifted.exp2()), ("weighted", shifted.exp2() * shifted)):
            epi_args[name].copy_(values.unflatten(1, (-1, tile_N)).sum(2))


def test_values_by_quack(monkeypatch):
    """All but its GEMM: operands, the order of the sums, and rows out of reach."""
    monkeypatch.setattr(exp_gemm, "_quack_epilogue", Quack)
    _, peaked, weight, targets = exp_gemm.operands(37, 256, 40, CPU, torch.float32)
    out = TokenStats.empty(peaked, entropy=True, total=True)
    exps = torch.full((37, 256), torch.nan)
    exp_gemm.quack_gemm(peaked, weight, targets, exps, out)
    off = exp_gemm.errors(peaked, weight, targets, exps, out)
    assert all(x <= 5e-5 for x in off.values()), off


def test_only_what_is_right_is_timed(monkeypatch):
    right = exp_gemm.exp_gemm

    def off(*args, tile):
        right(*args, tile=tile)
        if tile == SMALL[0]:
            args[3][:, 150] *= 1.02

    monkeypatch.setattr(exp_gemm, "exp_gemm", off)
    rows = [*gpu_day.exp_gemm(gpu_day.Day("cpu"), 4096, 896)]
    names = ["mm to float32, sweep", *(f"exp_gemm, {tuple(x)}" for x in SMALL)]
    assert rows[0]["run"] == "quack_gemm" and rows[0]["status"].startswith("not run: ")
    statuses = [(row["run"], row["status"]) for row in rows[1:] if "status" in row]
    assert statuses == list(zip(names, ("right", "wrong", "right"), strict=True))
    assert [row["run"] for row in rows if "ms" in row] == ["mm", names[0], names[2]]

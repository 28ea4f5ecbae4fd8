"""Where a sampled backward pays: its bytes, FLOPs and launches beside those of the exact one.

Everything is counted in the FLOPs that a large GEMM does in the same time. Of a block of R rows, a
column costs the exact backward 4 R H. A kept one moves 22 bytes per element of its row of W (it is
gathered, multiplied twice, and added to dW), and its two GEMMs are small and slower.

The CPU's numbers follow from measurements (`docs/sampled_backward.md`). **Those of GPUs are
predicted**, and none has run: a call that is predicted to lose there takes the exact way.
"""

from __future__ import annotations

from typing import NamedTuple

# Per element of a kept row of W; per logit, of the sweeps and the gather that exact does not have;
# per element of W, once per call: its squares, and zeroing, centring, norm and scale of dW.
_BYTES_OF_KEPT, _BYTES_OF_LOGIT, _BYTES_OF_CALL = 22, 6, 26
_LAUNCHES_OF_CHUNK, _LAUNCHES_OF_BLOCK = 60, 20
_GPU_CHUNK_ROWS = 2048
# Columns that blocks of 256 rows keep at a tolerance of 5e-3, measured on realistic states at
# V = 151,936; fewer at a larger tolerance, more in a larger block.
_TYPICAL_SHARE, _SHARE_BY_TOLERANCE, _SHARE_BY_ROWS = 0.107, -0.9, 0.5


class Costs(NamedTuple):
    """Of a class of devices."""

    block_rows: int  # that share a sample of columns: more share its traffic, and need more columns
    per_byte: float  # moved in whole rows, scattered
    per_launch: float
    small_gemm: float  # speed of a block's GEMMs relative to a large one's


# A CPU's from where blocks break even, a third of the columns. A GPU's are an H200's: 780 TFLOP/s,
# 2.6 TB/s of gathers, 2.5 us per launch.
COSTS = {
    "cpu": Costs(block_rows=128, per_byte=21.0, per_launch=0.0, small_gemm=0.48),
    "gpu": Costs(block_rows=256, per_byte=300.0, per_launch=2e9, small_gemm=0.5),
}


def costs_of(device_type: str) -> Costs:
    """The costs on a device."""
    return COSTS["cpu" if device_type == "cpu" else "gpu"]


def dense_share(device_type: str) -> float:
    """The share of the columns from which on a block had better keep all."""
    costs = costs_of(device_type)
    exact = 4 * costs.block_rows
    return exact / (_BYTES_OF_KEPT * costs.per_byte + exact / costs.small_gemm)


def pays(device_type: str, N: int, V: int, H: int, tolerance: float) -> bool:
    """True if a call of N tokens had better be sampled; on a CPU the blocks tell.

    Taken as if all tokens counted, the weight were trained, and every GPU were an H200.
    """
    if device_type == "cpu":
        return True
    costs = costs_of(device_type)
    blocks, chunks = max(1.0, N / costs.block_rows), max(1.0, N / _GPU_CHUNK_ROWS)
    share = _TYPICAL_SHARE * (tolerance / 5e-3) ** _SHARE_BY_TOLERANCE
    share *= (costs.block_rows / 256) ** _SHARE_BY_ROWS
    exact = 4.0 * N * V * H
    of_kept = _BYTES_OF_KEPT * costs.per_byte + 4 * costs.block_rows / costs.small_gemm
    sampled = (
        blocks * share * V * H * of_kept
        + (_BYTES_OF_LOGIT * N * V + _BYTES_OF_CALL * V * H) * 0.6 * costs.per_byte
        + (chunks * _LAUNCHES_OF_CHUNK + blocks * _LAUNCHES_OF_BLOCK) * costs.per_launch
    )
    return sampled < exact

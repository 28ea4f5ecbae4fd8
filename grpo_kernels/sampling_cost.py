"""What a column costs that the sampled backward keeps, beside what it costs the exact one.

Everything is counted in the FLOPs that a large GEMM does in the same time. Of a block of R rows, a
column costs the exact backward 4 R H. A kept one moves 22 bytes per element of its row of W (it is
gathered, multiplied twice, and added to dW), and its two GEMMs are small and slower.

The CPU's numbers follow from measurements (`docs/sampled_backward.md`). **Those of GPUs are
predicted**, and none has run.
"""

from __future__ import annotations

from typing import NamedTuple

# Per element of a kept row of W.
_BYTES_OF_KEPT = 22


class Costs(NamedTuple):
    """Of a class of devices."""

    block_rows: int  # that share a sample of columns: more share its traffic, and need more columns
    per_byte: float  # moved in whole rows, scattered
    small_gemm: float  # speed of a block's GEMMs relative to a large one's


# A CPU's from where blocks break even, a third of the columns. A GPU's are an H200's: 780 TFLOP/s,
# 2.6 TB/s of gathers.
COSTS = {
    "cpu": Costs(block_rows=128, per_byte=21.0, small_gemm=0.48),
    "gpu": Costs(block_rows=256, per_byte=300.0, small_gemm=0.5),
}


def costs_of(device_type: str) -> Costs:
    """The costs on a device."""
    return COSTS["cpu" if device_type == "cpu" else "gpu"]


def dense_share(device_type: str) -> float:
    """The share of the columns from which on a block had better keep all."""
    costs = costs_of(device_type)
    exact = 4 * costs.block_rows
    return exact / (_BYTES_OF_KEPT * costs.per_byte + exact / costs.small_gemm)

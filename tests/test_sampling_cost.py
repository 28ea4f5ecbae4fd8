"""The share of the columns from which on a block keeps all."""

import pytest

from grpo_kernels import sampling_cost


def test_blocks_on_a_cpu_break_even_where_measured():
    assert sampling_cost.dense_share("cpu") == pytest.approx(1 / 3, rel=0.02)
    assert 0.05 < sampling_cost.dense_share("cuda") < 0.15

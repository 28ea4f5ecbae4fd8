"""`completion_mask` against completions cut by hand."""

import numpy as np
import pytest
import torch

from grpo_kernels import completion_mask
from tests.helpers.fake_cuda import CUDA, CountedCUDA

END, OTHER, PAD = 2, 5, 0
# Tokens, and how many of them count where END ends a completion, and where END or OTHER do.
ROWS = (
    ([7, 8, END, END, END], 3, 3),  # padded with the end token
    ([7, END, PAD, PAD, PAD], 2, 2),
    ([END, 7, 8, 9, 7], 1, 1),
    ([7, 8, 9, 7, 8], 5, 5),  # cut at its largest length
    ([7, OTHER, END, 9, END], 3, 2),
    ([PAD, PAD, 7, 8, END], 5, 5),  # a pad token in the middle is a token
)


@pytest.mark.parametrize(
    ("end_ids", "column"),
    (
        (END, 1),
        (torch.tensor(END), 1),
        (np.array([OTHER, END]), 2),
        (torch.tensor([END, OTHER], dtype=torch.int32), 2),
    ),
    ids=repr,
)
@pytest.mark.parametrize("dtype", (torch.int64, torch.int32))
def test_a_completion_counts_to_its_first_end(end_ids, column, dtype):
    mask = completion_mask(torch.tensor([row[0] for row in ROWS], dtype=dtype), end_ids)
    assert mask.dtype == torch.int64
    assert mask.tolist() == [[1] * row[column] + [0] * (5 - row[column]) for row in ROWS]


def test_completions_without_an_end_or_without_tokens():
    tokens = torch.tensor([[1, 2]])
    assert completion_mask(tokens, []).tolist() == [[1, 1]]
    assert completion_mask(tokens[:, :0], END).shape == (1, 0)
    assert completion_mask(tokens[:0], END).shape == (0, 2)


@pytest.mark.parametrize("ends", (END, [END, OTHER], torch.tensor([END, OTHER]), "on the GPU"))
def test_nothing_is_read_from_a_gpu_or_copied_there(ends):
    with CountedCUDA() as gpu:
        tokens = torch.zeros(4, 9, dtype=torch.int64, device=CUDA)
        ends = torch.zeros(2, dtype=torch.int64, device=CUDA) if isinstance(ends, str) else ends
        completion_mask(tokens, ends)
    assert not gpu.transfers

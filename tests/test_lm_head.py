"""The LM head's GEMMs: their dtype, and how much of the weight they take at a time."""

import torch

from grpo_kernels import lm_head
from grpo_kernels.head_call import head_call
from grpo_kernels.lm_head import LMHead


def head_of(hidden, weight):
    operands, call = head_call(
        hidden, weight, torch.zeros(len(hidden), dtype=torch.int64), None, bias=None,
        low_rank=None, temperature=1.0, logit_scale=1.0, softcap=None, cu_seqlens=None,
        backward="exact", tolerance=None, seed=None, backend="torch", chunk_bytes=None,
        capturable=False,
    )  # fmt: skip
    return LMHead(operands, call, len(hidden))


def all_logits(head):
    return head.logits(head.rows(slice(0, len(head.operands.hidden))))


def test_gemms_on_a_cpu_take_float32():
    half = torch.zeros(1, 1, dtype=torch.bfloat16)
    assert head_of(half, half).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert head_of(half.float(), half.float()).dtype == torch.float32


def test_a_bf16_weight_is_upcast_in_slices(monkeypatch):
    monkeypatch.setattr(lm_head, "_CPU_UPCAST_BYTES", 4 * 8 * 30)
    weight = torch.randn(100, 8).bfloat16()
    hidden = torch.randn(5, 8)
    head = head_of(hidden, weight)
    slices = [columns for columns, _ in head.weight_slices(100)]
    assert [(c.start, c.stop) for c in slices] == [(0, 30), (30, 60), (60, 90), (90, 100)]
    torch.testing.assert_close(all_logits(head), hidden @ weight.float().T)
    # Back again, every slice adds its share.
    d_logits = torch.randn(5, 100)
    torch.testing.assert_close(head.times_weight(d_logits), d_logits @ weight.float())


def test_a_cpu_makes_a_chunk_s_logits_a_part_of_the_vocabulary_at_a_time(monkeypatch):
    monkeypatch.setattr(lm_head, "_CPU_COLUMNS_PER_THREAD", 30)
    parts = []
    monkeypatch.setattr(
        lm_head, "mm", lambda a, b, out: parts.append(b.shape[1]) or torch.mm(a, b, out=out)
    )
    hidden, weight = torch.randn(5, 8), torch.randn(1000, 8)
    logits = all_logits(head_of(hidden, weight))
    assert max(parts) == 30 * torch.get_num_threads() and sum(parts) == 1000
    torch.testing.assert_close(logits, hidden @ weight.T)

"""A GPU's half-precision GEMMs, imitated on a CPU: operands rounded, products summed in float32."""

import torch

from grpo_kernels import head_call, head_gradients, lm_head, sampled_gradients


def _mm(a, b, *, out):
    # What is asked for in the operands' own dtype is rounded to it.
    assert a.dtype == b.dtype and a.dtype.itemsize == 2 and out.dtype in (torch.float32, a.dtype)
    out.copy_(a.float() @ b.float())


def _addmm(acc, a, b, *, beta=1.0):
    product = torch.empty_like(acc)
    _mm(a, b, out=product)
    acc.copy_(product if beta == 0 else acc * beta + product)


def imitate(monkeypatch, dtype):
    """Gives every head call GEMMs with operands of `dtype`, as CUDA has them."""
    monkeypatch.setattr(head_call, "_gemm_dtype", lambda *_: dtype)
    for module in (lm_head, head_gradients, sampled_gradients):
        monkeypatch.setattr(module, "mm", _mm)
        monkeypatch.setattr(module, "addmm", _addmm)

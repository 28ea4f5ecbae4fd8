"""A GPU's half-precision GEMMs, imitated on a CPU: operands rounded, products summed in float32."""

import torch

from grpo_kernels.head import call


def imitate(monkeypatch, dtype):
    """Gives every head call GEMMs with operands of `dtype`, as CUDA has them."""
    mm, addmm = torch.mm, torch.addmm

    def half_mm(a, b, *, out, out_dtype=None):
        if out_dtype is None and a.dtype.itemsize == 4:
            return mm(a, b, out=out)
        # An output in the operands' dtype is rounded to it.
        assert a.dtype == b.dtype and out.dtype in (torch.float32, a.dtype)
        return out.copy_(mm(a.float(), b.float()))

    def half_addmm(acc, a, b, *, beta, out, out_dtype=None):
        if out_dtype is None and a.dtype.itemsize == 4:
            return addmm(acc, a, b, beta=beta, out=out)
        assert acc is out and a.dtype == b.dtype and out.dtype in (torch.float32, a.dtype)
        return out.copy_(acc * beta + mm(a.float(), b.float()))

    monkeypatch.setattr(call, "_gemm_dtype", lambda *_: dtype)
    monkeypatch.setattr(torch, "mm", half_mm)
    monkeypatch.setattr(torch, "addmm", half_addmm)

"""Damages to the Triton kernels, for `mutants.py --kernels`: tests run from PTX must see them.

Each is seen by the emulator's checks or by a wrong result; Triton's interpreter does not see many.
Damages to the PTX itself are in `tests/ptx/test_damages.py`.
"""

from __future__ import annotations

from tests.tools.damages import Damage, damages_in

_ROW = "row = tl.program_id(0)"
_WIDE = "    row_ptr = logits_ptr + row * stride_logits_n\n    "

KERNEL_DAMAGES: list[Damage] = [
    *damages_in(
        "kernels/triton_logits.py", "test_backends",
        ("the logits are loaded without a mask",
         "u = tl.load(row_ptr + offs_v, mask=mask_v, other=0.0)", "u = tl.load(row_ptr + offs_v)"),
        ("exponentials are stored without a mask",
         "tl.store(exps_row_ptr + offs_v, kept, mask=mask_v)",
         "tl.store(exps_row_ptr + offs_v, kept)"),
        ("columns past the last one count as logits of 0",
         'shifted = tl.where(mask_v, shifted, float("-inf"))', "shifted = shifted + 0.0"),
        ("rows are claimed to begin where vectors do",
         f"{_WIDE}exps_row_ptr",
         _WIDE.replace("logits_ptr + row * stride_logits_n",
                       "tl.multiple_of(logits_ptr + row * stride_logits_n, 16)") + "exps_row_ptr"),
        ("an entry at -inf has the softcap's least logit",
         "u = tl.minimum(softcap * tl.where(x < 0.0, -tanh, tanh), u + 3.4028234663852886e38)",
         "u = softcap * tl.where(x < 0.0, -tanh, tanh)"),
        ("gradients are stored without a mask",
         "d_logits.to(out_row_ptr.dtype.element_ty), mask=mask_v)",
         "d_logits.to(out_row_ptr.dtype.element_ty))"),
        ("the rest of a row begins one column early",
         "out_row_ptr, whole, V, row_grads", "out_row_ptr, whole - 1, V, row_grads"),
    ),
    *damages_in(
        "kernels/triton_pairs.py", "test_two_heads",
        ("columns past the last one count for the reference",
         '        t = tl.where(mask_v, t, float("-inf"))\n    p = tl.exp2(u)',
         "    p = tl.exp2(u)"),
    ),
    *damages_in(
        "kernels/triton_logits.py", "test_batch_invariant",
        ("invariant sums are taken in the order of the layout",
         "    if INVARIANT:\n        # As", "    if False:\n        # As"),
    ),
    *damages_in(
        "kernels/triton_logits.py", "ptx/test_real_sizes",
        ("rows of the statistics are counted in 32 bits",
         f"{_ROW}.to(tl.int64)\n{_WIDE}exps_row_ptr", f"{_ROW}\n{_WIDE}exps_row_ptr"),
        ("rows of the gradient are counted in 32 bits",
         f"{_ROW}.to(tl.int64)\n{_WIDE}out_row_ptr", f"{_ROW}\n{_WIDE}out_row_ptr"),
    ),
    *damages_in(
        "kernels/triton_logits.py", "test_backends",
        ("more threads than columns, in place",
         "min(launch.num_warps, block_v // 64)", "launch.num_warps"),
    ),
    *damages_in(
        "kernels/triton_policy_loss.py", "test_grpo_loss test_backends",
        ("a masked load has no value for the masked",
         "weights = tl.load(weights_ptr + offs_n, mask=mask_n, other=0.0)",
         "weights = tl.load(weights_ptr + offs_n, mask=mask_n)"),
        ("the mask is loaded without a mask",
         "tl.load(mask_ptr + offs_n, mask=inside, other=0)", "tl.load(mask_ptr + offs_n)"),
        ("partial sums are added up in one place",
         "    tl.store(partials_ptr + block, tl.sum(loss, axis=0))",
         "    tl.store(partials_ptr + block, 0.0, mask=block > 0)\n"
         "    before = tl.load(partials_ptr, mask=block > 0, other=0.0)\n"
         "    tl.store(partials_ptr, before + tl.sum(loss, axis=0))"),
        ("programs overlap by a token",
         "offs_n = block * BLOCK_N +", "offs_n = block * (BLOCK_N - 1) +"),
        ("the entropy's gradient is not stored",
         "tl.where(mask_n, d_entropy, 0.0), mask=inside)",
         "tl.where(mask_n, d_entropy, 0.0), mask=offs_n < 0)"),
    ),
    *damages_in(
        "kernels/triton_policy_loss.py", "ptx/test_damages",
        ("a minimum hides NaN",
         "return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)", "return tl.minimum(x, y)"),
    ),
    *damages_in(
        "kernels/triton_entries.py", "test_triton_entries ptx/test_real_sizes",
        ("rows of entries are loaded without a mask",
         "rows = tl.load(rows_ptrs, mask=mask, other=0.0)", "rows = tl.load(rows_ptrs)"),
        ("sums of entries are stored without a mask",
         "tl.store(out_ptr + part * stride_out_p + offs_k, sums, mask=mask_k)",
         "tl.store(out_ptr + part * stride_out_p + offs_k, sums)"),
        ("rows of sums are counted in 32 bits",
         "segment = tl.program_id(0).to(tl.int64)", "segment = tl.program_id(0)"),
        ("every part of a long segment stores its sum", " | (part != tl.cdiv(begin, PART))", ""),
        ("factors of entries behind the segment are 1",
         "factors = tl.load(factors_ptr + offs_e, mask=mask_e, other=0.0)",
         "factors = tl.load(factors_ptr + offs_e, mask=mask_e, other=1.0)"),
        ("a part before the first, which nobody wrote, is added",
         "for first in range(part, end_part, BLOCK_P):",
         "for first in range(part - 1, end_part, BLOCK_P):"),
    ),
]  # fmt: skip

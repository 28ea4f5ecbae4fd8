"""The damages of `kernel_damages`: what is wrong, where, how, and the check that shows it."""

from __future__ import annotations

from typing import NamedTuple


class KernelDamage(NamedTuple):
    """Changes of a source, or else of PTX; neither: the launch of the check is the damage."""

    what: str
    path: str
    check: str
    changes: tuple[tuple[str, str], ...] = ()
    kernels: str = ""  # those to compile
    edit: str = ""  # of `kernel_checks`
    at: int = 0  # which place the edit is made in


def _in(
    path: str, kernels: str, *damages: tuple[str, str, tuple[tuple[str, str], ...]]
) -> list[KernelDamage]:
    return [KernelDamage(what, path, check, changes, kernels) for what, check, changes in damages]


def _ptx(*damages: tuple[str, str, str, str, int]) -> list[KernelDamage]:
    return [
        KernelDamage(what, f"PTX of {kernel}", check, (), "", edit, at)
        for what, kernel, check, edit, at in damages
    ]


_STATS, _GRADS = "token_stats_kernel", "logit_grads_kernel"
_ROW = "row = tl.program_id(0)"
_WIDE = "    row_ptr = logits_ptr + row * stride_logits_n\n    "

DAMAGES = [
    *_in(
        "backends/triton_logits.py", _STATS,
        ("the logits are loaded without a mask", "token_stats", (
            ("u = tl.load(row_ptr + offs_v, mask=mask_v, other=0.0)",
             "u = tl.load(row_ptr + offs_v)"),
        )),
        ("exponentials are stored without a mask", "kept_exps", (
            ("tl.store(exps_row_ptr + offs_v, kept, mask=mask_v)",
             "tl.store(exps_row_ptr + offs_v, kept)"),
        )),
        ("columns past the last one count as logits of 0", "token_stats", (
            ('shifted = tl.where(mask_v, shifted, float("-inf"))', "shifted = shifted + 0.0"),
        )),
        ("no barrier before the target's exponential is stored", "kept_exps", (
            ("        tl.debug_barrier()\n", ""),
        )),
        ("rows are claimed to begin where vectors do", "odd_rows", (
            (_WIDE + "exps_row_ptr", _WIDE.replace("logits_ptr + row * stride_logits_n",
             "tl.multiple_of(logits_ptr + row * stride_logits_n, 16)") + "exps_row_ptr"),
        )),
        ("rows of the statistics are counted in 32 bits", "real_size", (
            (f"{_ROW}.to(tl.int64)\n{_WIDE}exps_row_ptr", f"{_ROW}\n{_WIDE}exps_row_ptr"),
        )),
        ("two names of one anchor before the loop", "second_sweep", (
            ("    out_of_reach = True\n    while out_of_reach:\n",
             "    next_anchor = anchor\n    out_of_reach = True\n    while out_of_reach:\n"
             "        anchor = next_anchor\n"),
            ("if out_of_reach:\n            anchor = _anchor(",
             "if out_of_reach:\n            next_anchor = _anchor("),
        )),
        ("invariant sums are taken in the order of the layout", "same_bits", (
            ("    if INVARIANT:\n        # As", "    if False:\n        # As"),
        )),
        ("rows without entries are not left", "entries", (
            ("if V == 0:\n            return\n    if HAS_TEMPERATURE",
             "if V < 0:\n            return\n    if HAS_TEMPERATURE"),
        )),
        ("an entry at -inf has the softcap's least logit", "banned", (
            ("u = tl.minimum(softcap * tanh, u + _LARGEST)", "u = softcap * tanh"),
        )),
    ),
    *_in(
        "backends/triton_common.py", _STATS,
        ("more threads than columns, in place", "few_columns_in_place", (
            ("min(launch.num_warps, block_v // 64)", "launch.num_warps"),
        )),
        ("logits are loaded one by one", "token_stats", (
            ('do_not_specialize=["N", "rows_per_block"]',
             'do_not_specialize=["N", "rows_per_block", "stride_logits_n"]'),
        )),
    ),
    *_in(
        "backends/triton_logits.py", _GRADS,
        ("gradients are stored without a mask", "logit_grads", (
            ("d_logits.to(out_row_ptr.dtype.element_ty), mask=mask_v)",
             "d_logits.to(out_row_ptr.dtype.element_ty))"),
        )),
        ("rows of the gradient are counted in 32 bits", "real_size", (
            (f"{_ROW}.to(tl.int64)\n{_WIDE}out_row_ptr", f"{_ROW}\n{_WIDE}out_row_ptr"),
        )),
        ("the rest of a row begins one column early", "logit_grads", (
            ("out_row_ptr, whole, V, row_grads", "out_row_ptr, whole - 1, V, row_grads"),
        )),
        ("the rest of a row is left out", "logit_grads", (
            ("    if whole < V:\n", "    if whole > V:\n"),
        )),
    ),
    KernelDamage("rows are written where the next program reads", "a launch", "rows_move_up"),
    *_in(
        "backends/triton_policy_loss.py", "policy_loss_kernel",
        ("a masked load has no value for the masked", "policy_loss", (
            ("weights = tl.load(weights_ptr + offs_n, mask=mask_n, other=0.0)",
             "weights = tl.load(weights_ptr + offs_n, mask=mask_n)"),
        )),
        ("the gradient is stored without a mask", "policy_loss", (
            ("weights * d_logps, mask=inside)", "weights * d_logps)"),
        )),
        ("the mask is loaded without a mask", "policy_loss", (
            ("tl.load(mask_ptr + offs_n, mask=inside, other=0)", "tl.load(mask_ptr + offs_n)"),
        )),
        ("partial sums are added up in one place", "policy_loss", (
            ("    tl.store(partials_ptr + block, tl.sum(loss, axis=0))",
             "    tl.store(partials_ptr + block, 0.0, mask=block > 0)\n"
             "    before = tl.load(partials_ptr, mask=block > 0, other=0.0)\n"
             "    tl.store(partials_ptr, before + tl.sum(loss, axis=0))"),
        )),
        ("programs overlap by a token", "policy_loss", (
            ("offs_n = block * BLOCK_N +", "offs_n = block * (BLOCK_N - 1) +"),
        )),
        ("the entropy's gradient is not stored", "policy_loss", (
            ("tl.where(mask_n, d_entropy, 0.0), mask=inside)",
             "tl.where(mask_n, d_entropy, 0.0), mask=offs_n < 0)"),
        )),
        ("a minimum hides NaN", "policy_loss_of_nan", (
            ("return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)",
             "return tl.minimum(x, y)"),
        )),
    ),
    *_in(
        "experimental/triton_column_scores.py", "column_scores_kernel",
        ("rows of the sums of columns are counted in 32 bits", "real_size", (
            ("row = tl.cast(index, tl.int64)", "row = index"),
        )),
        ("blocks of rows leave their sums in one place", "column_scores", (
            ("tl.program_id(1).to(tl.int64) * V + offs_v", "offs_v.to(tl.int64)"),
        )),
        ("sums of columns are stored without a mask", "column_scores", (
            ("tl.store(sums_ptr + offs, sums, mask=mask_v)", "tl.store(sums_ptr + offs, sums)"),
        )),
    ),
    *_in(
        "experimental/triton_column_scores.py", "column_level_kernel",
        ("norms past the last one are 0.1", "column_level", (
            ("mask=offs_k < K, other=0.0)", "mask=offs_k < K, other=0.1)"),
        )),
    ),
    *_in(
        "backends/triton_entries.py", "entry_dots_kernel",
        ("rows of entries are loaded without a mask", "entries", (
            ("rows = tl.load(rows_ptrs, mask=mask, other=0.0)", "rows = tl.load(rows_ptrs)"),
        )),
        ("dots are stored without a mask", "entries", (
            ("tl.store(out_ptr + offs_e, z, mask=mask_e)", "tl.store(out_ptr + offs_e, z)"),
        )),
    ),
    *_in(
        "backends/triton_entries.py", "segment_sums_kernel part_sums_kernel sum_parts_kernel",
        ("sums of entries are added to memory that nobody wrote", "entries", (
            ("ADDS=out is not None, PART=PART, BLOCK_E=block_e",
             "ADDS=True, PART=PART, BLOCK_E=block_e"),
        )),
        ("sums of entries are stored without a mask", "entries", (
            ("tl.store(out_ptrs, sums.to(out_ptrs.dtype.element_ty), mask=mask_k)",
             "tl.store(out_ptrs, sums.to(out_ptrs.dtype.element_ty))"),
        )),
        ("rows of sums are counted in 32 bits", "real_entries", (
            ("segment = tl.program_id(0).to(tl.int64)", "segment = tl.program_id(0)"),
        )),
        ("every part of a long segment stores its sum", "entries", (
            (" | (part != tl.cdiv(begin, PART))", ""),
        )),
        ("factors of entries behind the segment are 1", "entries", (
            ("factors = tl.load(factors_ptr + offs_e, mask=mask_e, other=0.0)",
             "factors = tl.load(factors_ptr + offs_e, mask=mask_e, other=1.0)"),
        )),
        ("a part before the first, which nobody wrote, is added", "entries", (
            ("for first in range(part, end_part, BLOCK_P):",
             "for first in range(part - 1, end_part, BLOCK_P):"),
        )),
    ),
    *_ptx(
        ("a sum's shuffle has the wrong distance", _STATS, "token_stats",
         r"(shfl\.sync\.bfly.*), 16, 31(?=(?:.*\n){1,5}.*add\.)=>\1, 8, 31", 0),
        ("a maximum's shuffle has the wrong distance", _STATS, "second_sweep",
         r"(shfl\.sync\.bfly.*), 16, 31(?=(?:.*\n){1,5}.*max\.)=>\1, 8, 31", 2),
        ("a barrier is removed", _STATS, "token_stats", r"^\s*bar\.sync.*$=>", 0),
        ("a barrier is for some threads only", _STATS, "token_stats",
         r"(@%p\d+) (st\.shared.*\n(?:.*\n){0,3}?\s*)(bar\.sync.*)=>"
         r"\1 \2\1 bra $L_past;\n\3\n$L_past:", 0),
        ("a store to shared memory is 4 bytes off", _STATS, "token_stats",
         r"(st\.shared\.\S+ \[ %r\d+) \+ 0=>\1 + 4", 0),
        ("a load of shared memory is 4 bytes off", _STATS, "token_stats",
         r"(ld\.shared\S+\s+%r\d+, \[global_smem)\]=>\1+4]", 2),
        ("a store to shared memory is dropped", _STATS, "token_stats",
         r"^\s*@?\S* ?st\.shared.*$=>", 0),
        ("the guard of a store to shared memory is dropped", _STATS, "token_stats",
         r"@%p\d+ (st\.shared)=>\1", 1),
        ("a maximum hides NaN", "policy_loss_kernel", "policy_loss_of_nan",
         r"(min|max)\.NaN\.f32=>\1.f32", 0),
        ("a vector is stored 4 bytes off", _GRADS, "logit_grads",
         r"(st\.global\.v4\.b32 \[ %rd\d+) \+ 0=>\1 + 4", 0),
        ("a vector is loaded 16 bytes off", _STATS, "token_stats",
         r"(ld\.global\.v4\.b32 \{[^}]*\}, \[ %rd\d+) \+ 0=>\1 + 16", 1),
        ("the guard of a store is dropped", _GRADS, "logit_grads",
         r"@%p\d+ (st\.global)=>\1", 0),
        ("the guard of a load is dropped", "policy_loss_kernel", "policy_loss",
         r"@%p\d+ (ld\.global)=>\1", 1),
        ("a sweep takes a block too many", _STATS, "token_stats", r"setp\.lt\.s64=>setp.le.s64", 0),
    ),
]  # fmt: skip

# What the emulator does not see: launches that are right.
UNSEEN = (
    # A reduction stands before it, with barriers of its own.
    "no barrier before the target's exponential is stored",
    # As slow as it is right.
    "logits are loaded one by one",
)

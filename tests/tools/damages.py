"""Damages of one line to the sources, one per kind of fault, that `mutants.py` applies.

Paths are below `grpo_kernels/`; `old` stands there exactly once. `tests` are the modules that look
at it most, which run first; damages that only several ranks show name modules in `tests/ranks/`.
Those of `KERNEL_DAMAGES` are for tests run from PTX, as Triton's interpreter does not see many.
Damages to the PTX itself are in `tests/ptx/test_damages.py`.
"""

from __future__ import annotations

from typing import NamedTuple


class Damage(NamedTuple):
    what: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]


def damages_in(path: str, tests: str, *damages: tuple[str, str, str]) -> list[Damage]:
    return [Damage(what, path, old, new, tuple(tests.split())) for what, old, new in damages]


DAMAGES = [
    # A row of logits: its columns, its transform, its target.
    *damages_in(
        "kernels/torch_backend.py", "test_pairs",
        ("the softcap's slope is left out", "d_logits.mul_(chain)", "pass"),
    ),
    *damages_in(
        "kernels/__init__.py", "test_pairs",
        ("no entropy gradient at the target",
         "at_target -= stats.logps.exp() * d_entropy", "at_target -= 0 * d_entropy"),
    ),
    *damages_in(
        "kernels/triton_logits.py", "test_backends",
        ("triton: columns past the vocabulary count",
         'shifted = tl.where(mask_v, shifted, float("-inf"))',
         "shifted = tl.where(mask_v, shifted, 0.0)"),
    ),
    # Two models' logits.
    *damages_in(
        "kernels/pairs.py", "test_two_heads",
        ("the divergence's gradient has no mean",
         "torch.sub(h, mean[:, None], out=scratch), p, out=out)", "h, p, out=out)"),
        ("of models that agree the terms cancel",
         "near = (value < _FAR)", "near = (value < -_FAR)"),
        ("what lies far apart counts as near",
         "    for side in (-1, 1):", "    for side in ():"),
    ),
    *damages_in(
        "head/two_heads.py", "test_pairs",
        ("the reference's logits are scaled as the policy's",
         "self.reference.transform.at", "self.spec.transform.at"),
    ),
    *damages_in(
        "loss/grpo_loss.py", "test_pairs",
        ("the exact KL has no gradient",
         "return config.beta * inputs.weights if", "return 0.0 * inputs.weights if"),
    ),
    # Tokens scored over the whole vocabulary: terms, chunks, sums.
    *damages_in(
        "head/chunked_head.py", "test_fused_grpo_loss",
        ("the gradient of the weight is the last chunk's",
         "d[:, columns].t(), x, beta=beta)", "d[:, columns].t(), x, beta=0.0)"),
        ("one sweep loses the temperature",
         "(-transform.logit_scale / transform.temperature)", "(-transform.logit_scale)"),
    ),
    *damages_in(
        "kernels/__init__.py", "test_pairs",
        ("the gradient of logsumexp has its sign flipped",
         "d_softmax = d_logps - d_logsumexp", "d_softmax = d_logps + d_logsumexp"),
    ),
    *damages_in(
        "head/chunked_head.py", "test_products",
        ("a strip's exponentials go where the last ones are",
         "exps=None if self.exps is None else self.exps[strip]",
         "exps=None if self.exps is None else self.exps[: strip.stop - strip.start]"),
    ),
    *damages_in(
        "head/products.py", "test_products test_batch_invariant",
        ("a batch-invariant call's products take all rows",
         "step = len(out) if self.multiple == 1 else self.multiple", "step = len(out)"),
        ("the caller's product is not asked",
         "matmul = self.matmul if is_weight else None", "matmul = None"),
    ),
    *damages_in(
        "head/row_plan.py", "test_plan",
        ("rows without a gradient come first", "rank += ~group", "rank += group"),
    ),
    *damages_in(
        "head/plan.py", "test_head_memory",
        ("memory that runs out over the head ends the call",
         "if fixed or plan.rows.logit_rows <= least or not ran_out_of_memory(error):", "if True:"),
    ),
    # What comes in, and the two calls.
    *damages_in(
        "head/call.py", "test_pairs",
        ("masked rows of a capturable call are multiplied as they come",
         "selected(flat_mask, x, 0), y)", "x, y)"),
    ),
    *damages_in(
        "head/plan.py", "test_support",
        ("tokens with a kept set are scored over the whole vocabulary, too",
         "spec = replace(spec, mask=others if spec.mask is None else spec.mask & others)", "pass"),
    ),
    *damages_in(
        "fused_grpo_loss.py", "test_fused_grpo_loss",
        ("the loss is the last chunk's",
         "loss = policy.loss if loss is None else loss + policy.loss", "loss = policy.loss"),
        ("tokens of negative advantage are skipped",
         "inputs.advantages != 0, inputs", "inputs.advantages > 0, inputs"),
    ),
    *damages_in(
        "fused_grpo_loss.py", "test_cross_entropy",
        ("tokens of the cross-entropy count as the policy's",
         "masked = plan.rows.has_masked or inputs.ce_weights is not None",
         "masked = plan.rows.has_masked"),
    ),
    *damages_in(
        "head/linear_logprobs.py", "test_linear_logprobs",
        ("masked rows are given a gradient", "needed &= plan.tokens", "pass"),
    ),
    *damages_in(
        "base/autograd.py", "test_autograd",
        ("a gradient that is asked for again is scaled again",
         "is_needed_again = not fresh and graph_is_kept()",
         "is_needed_again = False"),
    ),
    # Kept sets, ranks.
    *damages_in(
        "head/support.py", "test_support",
        ("a support: the target is counted from the first of all entries",
         "return counts, place - begins", "return counts, place"),
    ),
    *damages_in(
        "head/shards.py", "ranks/test_vocab_parallel",
        ("ranks: the entropy within a rank is not weighed by its share",
         "log_shares.exp() * (ranks[:, 2] - log_shares)", "ranks[:, 2] - log_shares"),
    ),
    *damages_in(
        "head/shards.py", "ranks/test_vocab_parallel",
        ("ranks: the target's entry is that of this rank's columns alone",
         "self._mend(exps, targets, slope, stats, whole)", "pass"),
        ("ranks: other ranks' gradients of hidden states are left out",
         'if self.layout == "partial":\n            put_rows',
         "if True:\n            put_rows"),
    ),
    *damages_in(
        "base/sequences.py", "ranks/test_sequences",
        ("ranks: gathered tokens give every rank the first one's gradient",
         "ctx.begin, ctx.size = sum(sizes[: group.rank()]), size", "ctx.begin, ctx.size = 0, size"),
    ),
    # The objective: mask, clip, correction, KL, averages.
    *damages_in(
        "loss/tokens.py", "test_objective test_grpo_loss",
        ("masked tokens are read",
         "return x if mask is None else torch.where(mask, x, 0.0)", "return x"),
    ),
    *damages_in(
        "loss/losses.py", "test_objective",
        ("the lower bound of the clip is ignored",
         "ratio.clamp(*self.bounds) * A", "ratio.clamp(max=self.bounds[1]) * A"),
        ("a sequence's token has the gradient of the sequence",
         "tokens.logps - tokens.logps.detach() + log_ratio.detach()",
         "tokens.logps - tokens.logps.detach() + log_ratio"),
    ),
    *damages_in(
        "loss/objective.py", "test_objective",
        ("the KL is of the reference to the policy",
         "tokens.ref_logps - tokens.logps, config", "tokens.logps - tokens.ref_logps, config"),
        ("num_items is ignored",
         "    if items is None:\n        items = count.clamp(min=1) if",
         "    if True:\n        items = count.clamp(min=1) if"),
    ),
    *damages_in(
        "loss/metrics.py", "test_metrics test_fused_grpo_loss",
        ("metrics count masked tokens",
         "table.masked_fill_(masked, 0.0)", "table.masked_fill_(masked & ~masked, 0.0)"),
    ),
]  # fmt: skip

_ROW = "row = tl.program_id(0)"
_WIDE = "    row_ptr = logits_ptr + row * stride_logits_n\n    "

KERNEL_DAMAGES: list[Damage] = [
    *damages_in(
        "kernels/triton_logits.py", "test_backends",
        ("the logits are loaded without a mask",
         "u = tl.load(row_ptr + offs_v, mask=mask_v, other=0.0)", "u = tl.load(row_ptr + offs_v)"),
        ("exponentials are stored without a mask",
         "tl.store(exps_row_ptr + offs_v, stored, mask=mask_v)",
         "tl.store(exps_row_ptr + offs_v, stored)"),
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
         "    y = _to_log2(t, ref_anchor, ref_model, mask_v)\n    ref_at",
         "    y = _to_log2(t, ref_anchor, ref_model, True)\n    ref_at"),
        ("a sweep that cancels is the last one",
         "            again = again | cancels\n", ""),
        ("what the shift rounds away is not in the mean",
         "(moved + minus_c)\n", "(moved + minus_c) * 0.0\n"),
    ),
    *damages_in(
        "kernels/triton_divergences.py", "test_two_heads",
        ("a NaN of p is no NaN of the gradient",
         "tl.where(p == 0.0, 0.0, p * (of_p - mean))", "tl.where(p > 0.0, p * (of_p - mean), 0.0)"),
        ("the forward KL's sum is relative to the policy's",
         "tl.where(shifted, total * tl.exp(minus_c), ref_total)", "total"),
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

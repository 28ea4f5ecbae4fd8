"""Damages of one line to the sources, one per kind of fault, that `mutants.py` applies.

`path` is below `grpo_kernels/`. `old` occurs exactly once in the function, `name` or `Class.name`.
`tests` are the modules most likely to fail, and run first; damages that only several ranks show
name modules in `tests/ranks/`. Tests run from PTX see `KERNEL_DAMAGES`: Triton's interpreter does
not show many of them. Damages to the PTX are in `tests/ptx/test_damages.py`.
"""

from __future__ import annotations

from typing import NamedTuple


class Damage(NamedTuple):
    what: str
    path: str
    function: str
    old: str
    new: str
    tests: tuple[str, ...]


def damages_in(path: str, tests: str, *damages: tuple[str, str, str, str]) -> list[Damage]:
    return [Damage(what, path, *rest, tuple(tests.split())) for what, *rest in damages]


DAMAGES = [
    # A row of logits: its columns, its transform, its target.
    *damages_in(
        "kernels/torch_backend.py", "test_pairs",
        ("the softcap's slope is left out", "logit_grads_", "d_logits.mul_(chain)", "pass"),
    ),
    *damages_in(
        "kernels/__init__.py", "test_pairs",
        ("no entropy gradient at the target", "RowGrads.of",
         "stats.logps.exp() * d_entropy", "0 * d_entropy"),
    ),
    *damages_in(
        "kernels/triton_logits.py", "test_backends",
        ("triton: columns past the vocabulary count", "_add_block", 'float("-inf")', "0.0"),
    ),
    # Two models' logits.
    *damages_in(
        "kernels/pairs.py", "test_two_heads",
        ("the divergence's gradient has no mean", "_slopes",
         "torch.sub(h, mean[:, None], out=scratch)", "h"),
        ("of models that agree the terms cancel", "_divergence_and_slopes", "_FAR", "-_FAR"),
        ("what lies far apart counts as near", "_sum_of_addends", "(-1, 1)", "()"),
    ),
    *damages_in(
        "head/two_heads.py", "test_pairs",
        ("the reference's logits are scaled as the policy's", "DivergenceReadout.select",
         "self.reference", "self.spec"),
    ),
    *damages_in(
        "loss/grpo_loss.py", "test_pairs",
        ("the exact KL has no gradient", "d_kl", "config.beta", "0.0"),
    ),
    # Tokens scored over the whole vocabulary: terms, chunks, sums.
    *damages_in(
        "head/chunked_head.py", "test_fused_grpo_loss",
        ("the gradient of the weight is the last chunk's", "ChunkedHead._add_d_y",
         "beta=beta", "beta=0.0"),
        ("one sweep loses the temperature", "row_factors", " / transform.temperature", ""),
    ),
    *damages_in(
        "kernels/__init__.py", "test_pairs",
        ("the gradient of logsumexp has its sign flipped", "RowGrads.of",
         "d_logps - d_logsumexp", "d_logps + d_logsumexp"),
    ),
    *damages_in(
        "head/chunked_head.py", "test_products",
        ("a strip's exponentials go where the last ones are", "TargetReadout.forward",
         "self.exps[strip]", "self.exps[: strip.stop - strip.start]"),
    ),
    *damages_in(
        "head/products.py", "test_products test_batch_invariant",
        ("a batch-invariant call's products take all rows", "Products.rows",
         "len(out) if self.multiple == 1 else self.multiple", "len(out)"),
        ("the caller's product is not asked", "Products.rows",
         "self.matmul if is_weight else None", "None"),
    ),
    *damages_in(
        "head/row_plan.py", "test_plan",
        ("rows without a gradient come first", "order_of", "~group", "group"),
    ),
    *damages_in(
        "head/plan.py", "test_head_memory",
        ("memory that runs out over the head ends the call", "HeadPlan.run",
         "fixed or plan.rows.logit_rows <= least or not ran_out_of_memory(error)", "True"),
    ),
    # Inputs, and the two calls.
    *damages_in(
        "head/call.py", "test_pairs",
        ("masked rows of a capturable call are multiplied as they come", "head_call",
         "selected(flat_mask, x, 0)", "x"),
    ),
    *damages_in(
        "head/plan.py", "test_support",
        ("tokens with a kept set are scored over the whole vocabulary, too", "plan_head",
         "without_set if spec.mask is None else spec.mask & without_set", "spec.mask"),
    ),
    *damages_in(
        "fused_grpo_loss.py", "test_fused_grpo_loss",
        ("the loss is the last chunk's", "_OnePass.forward", "loss + policy.loss", "policy.loss"),
        ("tokens of negative advantage are skipped", "_tokens_with_grad",
         "inputs.advantages != 0", "inputs.advantages > 0"),
    ),
    *damages_in(
        "fused_grpo_loss.py", "test_cross_entropy",
        ("tokens of the cross-entropy count as the policy's", "_OnePass.forward",
         " or inputs.ce_weights is not None", ""),
    ),
    *damages_in(
        "head/linear_logprobs.py", "test_linear_logprobs",
        ("masked rows are given a gradient", "_second_pass", "needed &= plan.tokens", "pass"),
    ),
    *damages_in(
        "base/autograd.py", "test_autograd",
        ("a gradient that is asked for again is scaled again", "scaled_gradient",
         "not fresh and graph_is_kept()", "False"),
    ),
    # Kept sets, ranks.
    *damages_in(
        "head/support.py", "test_support",
        ("a support: the target is counted from the first of all entries", "_target_offsets",
         "place - begins", "place"),
    ),
    *damages_in(
        "head/shards.py", "ranks/test_vocab_parallel",
        ("ranks: the entropy within a rank is not weighed by its share", "VocabShards._merged",
         "log_shares.exp() * ", ""),
    ),
    *damages_in(
        "head/shards.py", "ranks/test_vocab_parallel",
        ("ranks: the target's entry is that of this rank's columns alone", "VocabShards.merge",
         "self._set_target_entries(exps, targets, slope, stats, merged)", "pass"),
        ("ranks: other ranks' gradients of hidden states are left out", "VocabShards.store_rows",
         'self.layout == "partial"', "True"),
    ),
    *damages_in(
        "base/sequences.py", "ranks/test_sequences",
        ("ranks: gathered tokens give every rank the first one's gradient", "_GatherTokens.forward",
         "sum(sizes[: group.rank()])", "0"),
    ),
    # The objective: mask, clip, correction, KL, averages.
    *damages_in(
        "loss/tokens.py", "test_objective test_pairs",
        ("masked tokens are read", "Tokens.of.clean",
         "x if mask is None else torch.where(mask, x, 0.0)", "x"),
    ),
    *damages_in(
        "loss/losses.py", "test_objective",
        ("the lower bound of the clip is ignored", "Clip.per_token",
         "clamp(*self.bounds)", "clamp(max=self.bounds[1])"),
        ("a sequence's token has the gradient of the sequence", "Loss.log_ratio",
         "log_ratio.detach()", "log_ratio"),
    ),
    *damages_in(
        "loss/objective.py", "test_objective",
        ("the KL is of the reference to the policy", "kl_terms",
         "tokens.ref_logps - tokens.logps", "tokens.logps - tokens.ref_logps"),
        ("num_items is ignored", "aggregation_weights", "if items is None", "if True"),
    ),
    *damages_in(
        "loss/metrics.py", "test_metrics test_fused_grpo_loss",
        ("metrics count masked tokens", "loss_metrics",
         "masked_fill_(masked, 0.0)", "masked_fill_(masked & ~masked, 0.0)"),
    ),
]  # fmt: skip

KERNEL_DAMAGES: list[Damage] = [
    *damages_in(
        "kernels/triton_logits.py", "test_backends",
        ("the logits are loaded without a mask", "_load_logits", ", mask=mask_v, other=0.0", ""),
        ("exponentials are stored without a mask", "_add_block", ", mask=mask_v)", ")"),
        ("columns past the last one count as logits of 0", "_add_block",
         'tl.where(mask_v, shifted, float("-inf"))', "shifted + 0.0"),
        ("rows are claimed to begin where vectors do", "token_stats_kernel",
         "logits_ptr + row * stride_logits_n",
         "tl.multiple_of(logits_ptr + row * stride_logits_n, 16)"),
        ("an entry at -inf has the softcap's least logit", "_load_logits",
         "tl.minimum(softcap * tl.where(x < 0.0, -tanh, tanh), u + 3.4028234663852886e38)",
         "softcap * tl.where(x < 0.0, -tanh, tanh)"),
        ("gradients are stored without a mask", "_store_logit_grads", ", mask=mask_v)", ")"),
        ("the rest of a row begins one column early", "logit_grads_kernel",
         "whole, V, row_grads", "whole - 1, V, row_grads"),
    ),
    *damages_in(
        "kernels/triton_pairs.py", "test_two_heads",
        ("columns past the last one count for the reference", "_add_pair",
         "ref_model, mask_v", "ref_model, True"),
        ("a sweep that cancels is the last one", "pair_stats_kernel",
         "again = again | cancels", "pass"),
        ("what the shift rounds away is not in the mean", "pair_stats_kernel",
         "(moved + minus_c)", "(moved + minus_c) * 0.0"),
    ),
    *damages_in(
        "kernels/triton_divergences.py", "test_two_heads",
        ("a NaN of p is no NaN of the gradient", "_jsd_moment",
         "tl.where(p == 0.0, 0.0, p * (log_pm - mean))",
         "tl.where(p > 0.0, p * (log_pm - mean), 0.0)"),
        ("the forward KL's sum is relative to the policy's", "_forward_value",
         "tl.where(shifted, total * tl.exp(minus_c), ref_total)", "total"),
    ),
    *damages_in(
        "kernels/triton_logits.py", "test_batch_invariant",
        ("invariant sums are taken in the order of the layout", "_sum", "if INVARIANT", "if False"),
    ),
    *damages_in(
        "kernels/triton_logits.py", "ptx/test_real_sizes",
        ("rows of the statistics are counted in 32 bits", "token_stats_kernel",
         ".to(tl.int64)", ""),
        ("rows of the gradient are counted in 32 bits", "logit_grads_kernel", ".to(tl.int64)", ""),
    ),
    *damages_in(
        "kernels/triton_logits.py", "test_backends",
        ("more threads than columns, in place", "block_of",
         "min(launch.num_warps, block_v // 64)", "launch.num_warps"),
    ),
    *damages_in(
        "kernels/triton_policy_loss.py", "test_backends",
        ("a masked load has no value for the masked", "policy_loss_kernel",
         "weights_ptr + offs_n, mask=mask_n, other=0.0", "weights_ptr + offs_n, mask=mask_n"),
        ("the mask is loaded without a mask", "policy_loss_kernel",
         "mask_ptr + offs_n, mask=inside, other=0", "mask_ptr + offs_n"),
        ("partial sums are added up in one place", "policy_loss_kernel",
         "tl.store(partials_ptr + block, tl.sum(loss, axis=0))",
         "tl.store(partials_ptr + block, 0.0, mask=block > 0)\n"
         "    before = tl.load(partials_ptr, mask=block > 0, other=0.0)\n"
         "    tl.store(partials_ptr, before + tl.sum(loss, axis=0))"),
        ("programs overlap by a token", "policy_loss_kernel",
         "block * BLOCK_N", "block * (BLOCK_N - 1)"),
        ("the entropy's gradient is not stored", "policy_loss_kernel",
         "d_entropy, 0.0), mask=inside", "d_entropy, 0.0), mask=offs_n < 0"),
    ),
    *damages_in(
        "kernels/triton_policy_loss.py", "ptx/test_damages",
        ("a minimum hides NaN", "_min", ", propagate_nan=tl.PropagateNan.ALL", ""),
    ),
    *damages_in(
        "kernels/triton_entries.py", "test_triton_entries ptx/test_real_sizes",
        ("rows of entries are loaded without a mask", "entry_dots_kernel",
         "rows_ptrs, mask=mask, other=0.0", "rows_ptrs"),
        ("sums of entries are stored without a mask", "part_sums_kernel", ", mask=mask_k", ""),
        ("rows of sums are counted in 32 bits", "segment_sums_kernel", ".to(tl.int64)", ""),
        ("every part of a long segment stores its sum", "sum_parts_kernel",
         " | (part != tl.cdiv(begin, PART))", ""),
        ("factors of entries behind the segment are 1", "_sum_of_entries",
         "offs_e, mask=mask_e, other=0.0", "offs_e, mask=mask_e, other=1.0"),
        ("a part before the first, which nobody wrote, is added", "sum_parts_kernel",
         "range(part, ", "range(part - 1, "),
    ),
]  # fmt: skip

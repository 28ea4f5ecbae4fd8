"""Damages of one line to the sources, one per kind of fault, that `mutants.py` applies.

A line without indentation names a file of `grpo_kernels/` and the test modules most likely to fail,
which run first. Below it are its damages: a function, `name` or `Class.name`; a text that occurs
there once; what takes its place. Damages that only several ranks show name modules in
`tests/ranks/`. Tests run from PTX see `KERNEL_DAMAGES`: Triton's interpreter does not show many of
them. Damages to the PTX are in `tests/ptx/test_damages.py`.
"""

from __future__ import annotations

from typing import NamedTuple


class Damage(NamedTuple):
    path: str
    function: str
    old: str
    new: str
    tests: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.path}, {self.function}: {self.old} -> {self.new}"


def damages_in(table: str) -> list[Damage]:
    """Returns the damages of a table; a line with more indentation continues the one before."""
    damages, path, tests = [], "", tuple[str, ...]()
    for line in table.replace("\n        ", " ").strip().splitlines():
        name, rest = line.strip().split(": ", 1)
        if line[0] != " ":
            path, tests = name, tuple(rest.split())
        else:
            old, new = rest.split(" ->")
            damages.append(Damage(path, name, old, new.strip(), tests))
    return damages


DAMAGES = damages_in("""
kernels/torch_backend.py: test_pairs
    logit_grads_: d_logits.mul_(chain) -> pass
kernels/__init__.py: test_pairs
    RowGrads.of: stats.logps.exp() * d_entropy -> 0 * d_entropy
    RowGrads.of: d_logps - d_logsumexp -> d_logps + d_logsumexp
kernels/triton_logits.py: test_backends
    _add_block: float("-inf") -> 0.0
kernels/pairs.py: test_two_heads
    pair_grads_: value=-1.0 -> value=0.0
    _kl: math.exp(side * _NEAR) -> math.exp(_NEAR)
    _kl: torch.sub(x, c, out=r) -> torch.sub(x, x, out=r)
    _sums_: (weights == 0) & -> (weights < 0) &
head/two_heads.py: test_pairs
    DivergenceReadout.select: self.reference -> self.spec
loss/grpo_loss.py: test_pairs
    d_kl: config.beta -> 0.0
head/chunked_head.py: test_fused_grpo_loss
    ChunkedHead._add_d_y: beta=total.beta -> beta=0.0
head/chunked_head.py: test_products
    row_factors: / transform.temperature ->
    TargetReadout.forward: self.exps[strip] -> self.exps[: strip.stop - strip.start]
head/products.py: test_products test_batch_invariant
    add_product: len(out) if multiple == 1 else multiple -> len(out)
head/row_plan.py: test_plan
    order_of: ~group -> group
head/plan.py: test_head_memory
    HeadPlan.run_with_retry: not ran_out_of_memory(error) -> True
head/linear_logprobs.py: test_linear_logprobs
    _second_pass: and not_finite.numbers == [0] ->
head/plan.py: test_support
    plan_head: without_set if spec.mask is None else spec.mask & without_set -> spec.mask
fused_grpo_loss.py: test_fused_grpo_loss
    _OnePass.forward: loss + policy.loss -> policy.loss
    _tokens_with_grad: tokens.advantages != 0 -> tokens.advantages > 0
fused_grpo_loss.py: test_cross_entropy
    _tokens_with_grad: with_grad | (tokens.ce_weights != 0) -> with_grad
head/linear_logprobs.py: test_linear_logprobs
    _second_pass: needed &= plan.tokens -> pass
base/autograd.py: test_autograd
    scaled_gradient: not fresh and graph_is_retained() -> False
head/support.py: test_support
    _target_offsets: place - begins -> place
head/shards.py: ranks/test_vocab_parallel
    VocabShards._merged: terms = log_shares.exp() * -> terms =
    VocabShards.merge: self._set_global_target_entries(exps, targets, slope, stats, merged) -> pass
    VocabShards.store_rows: self.layout == "partial" -> True
base/sequences.py: ranks/test_sequences
    _GatherTokens.forward: sum(sizes[: group.rank()]) -> 0
loss/tokens.py: test_objective test_pairs
    Tokens._clean: torch.where(self.unmasked, x, 0.0) -> x
loss/losses.py: test_objective
    Clip.per_token: clamp(*self.bounds) -> clamp(max=self.bounds[1])
    Loss.log_ratio: log_ratio.detach() -> log_ratio
loss/losses.py: test_grpo_loss
    Clip.closed_form: torch.where(flows, x, 0.0) -> x
loss/objective.py: test_objective
    kl_terms: tokens.ref_logps - tokens.logps -> tokens.logps - tokens.ref_logps
    aggregation_weights: if items is None -> if True
loss/metrics.py: test_metrics test_fused_grpo_loss
    loss_metrics: masked_fill_(masked, 0.0) -> masked_fill_(masked & ~masked, 0.0)
""")
KERNEL_DAMAGES = damages_in("""
kernels/triton_logits.py: test_backends
    _load_logits: , mask=mask_v, other=0.0 ->
    _add_block: , mask=mask_v) -> )
    _add_block: tl.where(mask_v, shifted, float("-inf")) -> shifted + 0.0
    token_stats_kernel: logits_ptr + row * stride_logits_n
        -> tl.multiple_of(logits_ptr + row * stride_logits_n, 16)
    _load_logits: tl.minimum(capped, u + 3.4028234663852886e38) -> capped
    _store_logit_grads: , mask=mask_v) -> )
    logit_grads_kernel: full, V, row_grads -> full - 1, V, row_grads
    block_of: min(launch.num_warps, block_v // 64) -> launch.num_warps
kernels/triton_pairs.py: test_two_heads
    _add_pair: ref_model, mask_v -> ref_model, True
    pair_stats_kernel: (log_total - ref_log_total) * ln_2() -> 0.0 * ref_log_total
    divergences_kernel: MOMENT(p, q, d, 0.0, beta) -> 0.0 * d
kernels/triton_divergences.py: test_two_heads
    _jsd_moment: tl.where(p == 0.0, 0.0, p * (log_pm - mean))
        -> tl.where(p > 0.0, p * (log_pm - mean), 0.0)
    _forward_moment: -p * (expm1(-d) + mean) -> -p * expm1(-d)
kernels/triton_logits.py: test_logits
    token_stats_kernel: tl.where(i == target_start, others, i) -> i
kernels/triton_logits.py: test_batch_invariant
    _sum: if INVARIANT -> if False
kernels/triton_logits.py: ptx/test_real_sizes
    token_stats_kernel: .to(tl.int64) ->
    logit_grads_kernel: .to(tl.int64) ->
kernels/triton_policy_loss.py: test_backends
    policy_loss_kernel: weights_ptr + offs_n, mask=mask_n, other=0.0
        -> weights_ptr + offs_n, mask=mask_n
    policy_loss_kernel: mask_ptr + offs_n, mask=inside, other=0 -> mask_ptr + offs_n
    policy_loss_kernel: tl.store(partials_ptr + block, tl.sum(loss, axis=0))
        -> tl.store(partials_ptr + block, 0.0, mask=block > 0); before =
        tl.load(partials_ptr, mask=block > 0, other=0.0); tl.store(partials_ptr, before +
        tl.sum(loss, axis=0))
    policy_loss_kernel: block * BLOCK_N -> block * (BLOCK_N - 1)
    policy_loss_kernel: d_entropy, 0.0), mask=inside -> d_entropy, 0.0), mask=offs_n < 0
kernels/triton_policy_loss.py: ptx/test_damages
    _min: , propagate_nan=tl.PropagateNan.ALL ->
kernels/triton_entries.py: test_triton_entries ptx/test_real_sizes
    entry_dots_kernel: rows_ptrs, mask=mask, other=0.0 -> rows_ptrs
    part_sums_kernel: , mask=mask_k ->
    segment_sums_kernel: .to(tl.int64) ->
    sum_parts_kernel: | (part != tl.cdiv(begin, PART)) ->
    _sum_of_entries: offs_e, mask=mask_e, other=0.0 -> offs_e, mask=mask_e, other=1.0
    sum_parts_kernel: range(part, -> range(part - 1,
""")

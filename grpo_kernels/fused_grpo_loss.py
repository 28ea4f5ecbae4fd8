"""The GRPO loss and its gradients from hidden states, without ever holding the logits.

Where the objective is token-local, loss and gradients come from one pass over chunks of logits
(`one_pass.py`). For the others (`GRPOLossConfig.one_pass` says which) the log-probs are taken
first, by the two passes and four GEMMs of `linear_logprobs`, and the loss over them is
differentiated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .autograd import eager_only
from .config import GRPOLossConfig
from .grpo_loss import flat_loss
from .head_call import HeadCall, HeadOperands
from .head_gradients import chunk_layout
from .inputs import loss_call
from .linear_logprobs import flat_logprobs
from .metrics import loss_metrics
from .objective import LossInputs, token_local
from .one_pass import OnePassLoss, one_sweep
from .outputs import GRPOLossOutput
from .row_plan import plan_rows
from .support_head import with_support

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@eager_only
def fused_grpo_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    sampling_logps: Tensor | None = None,
    ce_weights: Tensor | None = None,
    bias: Tensor | None = None,
    low_rank: tuple[Tensor, Tensor] | None = None,
    config: GRPOLossConfig = GRPOLossConfig(),  # noqa: B008 - frozen
    num_items: float | Tensor | None = None,
    entropy_threshold: float | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    temperature: float | Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    logits_dtype: str = "fp32",
    batch_invariant: bool = False,
    matmul: Callable[[Tensor, Tensor], Tensor] | None = None,
    backward: str = "exact",
    tolerance: float | None = None,
    seed: int | torch.Generator | None = None,
    backend: str = "auto",
    chunk_bytes: int | None = None,
    capturable: bool = False,
    support: tuple[Tensor, Tensor] | None = None,
    vocab_group: ProcessGroup | None = None,
    vocab_start: int | None = None,
    hidden_layout: str = "replicated",
) -> GRPOLossOutput:
    """Computes the GRPO loss of a linear head over hidden states, and prepares its gradients.

    Equivalent PyTorch, with the logits never held:

        logits = (hidden @ weight.T + bias).float() / config.temperature
        logps = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        loss = grpo_loss(logps, advantages, mask, old_logps=..., ref_logps=..., config=config).loss

    Args:
        hidden: `[B, T, H]` or packed `[N, H]`, float32, bfloat16 or float16. `hidden[..., t, :]`
            is the state that predicts `targets[..., t]`: the caller shifts.
        weight: `[V, H]`, the LM head; a frozen one costs no gradient work.
        targets: `[B, T]` or `[N]`, integer token ids in [0, V) wherever the mask is 1.
        advantages: `[B]`, `[B, T]` or `[N]`; `[B]` with packed input needs `cu_seqlens`.
        mask: of the shape of `targets`, bool or 0/1; None counts every token. Masked positions
            may hold anything, NaN included, in any argument.
        old_logps: log-probs under the policy that is the ratio's denominator, a constant of the
            shape of `targets`; None is on-policy: ratio 1, with its gradient.
        ref_logps: log-probs under the reference policy, likewise; needed when `config.beta` is
            not 0, and otherwise used for the `kl` metrics alone.
        sampling_logps: log-probs as the sampler reported them, likewise, NaN where it reported
            none; needed by `config.is_correction`, used by `config.off_policy_threshold`, and
            otherwise by the metrics alone.
        ce_weights: adds the cross-entropy term `-(ce_weights * logps).sum()` on any tokens, those
            of a tool or a demonstration, say: constants of the shape of `targets`, in a float
            dtype, any normalizer included. Tokens whose weight is not 0 take part whether or not
            the mask has them; the policy terms, `num_items` and the policy's metrics are over
            `mask` alone. A weight below 0 makes its token less likely, without bound.
        bias: `[V]` or None.
        low_rank: a LoRA on the head, `(lora_a_out, lora_b)`: `scaling * lora_A(hidden)`,
            `[B, T, r]` or `[N, r]`, and the weight of `lora_B`, `[V, r]`. Adds
            `lora_a_out @ lora_b.T` to `hidden @ weight.T`, with gradients for both; next to a
            frozen `weight` it costs little more than the frozen head.
        config: the loss to compute; `config.one_pass` tells if in one pass or two.
        num_items: denominator of the loss, a number or 0-d tensor: the unmasked tokens (`dapo` and
            `bnpo`) or the sequences (`grpo`, `luspo` and `dr_grpo`) of the whole optimizer step
            over all ranks, divided by the number of ranks over which gradients are averaged. The
            losses of its parts then add up, however it is cut; the entropy bonus stays a mean over
            the call. None: those of this call.
        entropy_threshold: with `config.top_entropy_quantile` below 1, the entropy from which on
            tokens train, a number or 0-d tensor: the quantile over all ranks, say. None: the
            quantile over this call's tokens.
        cu_seqlens: `[B + 1]` int32 or int64 offsets of the sequences of a packed input; needed
            where the objective tells sequences apart.
        temperature: overrides `config.temperature`: a number, or one value per token in the shape
            of `targets`.
        logit_scale: factor on `hidden @ weight.T + bias`.
        softcap: `softcap * tanh(logits / softcap)` before the temperature, as Gemma 2 has it.
        logits_dtype: `"fp32"`, or `"model"`: logits are rounded, before softcap and temperature, as
            the model's own head rounds them, to the dtype of `hidden` and `weight`, or of autocast:
            what a sampler of that dtype saw. Gradients pass through the rounding.
        batch_invariant: log-prob, entropy and gradient of `hidden` of each token are the same bits
            whatever else is in the call, in whatever order and chunks: GEMMs over rows are of one
            shape, 256 rows, padded where there are fewer. `weight`'s
            gradient is a sum over tokens, which is as reproducible, and not invariant. Without a
            support.
        matmul: `matmul(a, b)`, a product of two matrices that takes the place of torch's where
            logits and the gradient of `hidden` are computed: that of a batch-invariant sampler,
            say. What it rounds is rounded. Adapters have torch's. Without a support. None: torch's.
        backward: `"exact"`, or `"sampled"`: unbiased gradients of hidden and weight from a few
            percent of the vocabulary's columns, for losses of one pass; slower than the exact one
            where a softmax is flat, and predicted to be on a GPU (`docs/sampled_backward.md`).
        tolerance: noise of the sampled backward, relative to the gradient; None: 5e-3.
        seed: source of the sampled backward's draws: an int (the same gradients again; pass
            another one in each call), a `torch.Generator`, or None for torch's own generator on
            the CPU. Ranks draw differently in any case.
        backend: `"auto"`, `"triton"` or `"torch"`.
        chunk_bytes: budget of the buffers of logits and of their gradient, in bytes, which is kept
            to. None: on a CPU 512 rows of logits, at most 320 MiB; on a GPU 1.75 GiB, or 1/16 of
            its memory if that is less; and where memory runs out, the call is made again with half
            of it, down to 16 rows (256 if `batch_invariant`), and warns. Not so with a
            `vocab_group`, with `capturable`, nor for tokens of a `support`.
        capturable: reads nothing back from the device, as a CUDA graph needs: every row takes part,
            masked ones and those of advantage 0 too, at their cost, and values are checked by
            assertions on the device. For the exact backward.
        support: `(token_ids, offsets)`, int32 or int64: the words that the sampler kept for each
            token, with top-k, top-p or min-p. `token_ids[offsets[i] : offsets[i + 1]]` are those of
            token i in row-major order, the target among them, in any order, each once; none at all
            stands for the whole vocabulary. `[K]` and `[B * T + 1]` or `[N + 1]`. Log-probs,
            entropy, loss and metrics are then those of the softmax over these words, and gradients
            are exact, from their rows of the head alone (`docs/support.md`). Masked tokens may have
            anything.
        vocab_group: a process group whose ranks share the vocabulary: `weight`, `bias` and the
            second of `low_rank` are this rank's rows, in any number, all else is the same on all
            ranks (but see `hidden_layout`), and so is the result, bit for bit: do not add up the
            losses. Gradients of `hidden` and `lora_a_out` are whole on every rank. Or `weight` is a
            DTensor with `Shard(0)`. Every rank has to call, and to call the backward. For the exact
            backward (`docs/distributed.md`).
        vocab_start: the id of this rank's first column; None: columns are in the ranks' order.
        hidden_layout: with a `vocab_group`, where the rows of `hidden` are. `"replicated"`: all on
            every rank. `"partial"`: likewise, but gradients of `hidden` and `lora_a_out` are this
            rank's part, which the caller adds up. `"sequence"`: each rank has tokens of its own,
            with all that belongs to them, in any number; the loss is theirs, and gradients of the
            head are sums over the ranks. `"data"`: likewise, but those gradients are means. Neither
            takes a support.

    Returns:
        `loss`: float32 scalar.
        `metrics`: 0-d device tensors, means over unmasked tokens; reading one synchronizes.
            `tokens`, `ratio_mean`, `ratio_max`, `ess` (effective sample size of the ratios, 1 at
            best), `entropy`, `zero_gradient` (share of tokens), `clip_low` and `clip_high` (0 where
            nothing clips); `kl` and `kl_max` given `ref_logps`; those of the loss's options under
            TRL's names (`docs/objectives.md`); `columns_kept`, `dense_blocks` and `gradient_noise`
            of the sampled backward; `ce_loss`, `ce_tokens` and `ce_nll` given `ce_weights`;
            `support/mean` and `support/p99` (words per token that has a support),
            `support/singletons` (share of these) and `support/gathered` (share of all tokens),
            given a `support`.
        `logps`, `entropy`: float32 in the shape of `targets`, 0 where masked and without a weight
            in `ce_weights`, detached (for differentiable ones see `linear_logprobs`).

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came. Values on the
            device (target ids, a mask other than 0/1, `cu_seqlens`) are read together with the
            row counts, in the call's one device-to-host transfer; the sampled backward has one
            more per chunk.
        RuntimeError: on double backward.

    Under autocast on a GPU the GEMMs run in its dtype; a float32 `weight` is copied to it once per
    call, as autocast does for any linear layer. On a CPU autocast changes nothing here.

    Reference: `grpo_kernels.reference.fused_grpo_loss`, in any dtype up to float64.
    """
    operands, call, inputs = loss_call(
        hidden,
        weight,
        targets,
        advantages,
        mask,
        config=config,
        old_logps=old_logps,
        ref_logps=ref_logps,
        sampling_logps=sampling_logps,
        ce_weights=ce_weights,
        num_items=num_items,
        entropy_threshold=entropy_threshold,
        temperature=temperature,
        bias=bias,
        low_rank=low_rank,
        logit_scale=logit_scale,
        softcap=softcap,
        logits_dtype=logits_dtype,
        batch_invariant=batch_invariant,
        matmul=matmul,
        cu_seqlens=cu_seqlens,
        backward=backward,
        tolerance=tolerance,
        seed=seed,
        backend=backend,
        chunk_bytes=chunk_bytes,
        capturable=capturable,
        vocab_group=vocab_group,
        vocab_start=vocab_start,
        hidden_layout=hidden_layout,
    )
    with_grad = None if capturable else _tokens_with_grad(config, inputs)
    if support is not None:
        call = replace(with_support(call, support), with_grad=with_grad)
    loss, metrics, logps, entropy = _loss(operands, call, config, inputs, with_grad)
    if call.support is not None:
        assert call.mask is not None
        metrics = metrics | call.support.metrics((call.mask | call.support.tokens).sum())
    shape = call.layout.shape
    return GRPOLossOutput(
        loss, metrics, logps.detach().reshape(shape), entropy.detach().reshape(shape)
    )


def _loss(
    operands: HeadOperands,
    call: HeadCall,
    config: GRPOLossConfig,
    inputs: LossInputs,
    with_grad: Tensor | None,
) -> tuple[Any, ...]:
    """The loss, its metrics, and the log-prob and entropy of every token, `[N]`."""
    one_pass = token_local(config, inputs)
    if call.sampling is not None and not one_pass:
        raise ValueError(
            "backward: expected 'exact', as this loss takes two passes and the sampled one is for "
            "losses of one (GRPOLossConfig.one_pass); got 'sampled'"
        )
    makes_gradients = one_pass and any(operands.wants_grad())
    plan = plan_rows(
        call.mask,
        with_grad,
        call.checks,
        num_tokens=call.layout.num_tokens,
        weight=operands.weight,
        chunk_bytes=call.chunk_bytes,
        capturable=call.capturable,
        shard=call.shard,
        **chunk_layout(call, makes_gradients, strips=one_sweep(config, call)),
    )
    if call.support is not None and plan.num_rows == 0:
        one_pass = False  # over the words of a support a second pass costs nothing
    if one_pass:
        loss, logps, entropy, d_logps, d_entropy, sampled = OnePassLoss.apply(
            *operands, config, inputs, call, plan, operands.wants_grad()
        )
        metrics = loss_metrics(config, inputs, logps, entropy, d_logps, d_entropy)
    else:
        sampled = {}
        logps, entropy, _ = flat_logprobs(operands, call, plan, entropy=True)
        loss, metrics = flat_loss(config, inputs, logps, entropy, call.backend)
    return loss, metrics | sampled, logps, entropy


def _tokens_with_grad(config: GRPOLossConfig, inputs: LossInputs) -> Tensor | None:
    """The tokens that may have a gradient, bool `[N]`, as far as known beforehand; None: all."""
    with_grad = _with_grad_of_policy(config, inputs)
    if with_grad is None or inputs.ce_weights is None:
        return with_grad
    return with_grad | (inputs.ce_weights != 0)


def _with_grad_of_policy(config: GRPOLossConfig, inputs: LossInputs) -> Tensor | None:
    if config.beta or config.entropy_coef or callable(config.loss_type):
        return None
    with_grad = inputs.advantages != 0
    if token_local(config, inputs):
        weights = inputs.importance_sampling_weights
        return with_grad if weights is None else with_grad & (weights != 0)
    if config.top_entropy_quantile < 1 or inputs.sequences is None:
        return None
    # A token of advantage 0 still counts in the mean over its sequence.
    if inputs.mask is not None:
        with_grad = with_grad & inputs.mask
    sequences = inputs.sequences
    return sequences.spread(sequences.sum(with_grad.float())) > 0

"""The contenders: this library, PyTorch, and every peer that can be imported, on the same loss.

Each takes a workload and returns the DAPO loss per token, clipped at 0.2, over the unmasked tokens;
its backward leaves gradients in the hidden states and in a head that is not frozen. A peer that
computes log-probs only is completed with the reference's loss. Of a workload with a teacher the
loss is the mean reverse KL, from those that have one.

No peer takes a support. Trainers that score the policy which acted set the logits of all other ids
to -inf, as eager does here; it stands for every peer.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.workloads import Teacher, Workload
from grpo_kernels import (
    Reference,
    Support,
    fused_distillation_loss,
    fused_grpo_loss,
    grpo_loss,
    linear_logprobs,
    reference,
)

# Rows per chunk for Liger's fused linear loss, and on a CPU for torch's.
ROWS_PER_CHUNK = 512


@dataclass(frozen=True)
class Contender:
    """A loss; `absent` returns why it cannot run on a device, or None if it can."""

    loss: Callable[..., Tensor]
    absent: Callable[[torch.device], str | None] = lambda _: None
    divergence: Callable[..., Tensor] | None = None  # the loss of a workload with a teacher

    def __call__(self, w: Workload) -> Tensor:
        """Returns the loss of a workload."""
        loss = self.loss if w.teacher is None else self.divergence
        assert loss is not None
        return loss(w)


def _loss_of(w: Workload, logps: Tensor) -> Tensor:
    logps = logps.float().view(w.targets.shape)
    return reference.grpo_loss(logps, w.advantages, w.mask, old_logps=w.old_logps).loss


def _rows(w: Workload) -> tuple[Tensor, Tensor]:
    return w.hidden.flatten(0, 1), w.targets.flatten()


def outside(support: Support, logits: Tensor) -> Tensor:
    """Marks what sampling did not keep, in the shape of the logits `[N, V]`."""
    ids, rows = support.token_ids, torch.arange(len(logits), device=logits.device)
    mask = torch.ones_like(logits, dtype=torch.bool)
    mask[rows.repeat_interleave(support.offsets.diff(), output_size=len(ids)), ids] = False
    return mask


def eager(w: Workload) -> Tensor:
    """Materializes the logits, -inf outside of kept sets; log_softmax, gather."""
    logits = (w.hidden @ w.weight.T).float()
    if w.support is not None:
        # In place: the product's backward needs no logits.
        logits.masked_fill_(outside(w.support, logits.flatten(0, -2)).view_as(logits), -torch.inf)
    return _loss_of(w, logits.log_softmax(-1).gather(-1, w.targets[..., None]).squeeze(-1))


def _logps(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = (hidden @ weight.T).float()
    return logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)


@cache
def _compiled_logps() -> Callable[..., Tensor]:
    return torch.compile(_logps)


def compiled(w: Workload) -> Tensor:
    hidden, targets = _rows(w)
    return _loss_of(w, _compiled_logps()(hidden, w.weight, targets))


def torch_linear_cross_entropy(w: Workload, **how: Any) -> Tensor:
    """Runs PyTorch's head with reduction "none", as a policy loss weighs every token."""
    hidden, targets = _rows(w)
    nll = F.linear_cross_entropy(hidden, w.weight, targets, reduction="none", **how)
    return _loss_of(w, -nll)


def torch_chunked(w: Workload) -> Tensor:
    """The same in chunks, whose logits the backward computes again.

    Torch's own choice suits a GPU: chunks of 8 of 1,024 rows, which take a CPU 7 times as long.
    """
    rows = ROWS_PER_CHUNK if w.hidden.device.type == "cpu" else None
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows)
    return torch_linear_cross_entropy(w, options=options)


def one_pass(w: Workload) -> Tensor:
    return fused_grpo_loss(
        w.hidden, w.weight, w.targets, w.advantages, w.mask, old_logps=w.old_logps,
        support=w.support,
    ).loss  # fmt: skip


def two_passes(w: Workload) -> Tensor:
    """Log-probs, then a loss over them, which the backward hands its gradient."""
    logps = linear_logprobs(w.hidden, w.weight, w.targets, w.mask, support=w.support).logps
    return grpo_loss(logps, w.advantages, w.mask, old_logps=w.old_logps).loss


def trl_logps(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Returns log-probs of rows by TRL's chunked head, as its trainer calls it."""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as CHUNK

    how = 1.0, CHUNK, None, 1.0, ("entropy",)
    return ChunkedLogProbFunction.apply(hidden, weight, None, targets, *how)[0]


def trl_chunked(w: Workload) -> Tensor:
    """Runs TRL's chunked head: on a GPU by Triton, on the unmasked tokens only, as TRL does.

    On a CPU it runs by torch operations on all tokens, which hold eight copies of a tile of logits.
    """
    from trl.kernels.chunked_logprob import _use_triton

    hidden, targets = _rows(w)
    mask = w.mask.flatten() if w.mask is not None and _use_triton(hidden.device) else None
    rows = slice(None) if mask is None else mask
    logps = trl_logps(hidden[rows], w.weight, targets[rows])
    if mask is not None:
        logps = logps.new_zeros(targets.shape).masked_scatter(mask, logps)
    return _loss_of(w, logps)


def _liger_mask(w: Workload) -> Tensor:
    return (torch.ones_like(w.targets) if w.mask is None else w.mask).float()


def liger_fused_linear(w: Workload) -> Tensor:
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss

    # By default a chunk is one sequence; those of the workloads are too short to be fast.
    chunk_size = max(1, ROWS_PER_CHUNK // w.targets.shape[1])
    loss = LigerFusedLinearGRPOLoss(
        beta=0.0, use_ref_model=False, loss_type="dapo", chunk_size=chunk_size,
        compiled=w.hidden.device.type == "cuda",
    )  # fmt: skip
    tensors = w.hidden, w.weight, w.targets, _liger_mask(w), w.advantages
    return loss(*tensors, old_per_token_logps=w.old_logps)[0]


def liger_triton(w: Workload) -> Tensor:
    """Runs Liger's kernel on materialized logits; it drops the last position, so one is added."""
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    logits = F.pad(w.hidden, (0, 0, 0, 1)) @ w.weight.T
    return triton_grpo_loss(
        logits, w.old_logps, None, w.targets, w.advantages, _liger_mask(w), temperature=1.0,
        beta=0.0, eps_low=0.2, eps_high=0.2, loss_type="dapo", reduce=True,
    )[0]  # fmt: skip


def _teacher(w: Workload) -> Teacher:
    assert w.teacher is not None
    return w.teacher


def _mean(w: Workload, divergence: Tensor) -> Tensor:
    rows = slice(None) if w.mask is None else w.mask.flatten()
    return divergence.flatten()[rows].mean()


def eager_divergence(w: Workload) -> Tensor:
    """Materializes both models' logits and log-probs."""
    states, head = _teacher(w)
    s = (w.hidden @ w.weight.T).float().log_softmax(-1)
    t = (states @ head.T).float().log_softmax(-1)
    return _mean(w, (s.exp() * (s - t)).sum(-1))


def fused_divergence(w: Workload) -> Tensor:
    return fused_distillation_loss(w.hidden, w.weight, Reference(*_teacher(w)), w.mask).loss


def trl_divergence(w: Workload) -> Tensor:
    """Runs TRL's chunked divergence; `beta` 1 is the reverse KL."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    states, head = _teacher(w)
    models = w.hidden.flatten(0, 1), w.weight, None, states.flatten(0, 1), head, None
    return _mean(w, ChunkedDivergenceFunction.apply(*models, 1.0)[0])


def liger_divergence(w: Workload) -> Tensor:
    """Runs Liger's fused linear JSD; `beta` 1 is the reverse KL."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss = LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=1.0, chunk_size=ROWS_PER_CHUNK,
        compiled=w.hidden.device.type == "cuda",
    )  # fmt: skip
    states, head = _teacher(w)
    hidden, labels = _labelled(w)
    return loss(hidden, w.weight, states.flatten(0, 1), head, labels)


def _labelled(w: Workload) -> tuple[Tensor, Tensor]:
    """Rows with the targets of a cross-entropy, which ignores -100."""
    hidden, targets = _rows(w)
    return hidden, targets if w.mask is None else targets.masked_fill(~w.mask.flatten(), -100)


def liger_scaled_cross_entropy(w: Workload) -> Tensor:
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import (
        LigerFusedLinearScaledCrossEntropyFunction as Function,
    )

    hidden, targets = _labelled(w)
    out: Any = Function.apply(hidden, w.weight, targets, 1.0)
    return _loss_of(w, -(out[0] if isinstance(out, tuple) else out))


def cut_cross_entropy(w: Workload) -> Tensor:
    """Runs with the default filter, which drops small gradients."""
    from cut_cross_entropy import linear_cross_entropy

    hidden, targets = _labelled(w)
    return _loss_of(w, -linear_cross_entropy(hidden, w.weight, targets, reduction="none"))


def _needs(package: str, *, cuda: bool = False) -> Callable[[torch.device], str | None]:
    def absent(device: torch.device) -> str | None:
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
        return "needs CUDA" if cuda and device.type != "cuda" else None

    return absent


def _compiler_absent(device: torch.device) -> str | None:
    if device.type == "cpu" and not (shutil.which("g++") or shutil.which("clang++")):
        return "torch.compile needs a C++ compiler"
    return None


def _torch_has(name: str, module: Any) -> Callable[[torch.device], str | None]:
    return lambda _: None if hasattr(module, name) else f"torch {torch.__version__} has no {name}"


BASELINE = "eager, log_softmax"
OURS = ("ours, one pass", "ours, two passes")
# In the order in which they are measured: a run may end early, and what compiles is slow to begin.
CONTENDERS: dict[str, Contender] = {
    BASELINE: Contender(eager, divergence=eager_divergence),
    OURS[0]: Contender(one_pass, divergence=fused_divergence),
    OURS[1]: Contender(two_passes),
    "torch linear CE": Contender(torch_linear_cross_entropy, _torch_has("linear_cross_entropy", F)),
    "torch linear CE, chunked": Contender(
        torch_chunked, _torch_has("LinearCrossEntropyOptions", torch.nn)
    ),
    "TRL chunked head": Contender(trl_chunked, _needs("trl"), trl_divergence),
    "Liger scaled CE": Contender(liger_scaled_cross_entropy, _needs("liger_kernel")),
    "cut-cross-entropy": Contender(cut_cross_entropy, _needs("cut_cross_entropy", cuda=True)),
    "Liger Triton loss": Contender(liger_triton, _needs("liger_kernel", cuda=True)),
    "Liger fused linear": Contender(liger_fused_linear, _needs("liger_kernel"), liger_divergence),
    "eager, compiled": Contender(compiled, _compiler_absent),
}
# Modules of peers that take seconds to import.
IMPORTED = ("trl.trainer.utils", "trl.kernels.chunked_logprob", "liger_kernel.chunked_loss")


def contenders_of(w: Workload) -> list[str]:
    """Returns the names of contenders that compute a workload's loss."""
    if w.support is not None:
        return [BASELINE, *OURS]
    return [n for n, x in CONTENDERS.items() if w.teacher is None or x.divergence is not None]

"""The loss of a micro-batch: TRL's value, with a gradient made in one pass where that is exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor

from ...head.lm_head import Support
from ...head.support import batch_support
from ..transformers import Objective, has_fused_head
from . import exact_kl
from .loss import accumulation_steps, check_agreement, check_is_due, is_token_local, objective_of
from .replay import KEY
from .state import state_of

KEYWORD = "fused_lm_head"  # TRL's, too
# TRL's own loss of a micro-batch, by the model that it calls and its inputs.
TRLLoss = Callable[[Any, dict[str, Any]], Tensor]


class ModelCall:
    """A stand-in for the model that TRL calls, which also computes an objective's loss.

    The result comes from the objective, as a wrapper of the model may round its output (FSDP2 under
    accelerate: to bf16).
    """

    # The trainer with the reference of an exact KL, if any.
    trainer: Any = None

    def __init__(self, model: Any, objective: Objective, length: int, fused: bool) -> None:
        self.model, self.objective, self.length, self.fused = model, objective, length, fused

    def __call__(self, **inputs: Any) -> Any:
        if not self.fused:
            return self.model(**inputs)
        inputs["logits_to_keep"] = self.length
        if self.trainer is not None:
            reference = exact_kl.reference_of(self.trainer, inputs, KEYWORD)
            self.objective.loss_arguments["reference"] = reference
        self.model(**inputs | {KEYWORD: self.objective})
        out, old_logps = self.objective.output, self.objective.old_logps
        if out is None:
            raise ValueError(
                "model: its forward was replaced after this trainer was constructed, as TRL's "
                "GRPOTrainer does: give each trainer a model of its own"
            )
        assert out.logps is not None and out.entropy is not None
        logps = out.logps
        if old_logps is not None:
            # Masked tokens are not scored. TRL multiplies their ratio by 0, so it must be finite.
            assert self.objective.mask is not None
            logps = torch.where(self.objective.mask.bool(), logps, old_logps.float())
        return SimpleNamespace(log_probs=logps, entropy=out.entropy, aux_loss=out.aux_loss)


class _Replayed(ModelCall):
    """A model call for log-probs of completions over their supports, some rows at a time."""

    def __init__(self, model: Any, rows: Sequence[Support], length: int, fused: bool) -> None:
        super().__init__(model, Objective(), length, fused)
        self.rows = iter(rows)

    def __call__(self, **inputs: Any) -> Any:
        rows = list(islice(self.rows, len(inputs["input_ids"])))
        self.objective = Objective(support=batch_support(rows, self.length))
        return super().__call__(**inputs)


def plain_call(model: Any, rows: Sequence[Support] | None, length: int) -> ModelCall:
    """Wraps a model so that it returns log-probs, over the completions' supports if any."""
    fused = has_fused_head(extract_model_from_parallel(model))
    if rows is None:
        return ModelCall(model, Objective(), length, fused)
    return _Replayed(model, rows, length, fused)


def loss_of(
    inner: TRLLoss, trainer: Any, model: Any, inputs: dict[str, Any], share: float = 1.0
) -> Tensor:
    """Returns TRL's loss of the rows in `inputs`, or the user's own; TRL's code logs its metrics.

    `share`: these rows' part of the loss's denominator.
    """
    state = state_of(trainer)
    assert state is not None
    length = inputs["completion_ids"].shape[1]
    options, fused = state.options, has_fused_head(extract_model_from_parallel(model))
    replaces = options.loss is not None or options.exact_kl
    if not (fused and (replaces or (torch.is_grad_enabled() and is_token_local(trainer)))):
        call = plain_call(model, inputs[KEY] if state.replay else None, length)
        if state.explainer is None:
            return inner(call, inputs)
        objective, scale = objective_of(trainer, inputs, None, share)
        trl_loss = inner(call, inputs)
        state.explainer.add(inputs, call.objective.output, trl_loss, objective, scale)
        return trl_loss
    support = batch_support(inputs[KEY], length) if state.replay else None
    # Built before TRL's code runs, which advances the entropy coefficient to the next step.
    objective, scale = objective_of(trainer, inputs, support, share)
    call = ModelCall(model, objective, length, True)
    if options.exact_kl:
        call.trainer = trainer
    trl_loss = inner(call, inputs)
    out = objective.output
    assert out is not None and out.loss is not None
    our_loss, trl_policy_loss = out.loss * scale, trl_loss.detach()
    if state.explainer is not None:
        state.explainer.add(inputs, out, our_loss, objective, scale)
    if trainer.aux_loss_enabled:
        assert out.aux_loss is not None
        coefficient = trainer.router_aux_loss_coef / max(1, accumulation_steps(trainer))
        trl_policy_loss = trl_policy_loss - coefficient * out.aux_loss.detach()
    if options.exact_kl:
        assert out.metrics is not None
        exact_kl.log(trainer, out.metrics["kl"])
    if replaces:
        return our_loss + (trl_loss - trl_policy_loss)
    if check_is_due(state):
        check_agreement(trainer, objective, float(trl_policy_loss), float(our_loss.detach()))
    # TRL's loss carries the gradient of the experts' loss; the other term adds 0 and our gradient.
    return trl_loss + (our_loss - our_loss.detach())

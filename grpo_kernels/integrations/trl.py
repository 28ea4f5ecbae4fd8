"""Gives TRL's GRPOTrainer this library's LM head: same arguments, loss, metrics and gradients.

    from grpo_kernels.integrations.trl import FusedGRPOTrainer      # instead of GRPOTrainer
    trainer = FusedGRPOTrainer(model, reward_funcs=..., args=GRPOConfig(...), train_dataset=...)

TRL's own code computes the loss and what it logs; it asks the model for log-probs and entropies,
which here come from `attach_fused_head`. If the objective is token-local, the gradient is computed
along with the log-probs, in one pass: the returned loss has TRL's value and our gradient, and the
two losses are compared now and then. Otherwise TRL's loss is differentiated through
`linear_logprobs`.

A TRL that is newer than the tested ones warns. This file, `trl_loss.py`, `trl_replay.py`,
`trl_exact_kl.py` and `trl_versions.py` alone depend on private parts of TRL:

- `GRPOTrainer._compute_loss`;
- `GRPOTrainer._get_per_token_logps_and_entropies`, which calls `model(..., fused_lm_head=True)`, or
  before 1.15 `model(...)`, and functions of its module on the logits;
- `grpo_trainer.add_fused_lm_head`, which the constructor calls on its models, from 1.15 on;
- `grpo_trainer.BaseTunerLayer`, by which the constructor refuses adapters on the head (TRL's head
  would leave them out);
- `_entropy_bonus_enabled` and `_last_world_entropy`, the state of the entropy bonus;
- with `replay_support`, `_generate_single_turn`, which calls `generate` of the unwrapped model, and
  `_generate_and_score_completions`, whose dict is shuffled and split, lists included; with vLLM
  also `vllm_generation.LLM`, which constructs the engine, and the `generate` of `llm`, called once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..head.execution import Execution
from ..head.lm_head import Support
from ..head.support import batch_support
from .hf_head import head_of, is_prompt_learning
from .patching import Patch, Replacement, check_options
from .trl_versions import (
    ASKS_FOR_LOGITS,
    DIVIDES_BY_BATCH,
    LogitsInName,
    check_has_head,
    check_parts,
    labels_of,
    reading,
)  # fmt: skip

# isort: split
from accelerate.utils import extract_model_from_parallel
from trl.trainer import grpo_trainer
from trl.trainer.grpo_trainer import GRPOTrainer

from . import trl_exact_kl
from .transformers import Objective, attach_fused_head, has_fused_head
from .trl_loss import (
    OwnLossType,
    accumulation_steps,
    check_agreement,
    check_is_due,
    check_own,
    config_of,
    is_token_local,
    objective_of,
    own_of,
)
from .trl_replay import KEY, SupportReplay, masks_of_vllm

_LOSS, _LOGPS = "_compute_loss", "_get_per_token_logps_and_entropies"
_GENERATE, _SCORE = "_generate_single_turn", "_generate_and_score_completions"
_KEYWORD = "fused_lm_head"  # TRL's, too
# Attaches the head to a model: with a temperature, and TRL's cast_lm_head_to_fp32.
_Attach = Callable[[Any, float, bool], None]


class FusedGRPOTrainer(GRPOTrainer):
    """Trains like TRL's `GRPOTrainer` without computing logits; takes five more arguments.

    Args:
        args, kwargs: arguments of `trl.GRPOTrainer`.
        execution: backend and memory of the head's calls.
        logits_dtype: as in `LMHead`.
        replay_support: record the ids that `top_p`, `top_k` and `min_p` kept for each sampled
            token. Log-probs (policy, old policy, reference), entropy and loss are then those of the
            truncated policy that sampled.
        loss: your own loss instead of TRL's: an instance of a class of `grpo_kernels.loss.losses`,
            or a callable (`docs/objectives.md`). `beta`, the entropy bonus and TRL's metrics still
            apply; other options of TRL's loss (`loss_type`, `epsilon`) raise an error.
        exact_kl: `beta` weights the KL over the full vocabulary, for which the reference's layers
            run with each micro-batch. Logged as `kl_exact`; TRL's `kl` is still the estimate.

    Raises:
        ValueError: PEFT with virtual tokens, a model whose logits are not a linear layer of its
            last hidden states, or `replay_support` with sampling that truncates nothing or that
            cannot be recorded (a vLLM server, continuous batching, tools, a `rollout_func`).
    """

    def __init__(
        self,
        *args: Any,
        execution: Execution = Execution(),  # noqa: B008 - frozen
        logits_dtype: str = "fp32",
        replay_support: bool = False,
        loss: OwnLossType | None = None,
        exact_kl: bool = False,
        **kwargs: Any,
    ) -> None:
        attach = _attaching(execution, logits_dtype)
        with Patch(_constructor_patches(attach, replay_support)):
            super().__init__(*args, **kwargs)
        _prepare(self, attach, replay_support, loss, exact_kl)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        return _generate(super()._generate_single_turn, self, *args, **kwargs)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        return _score(super()._generate_and_score_completions, self, inputs)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        return _compute_loss(super()._compute_loss, self, model, inputs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        return _logps(super()._get_per_token_logps_and_entropies, self, *args, **kwargs)


class patch_trl(Patch):
    """Makes every `GRPOTrainer` that is constructed from now on work as a `FusedGRPOTrainer`.

    Use it if other code constructs the trainer, or for a subclass of TRL's. Called as a function,
    the patch lasts until `undo()`; as a context manager, until the end of the block:

        with patch_trl():
            trainer = GRPOTrainer(...)
            trainer.train()

    Trainers made before the patch, or trained after it, compute as TRL's do.

    Args:
        replay_support, logits_dtype, execution, loss, exact_kl: as in `FusedGRPOTrainer`.

    Raises:
        RuntimeError: TRL is patched already.
    """

    def __init__(
        self,
        *,
        replay_support: bool = False,
        logits_dtype: str = "fp32",
        execution: Execution = Execution(),  # noqa: B008 - frozen
        loss: OwnLossType | None = None,
        exact_kl: bool = False,
    ) -> None:
        attach, init_of_trl = _attaching(execution, logits_dtype), GRPOTrainer.__init__
        wrappers: dict[str, Callable[..., Any]] = {
            _LOSS: _compute_loss, _LOGPS: _logps, _GENERATE: _generate, _SCORE: _score
        }  # fmt: skip

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            init_of_trl(self, *args, **kwargs)
            _prepare(self, attach, replay_support, loss, exact_kl)

        def wrapped(name: str) -> Callable[..., Any]:
            own = getattr(GRPOTrainer, name)

            def method(self: Any, *args: Any, **kwargs: Any) -> Any:
                return wrappers[name](partial(own, self), self, *args, **kwargs)

            return method

        super().__init__([
            *_constructor_patches(attach, replay_support),
            (GRPOTrainer, "__init__", init),
            *((GRPOTrainer, name, wrapped(name)) for name in wrappers),
        ])  # fmt: skip


def _attaching(execution: Execution, logits_dtype: str) -> _Attach:
    """Returns what attaches the head to a trainer's models; checks the options now."""
    check_options(execution, logits_dtype=logits_dtype)

    def attach(model: Any, temperature: float, float32: bool) -> None:
        if float32 and head_of(model).adapters:
            raise ValueError(
                "cast_lm_head_to_fp32=True does not work with an adapter on lm_head: TRL's cast "
                "leaves the adapter out of sampling. Pass cast_lm_head_to_fp32=False"
            )
        attach_fused_head(
            model,
            temperature=temperature,
            float32=float32,
            keyword=_KEYWORD,
            logits_dtype=logits_dtype,
            execution=execution,
        )

    return attach


def _constructor_patches(attach: _Attach, replay_support: bool) -> list[Replacement]:
    """Wraps what the constructor of TRL's trainer calls, so that it builds what ours needs."""

    def add_fused_lm_head(
        model: Any,
        temperature: float = 1.0,
        cast_lm_head_to_fp32: bool = False,
        outputs: tuple[str, ...] = ("log_probs",),
    ) -> None:
        unknown = sorted(set(outputs) - {"log_probs", "entropy"})
        if unknown:
            raise ValueError(f"outputs: expected log_probs, entropy; got {unknown[0]!r}")
        attach(model, temperature, cast_lm_head_to_fp32)

    class NoLayer:
        """A class without instances: TRL then finds no adapter on the head to refuse."""

    check_parts(GRPOTrainer, (_LOSS, _LOGPS, _GENERATE, _SCORE), grpo_trainer)
    # TRL imports the second one only if PEFT is installed, and has the first one from 1.15 on.
    ours = {"add_fused_lm_head": add_fused_lm_head, "BaseTunerLayer": NoLayer}
    patches = [(grpo_trainer, name, x) for name, x in ours.items() if hasattr(grpo_trainer, name)]
    return [*patches, *masks_of_vllm()] if replay_support else patches


def _prepare(
    trainer: Any, attach: _Attach, replay_support: bool, loss: OwnLossType | None, exact_kl: bool
) -> None:
    """Checks a trainer that TRL has constructed, and gives it what it needs besides."""
    if is_prompt_learning(trainer.model):
        raise ValueError(
            "peft_config: expected adapters inside the layers (such as LoRA); got "
            f"{trainer.model.active_peft_config.peft_type.value}, which puts virtual tokens before "
            "the prompt"
        )
    if DIVIDES_BY_BATCH and trainer.loss_type == "luspo":
        raise ValueError(
            "loss_type: 'luspo' does not work with TRL before 1.10, which trains padding: "
            "upgrade TRL or pass another loss_type"
        )
    if ASKS_FOR_LOGITS:
        if trainer.use_liger_kernel:
            raise ValueError(
                "use_liger_kernel=True does not work with TRL before 1.15, where it selects "
                "another fused head: pass use_liger_kernel=False, or upgrade TRL"
            )
        for model in filter(None, (trainer.model, trainer.ref_model)):
            inner, float32 = extract_model_from_parallel(model), trainer.args.cast_lm_head_to_fp32
            attach(inner, trainer.temperature, float32)
    check_has_head(has_fused_head(extract_model_from_parallel(trainer.model)))
    trainer._own_loss, trainer._exact_kl = loss, exact_kl
    if exact_kl:
        token_local = loss is not None or is_token_local(trainer)
        trl_exact_kl.check(trainer, token_local, replay_support)
        if trainer.ref_model is not None:
            # A head that requires grad would be copied for every reference.
            trainer.ref_model.requires_grad_(False)
    if loss is not None:
        check_own(trainer, loss)
    if loss is not None or is_token_local(trainer):
        config_of(trainer, 1)  # raises now what would be raised in the first step
    trainer._support_replay = SupportReplay(trainer) if replay_support else None
    trainer._explainer = None  # an `ExplainCallback`


def _replay(trainer: Any) -> SupportReplay | None:
    """Returns what records supports; None without, and in a trainer made before the patch."""
    return getattr(trainer, "_support_replay", None)


def _explainer(trainer: Any) -> Any:
    """Returns what explains losses (`trl_explain.py`); None without."""
    return getattr(trainer, "_explainer", None)


def _generate(own: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    replay = _replay(trainer)
    if replay is None:
        return own(*args, **kwargs)
    return replay.generate(own, trainer, *args, **kwargs)


def _score(own: Callable[..., Any], trainer: Any, inputs: Any) -> Any:
    replay = _replay(trainer)
    return own(inputs) if replay is None else replay.score(own, inputs)


def _logps(
    own: Callable[..., Any],
    trainer: Any,
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    logits_to_keep: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls TRL's method with a stand-in for the model, unless it got one from `_compute_loss`."""
    if not isinstance(model, _Call):
        replay = _replay(trainer)
        model = _plain_call(model, replay.scored_rows() if replay else None, logits_to_keep)
    with reading(grpo_trainer) if ASKS_FOR_LOGITS else nullcontext():
        return own(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)


class _Call:
    """A stand-in for the model that TRL calls: it asks for an objective, its loss included.

    The result is taken from the objective, not from the wrapped model, as a wrapper may round it
    (FSDP2 under accelerate: to bf16).
    """

    # The trainer whose reference is to be measured from, if any.
    trainer: Any = None

    def __init__(self, model: Any, objective: Objective, length: int, fused: bool) -> None:
        self.model, self.objective, self.length, self.fused = model, objective, length, fused

    def __call__(self, **inputs: Any) -> Any:
        if not self.fused:
            return self.model(**inputs)
        if ASKS_FOR_LOGITS:
            inputs["labels"] = labels_of(inputs, self.length)
        inputs["logits_to_keep"] = self.length
        if self.trainer is not None:
            reference = trl_exact_kl.reference_of(self.trainer, inputs, _KEYWORD)
            self.objective.loss_arguments["reference"] = reference
        self.model(**inputs | {_KEYWORD: self.objective})
        out, old_logps = self.objective.output, self.objective.old_logps
        assert out is not None and out.logps is not None and out.entropy is not None
        logps = out.logps
        if old_logps is not None:
            # Masked tokens are not scored. TRL multiplies their ratio by 0, so it must be finite.
            assert self.objective.mask is not None
            logps = torch.where(self.objective.mask.bool(), logps, old_logps.float())
        return SimpleNamespace(
            log_probs=logps, entropy=out.entropy, aux_loss=out.aux_loss,
            logits=LogitsInName(logps, out.entropy),
        )  # fmt: skip


class _Replayed(_Call):
    """A model call for log-probs of completions over their supports, of some rows after others."""

    def __init__(self, model: Any, rows: Sequence[Support], length: int, fused: bool) -> None:
        super().__init__(model, Objective(), length, fused)
        self.rows = iter(rows)

    def __call__(self, **inputs: Any) -> Any:
        rows = list(islice(self.rows, len(inputs["input_ids"])))
        self.objective = Objective(support=batch_support(rows, self.length))
        return super().__call__(**inputs)


def _plain_call(model: Any, rows: Sequence[Support] | None, length: int) -> _Call:
    """Wraps a model so that it returns log-probs, over the supports of the completions if any."""
    fused = has_fused_head(extract_model_from_parallel(model))
    if rows is None:
        return _Call(model, Objective(), length, fused)
    return _Replayed(model, rows, length, fused)


def _compute_loss(
    compute_trl_loss: Callable[[Any, dict[str, Any]], Tensor],
    trainer: Any,
    model: Any,
    inputs: dict[str, Any],
) -> Tensor:
    """Returns TRL's loss, with a gradient made in one pass if the objective allows it.

    Or the caller's own, beside which TRL computes what it logs.
    """
    own = own_of(trainer)
    is_fused = (
        not isinstance(model, _Call)
        and (
            own is not None
            or trl_exact_kl.uses_exact_kl(trainer)
            or (torch.is_grad_enabled() and is_token_local(trainer))
        )
        and has_fused_head(extract_model_from_parallel(model))
    )
    if not is_fused:
        if not isinstance(model, _Call):
            rows = inputs[KEY] if _replay(trainer) else None
            model = _plain_call(model, rows, inputs["completion_ids"].shape[1])
        if (explainer := _explainer(trainer)) is None:
            return compute_trl_loss(model, inputs)
        objective, scale = objective_of(trainer, inputs, None)
        trl_loss = compute_trl_loss(model, inputs)
        explainer.add(inputs, model.objective.output, trl_loss, objective, scale)
        return trl_loss
    length = inputs["completion_ids"].shape[1]
    support = batch_support(inputs[KEY], length) if _replay(trainer) else None
    # Built before TRL's code runs, which advances the entropy coefficient to the next step.
    objective, scale = objective_of(trainer, inputs, support)
    call = _Call(model, objective, length, True)
    exact = trl_exact_kl.uses_exact_kl(trainer)
    if exact:
        call.trainer = trainer
    trl_loss = compute_trl_loss(call, inputs)
    out = objective.output
    assert out is not None and out.loss is not None
    our_loss, trl_policy_loss = out.loss * scale, trl_loss.detach()
    if (explainer := _explainer(trainer)) is not None:
        explainer.add(inputs, out, our_loss, objective, scale)
    if trainer.aux_loss_enabled:
        assert out.aux_loss is not None
        coefficient = trainer.router_aux_loss_coef / max(1, accumulation_steps(trainer))
        trl_policy_loss = trl_policy_loss - coefficient * out.aux_loss.detach()
    if exact:
        assert out.metrics is not None
        trl_exact_kl.log(trainer, out.metrics["kl"])
    if own is not None or exact:
        return our_loss + (trl_loss - trl_policy_loss)
    if check_is_due(trainer):
        check_agreement(trainer, objective, float(trl_policy_loss), float(our_loss.detach()))
    # TRL's loss carries the gradient of the experts' loss; the other term adds 0 and our gradient.
    return trl_loss + (our_loss - our_loss.detach())

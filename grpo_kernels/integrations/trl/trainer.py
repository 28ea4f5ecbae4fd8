"""`FusedGRPOTrainer` and `patch_trl`: the places where TRL's methods are wrapped."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import trl
from accelerate.utils import extract_model_from_parallel
from torch import Tensor
from transformers import TrainerCallback
from trl.trainer import grpo_trainer
from trl.trainer.grpo_trainer import GRPOTrainer

from ...head.execution import Execution
from ..hf_head import head_of, is_prompt_learning
from ..patching import Patch, Replacement, is_ours
from ..private import TESTED_VERSIONS, trl_part
from ..transformers import attach_fused_head, has_fused_head
from . import exact_kl
from .deal import Dealer, zero_equal_groups
from .loss import check_own, config_of, is_token_local
from .micro_batch import KEYWORD, ModelCall, loss_of, plain_call
from .replay import SupportReplay, masks_of_vllm
from .state import Options, OwnLossType, State, set_state, state_of

# TRL's method, which a wrapper calls.
_Inner = Callable[..., Any]


class FusedGRPOTrainer(GRPOTrainer):
    """Trains like TRL's `GRPOTrainer` without storing logits; takes these further arguments.

    Args:
        args, kwargs: arguments of `trl.GRPOTrainer`.
        execution: backend and memory of the head's calls.
        logits_dtype: as in `LMHead`.
        replay_support: record the ids that `top_p`, `top_k` and `min_p` kept for each sampled
            token. Log-probs (policy, old policy, reference), entropy and loss are then over the
            truncated policy that sampled.
        loss: your own loss instead of TRL's: an instance of a class of `grpo_kernels.loss.losses`,
            or a callable (`docs/objectives.md`). `beta`, the entropy bonus and TRL's metrics still
            apply; other options of TRL's loss (`loss_type`, `epsilon`) raise an error.
        exact_kl: `beta` weights the KL over the full vocabulary, for which the reference's layers
            run with each micro-batch. Logged as `kl_exact`; TRL's `kl` is still the estimate.
        skip_untrained: completions of advantage 0 do not go through the model in updates. Weights
            are the same up to rounding; logged entropy and clip ratios exclude these completions.
            Includes `sort_by_length`, unless the loss is `bnpo`.
        sort_by_length: exchange completions between the micro-batches of an optimizer step, the
            longest first, and cut the padding of each micro-batch. Weights are the same up to
            rounding.
        zero_equal_groups: the advantages of a group whose rewards are all equal are exactly 0. In
            TRL they are rounding errors, which an optimizer like AdamW turns into full steps.

    Raises:
        ValueError: PEFT with virtual tokens, a model whose logits are not a linear layer of its
            last hidden states, or an option that does not work with TRL's, with the way out.
    """

    def __init__(
        self,
        *args: Any,
        execution: Execution = Execution(),  # noqa: B008 - frozen
        logits_dtype: str = "fp32",
        replay_support: bool = False,
        loss: OwnLossType | None = None,
        exact_kl: bool = False,
        skip_untrained: bool = False,
        sort_by_length: bool = False,
        zero_equal_groups: bool = True,
        **kwargs: Any,
    ) -> None:
        options = Options(
            execution=execution, logits_dtype=logits_dtype, replay_support=replay_support,
            loss=loss, exact_kl=exact_kl, skip_untrained=skip_untrained,
            sort_by_length=sort_by_length, zero_equal_groups=zero_equal_groups,
        )  # fmt: skip
        with Patch(_constructor_patches(options)):
            super().__init__(*args, **kwargs)
        _prepare(self, options)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        return _training_step(super().training_step, self, *args, **kwargs)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        return _prepare_inputs(super()._prepare_inputs, self, generation_batch)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        return _rewards(super()._calculate_rewards, self, *args, **kwargs)

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

    Trainers constructed before the patch, or trained after it, compute as TRL's do; training after
    the patch is an error if an option would be ignored. A subclass that overrides `_compute_loss`
    takes options of the loss only if it calls TRL's.

    Args:
        execution, options: arguments of `FusedGRPOTrainer` that TRL's trainer does not have.

    Raises:
        RuntimeError: TRL is patched already.
    """

    def __init__(self, *, execution: Execution = Execution(), **options: Any) -> None:  # noqa: B008 - frozen
        checked, init_of_trl = Options(execution=execution, **options), GRPOTrainer.__init__

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            init_of_trl(self, *args, **kwargs)
            _prepare(self, checked)
            self.add_callback(_PatchLasts(self))

        def wrapped(name: str) -> Callable[..., Any]:
            inner = getattr(GRPOTrainer, name)

            def method(self: Any, *args: Any, **kwargs: Any) -> Any:
                if isinstance(self, FusedGRPOTrainer):  # made before the patch
                    return inner(self, *args, **kwargs)
                return _WRAPPERS[name](partial(inner, self), self, *args, **kwargs)

            return method

        super().__init__([
            *_constructor_patches(checked),
            (GRPOTrainer, "__init__", init),
            *((GRPOTrainer, name, wrapped(name)) for name in _WRAPPERS),
        ])  # fmt: skip


class _PatchLasts(TrainerCallback):
    """Checks that the patch under which a trainer was made is still in force when it trains."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        state, ended = state_of(self.trainer), not is_ours(vars(GRPOTrainer)["_compute_loss"])
        assert state is not None
        if ended and not isinstance(self.trainer, FusedGRPOTrainer):
            state.refuse_options(
                "without patch_trl, which has ended: call train() before it ends",
                ("replay_support",),
            )


def _constructor_patches(options: Options) -> list[Replacement]:
    """Patches of the functions that the constructor of TRL's trainer calls."""

    def add_fused_lm_head(
        model: Any,
        temperature: float = 1.0,
        cast_lm_head_to_fp32: bool = False,
        outputs: tuple[str, ...] = ("log_probs",),
    ) -> None:
        unknown = sorted(set(outputs) - {"log_probs", "entropy"})
        if unknown:
            raise ValueError(f"outputs: expected log_probs, entropy; got {unknown[0]!r}")
        _attach(model, options, temperature, cast_lm_head_to_fp32)

    class NoLayer:
        """A class without instances: TRL then finds no adapter on the head to refuse."""

    for name in _WRAPPERS:
        trl_part(GRPOTrainer, name)
    trl_part(grpo_trainer, "add_fused_lm_head")
    patches: list[Replacement] = [(grpo_trainer, "add_fused_lm_head", add_fused_lm_head)]
    if hasattr(grpo_trainer, "BaseTunerLayer"):  # with PEFT
        patches.append((grpo_trainer, "BaseTunerLayer", NoLayer))
    return [*patches, *masks_of_vllm()] if options.replay_support else patches


def _attach(model: Any, options: Options, temperature: float, float32: bool) -> None:
    """Attaches the head to a model; replaces an earlier trainer's head."""
    if float32 and head_of(model).adapters:
        raise ValueError(
            "cast_lm_head_to_fp32=True does not work with an adapter on lm_head: TRL's cast "
            "leaves the adapter out of sampling. Pass cast_lm_head_to_fp32=False"
        )
    attach_fused_head(
        model,
        temperature=temperature,
        float32=float32,
        keyword=KEYWORD,
        logits_dtype=options.logits_dtype,
        execution=options.execution,
    )


def _prepare(trainer: Any, options: Options) -> None:
    """Checks a trainer that TRL has constructed, and adds its `State`."""
    if is_prompt_learning(trainer.model):
        raise ValueError(
            "peft_config: expected adapters inside the layers (such as LoRA); got "
            f"{trainer.model.active_peft_config.peft_type.value}, which puts virtual tokens before "
            "the prompt"
        )
    if not has_fused_head(extract_model_from_parallel(trainer.model)):
        raise RuntimeError(
            f"trl: expected {TESTED_VERSIONS['trl']}, whose GRPOTrainer calls add_fused_lm_head; "
            f"got {trl.__version__}, which does not: use GRPOTrainer"
        )
    state = State(options)
    set_state(trainer, state)
    if options.exact_kl:
        token_local = options.loss is not None or is_token_local(trainer)
        exact_kl.check(trainer, token_local, options.replay_support)
        if trainer.ref_model is not None:
            # A head that requires a gradient would be copied for every micro-batch.
            trainer.ref_model.requires_grad_(False)
    if options.loss is not None:
        check_own(trainer)
    if options.loss is not None or is_token_local(trainer):
        config_of(trainer, 1)  # raises now, not in the first step
    if options.skip_untrained or options.sort_by_length:
        state.dealer = Dealer(options.skip_untrained)
        state.dealer.check(trainer)
    if options.replay_support:
        state.replay = SupportReplay(trainer)


def _training_step(inner: _Inner, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    state = state_of(trainer)
    if state is None:
        return inner(*args, **kwargs)
    state.took_part = False
    loss = inner(*args, **kwargs)
    state.check_took_part(trainer)
    return loss


def _prepare_inputs(inner: _Inner, trainer: Any, generation_batch: Any) -> Any:
    state = state_of(trainer)
    if state is None or state.dealer is None:
        return inner(generation_batch)
    return state.dealer.next_micro_batch(inner, trainer, generation_batch)


def _generate(inner: _Inner, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    state = state_of(trainer)
    if state is None or state.replay is None:
        return inner(*args, **kwargs)
    return state.replay.generate(inner, trainer, *args, **kwargs)


def _rewards(inner: _Inner, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Stores TRL's rewards of all processes until the advantages are known."""
    rewards, state = inner(*args, **kwargs), state_of(trainer)
    if state is not None:
        state.rewards = rewards
    return rewards


def _score(inner: _Inner, trainer: Any, inputs: Any) -> Any:
    state = state_of(trainer)
    if state is None:
        return inner(inputs)
    state.rewards = None
    batch = inner(inputs) if state.replay is None else state.replay.score(inner, inputs)
    if state.rewards is None or not (state.options.zero_equal_groups and _by_trl(trainer)):
        return batch
    return zero_equal_groups(trainer, state.rewards, batch)


def _by_trl(trainer: Any) -> bool:
    """True if TRL's own method, which our wrapper calls, makes the advantages."""
    classes = iter(type(trainer).__mro__)
    if isinstance(trainer, FusedGRPOTrainer):
        while next(classes) is not FusedGRPOTrainer:
            pass
        owners = (cls for cls in classes if "_generate_and_score_completions" in vars(cls))
        return next(owners) is GRPOTrainer
    return True


def _logps(
    inner: _Inner, trainer: Any, model: Any, input_ids: Tensor, attention_mask: Tensor,
    logits_to_keep: int, *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """Calls TRL's method with a stand-in for the model, unless `_compute_loss` passed one."""
    if not isinstance(model, ModelCall):
        state = state_of(trainer)
        rows = state.replay.scored_rows() if state is not None and state.replay else None
        model = plain_call(model, rows, logits_to_keep)
    return inner(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)


def _compute_loss(inner: _Inner, trainer: Any, model: Any, inputs: dict[str, Any]) -> Tensor:
    state = state_of(trainer)
    if state is None:
        return inner(model, inputs)
    state.took_part = True
    if state.dealer is not None:
        return state.dealer.loss(inner, trainer, model, inputs)
    return loss_of(inner, trainer, model, inputs)


_WRAPPERS: dict[str, Callable[..., Any]] = {
    "training_step": _training_step,
    "_prepare_inputs": _prepare_inputs,
    "_calculate_rewards": _rewards,
    "_generate_single_turn": _generate,
    "_generate_and_score_completions": _score,
    "_compute_loss": _compute_loss,
    "_get_per_token_logps_and_entropies": _logps,
}

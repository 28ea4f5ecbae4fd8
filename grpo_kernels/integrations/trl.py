"""TRL's GRPOTrainer on this library's head: the same arguments, loss, metrics and gradients.

    from grpo_kernels.integrations.trl import FusedGRPOTrainer      # instead of GRPOTrainer
    trainer = FusedGRPOTrainer(model, reward_funcs=..., args=GRPOConfig(...), train_dataset=...)

TRL's own code computes the loss and what it logs. It asks the model for log-probs and entropies;
here they come from `attach_fused_head`. Where the objective is token-local the loss's gradient is
made along with them, in one pass: TRL's loss is then the value, and ours the gradient, which are
compared in each step. Otherwise TRL's loss is differentiated through `linear_logprobs`.

Private of TRL are three names, all of them used in this file alone: `GRPOTrainer._compute_loss`,
and what the trainer's constructor calls, `grpo_trainer.add_fused_lm_head`, and by which it refuses
adapters on the head, which its own would leave out, `grpo_trainer.BaseTunerLayer`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..config import GRPOLossConfig
from .head import head_of, is_prompt_learning
from .transformers import attach_fused_head

SUPPORTED = "1.16"
_ANY_VERSION = "GRPO_KERNELS_ANY_TRL"


def check_version(installed: str) -> None:
    """Raises ImportError, and says what to install, unless it is a version that is tested."""
    if installed.split(".")[:2] == SUPPORTED.split("."):
        return
    message = (
        f"grpo_kernels.integrations.trl: expected TRL {SUPPORTED}, whose trainer it is tested "
        f"with; got {installed}: pip install 'trl=={SUPPORTED}.*'"
    )
    if not os.environ.get(_ANY_VERSION):
        raise ImportError(f"{message} (or set {_ANY_VERSION}=1 to try it all the same)")
    warnings.warn(message, stacklevel=3)


check_version(metadata.version("trl"))

from trl.trainer import grpo_trainer  # noqa: E402
from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402

# How far the two may be apart, both of them float32 and of the same log-probs.
_RELATIVE, _ABSOLUTE = 1e-3, 1e-4
# Those whose average is over the tokens of the whole step.
_STEP_WIDE = ("dapo", "cispo")
_TOKEN_LOCAL = ("grpo", "bnpo", "dr_grpo", "luspo", "sapo", *_STEP_WIDE)
_CLIPPED = ("grpo", "bnpo", "dr_grpo", "luspo", "dapo")


class FusedGRPOTrainer(GRPOTrainer):
    """TRL's `GRPOTrainer` without logits; takes its arguments, and one more.

    Args:
        args, kwargs: those of `trl.GRPOTrainer`.
        head_options: `backward`, `tolerance`, `seed`, `backend`, `chunk_bytes` of
            `linear_logprobs`, as a dict; None is none of them.

    Raises:
        ValueError: PEFT with virtual tokens; a model whose logits are no linear layer's.
    """

    def __init__(
        self, *args: Any, head_options: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        with _our_head(head_options or {}):
            super().__init__(*args, **kwargs)
        if is_prompt_learning(self.model):
            raise ValueError(
                "peft_config: expected adapters inside the layers (LoRA and its kind); got "
                f"{self.model.active_peft_config.peft_type.value}, which puts virtual tokens "
                "before the prompt"
            )

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        return _loss(super()._compute_loss, self, model, inputs)


class patch_trl:
    """Gives every `GRPOTrainer` made from here on the fused head, `FusedGRPOTrainer`'s.

    For a trainer that one does not construct oneself, or a subclass of TRL's. As a function it
    stays until `undo()`; as a context manager until the end of the block:

        with patch_trl():
            trainer = GRPOTrainer(...)
            trainer.train()

    Args:
        head_options: as `FusedGRPOTrainer`'s, by name.
    """

    def __init__(self, **head_options: Any) -> None:
        own = GRPOTrainer._compute_loss

        def fused(self: Any, model: Any, inputs: dict[str, Any]) -> Tensor:
            return _loss(partial(own, self), self, model, inputs)

        self._own_loss, self._head = own, _our_head(head_options)
        self._head.__enter__()
        GRPOTrainer._compute_loss = fused
        self._patched = True

    def undo(self) -> None:
        """Puts TRL's own back. Trainers made meanwhile keep their head; theirs is TRL's loss."""
        if self._patched:
            GRPOTrainer._compute_loss = self._own_loss
            self._head.__exit__(None, None, None)
        self._patched = False

    def __enter__(self) -> patch_trl:
        return self

    def __exit__(self, *_: Any) -> None:
        self.undo()


@contextmanager
def _our_head(options: dict[str, Any]) -> Iterator[None]:
    """The head that a trainer's constructor puts on its models."""

    def add_fused_lm_head(
        model: Any,
        temperature: float = 1.0,
        cast_lm_head_to_fp32: bool = False,
        outputs: tuple[str, ...] = ("log_probs",),
    ) -> None:
        unknown = sorted(set(outputs) - {"log_probs", "entropy"})
        if unknown:
            raise ValueError(f"outputs: expected log_probs, entropy; got {unknown[0]!r}")
        if cast_lm_head_to_fp32 and head_of(model).adapters:
            raise ValueError(
                "cast_lm_head_to_fp32: expected False with an adapter on lm_head, which TRL's cast "
                "would leave out of sampling; got True"
            )
        attach_fused_head(
            model, keyword="fused_lm_head", temperature=temperature,
            float32=cast_lm_head_to_fp32, **options,
        )  # fmt: skip

    class NoLayer:
        """What no layer is an instance of."""

    ours = {"add_fused_lm_head": add_fused_lm_head, "BaseTunerLayer": NoLayer}
    own = {name: getattr(grpo_trainer, name) for name in ours}
    vars(grpo_trainer).update(ours)
    try:
        yield
    finally:
        vars(grpo_trainer).update(own)


def _loss(
    own: Callable[[Any, dict[str, Any]], Tensor], trainer: Any, model: Any, inputs: dict[str, Any]
) -> Tensor:
    """TRL's loss; its gradient in one pass where the objective allows it."""
    if isinstance(model, _OnePass) or not torch.is_grad_enabled() or not _token_local(trainer):
        return own(model, inputs)
    # Before TRL's code, which moves the entropy's coefficient on to the next step.
    mask, config, arguments = _objective(trainer, inputs)
    accumulation = trainer.current_gradient_accumulation_steps if trainer.model.training else 1
    one_pass = _OnePass(model, {"mask": mask, "config": config, **arguments})
    value = own(one_pass, inputs)
    assert one_pass.output is not None
    mine = one_pass.output.loss
    if config.loss_type not in _STEP_WIDE:
        mine = mine / accumulation
    experts = 0.0
    if trainer.aux_loss_enabled:
        experts = trainer.router_aux_loss_coef * one_pass.output.aux_loss.detach() / accumulation
    _compare(float(value.detach() - experts), float(mine.detach()))
    # TRL's value, and the gradient of the experts' part; ours adds 0 to it and the gradient.
    return value + (mine - mine.detach())


def _token_local(trainer: Any) -> bool:
    return (
        trainer.loss_type in _TOKEN_LOCAL
        and trainer.importance_sampling_level == "token"
        and trainer.off_policy_mask_threshold is None
        and trainer.top_entropy_quantile == 1.0
    )


def _objective(
    trainer: Any, inputs: dict[str, Any]
) -> tuple[Tensor, GRPOLossConfig, dict[str, Any]]:
    """What TRL's loss computes from `inputs`, in this library's terms."""
    args, loss_type = trainer.args, trainer.loss_type
    training = trainer.model.training
    accumulation = trainer.current_gradient_accumulation_steps if training else 1
    mask = inputs["completion_mask"]
    if "tool_mask" in inputs:
        mask = mask * inputs["tool_mask"]
    advantages = inputs["advantages"]
    if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
        # Every loss here is linear in the advantages, but for their sign, and weights are >= 0.
        if advantages.ndim == 1:
            advantages = advantages[:, None]
        advantages = (advantages * inputs["importance_sampling_ratio"]).expand(mask.shape)
    options: dict[str, Any] = {
        "loss_type": loss_type, "beta": trainer.beta,
        "use_bias_correction_kl": args.use_bias_correction_kl,
    }  # fmt: skip
    if loss_type in _CLIPPED:
        options |= {"epsilon": trainer.epsilon_low, "epsilon_high": trainer.epsilon_high}
        options["delta"] = args.delta
    elif loss_type == "cispo":
        options["epsilon_high"] = trainer.epsilon_high
    elif loss_type == "sapo":
        options["sapo_temperature_pos"] = args.sapo_temperature_pos
        options["sapo_temperature_neg"] = args.sapo_temperature_neg
    if loss_type == "dr_grpo":
        options["max_completion_length"] = trainer.max_completion_length
    if trainer._entropy_bonus_enabled:
        adaptive = trainer.use_adaptive_entropy
        on = not adaptive or trainer._last_world_entropy <= args.entropy_target
        options["entropy_coef"] = trainer.entropy_coef if on else 0.0
        if loss_type in _STEP_WIDE:
            # TRL divides the bonus by the accumulation's steps, the rest by the step's tokens.
            options["entropy_coef"] /= accumulation
    arguments = {
        "advantages": advantages.float(), "old_logps": inputs.get("old_per_token_logps"),
        "ref_logps": inputs["ref_per_token_logps"] if trainer.beta else None,
    }  # fmt: skip
    if loss_type in _STEP_WIDE:
        # Of the generation batch; an optimizer step is one of several on it.
        tokens = inputs["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
        if training:
            tokens = tokens * accumulation / args.steps_per_generation
        arguments["num_items"] = tokens
    return mask, GRPOLossConfig(**options), arguments


class _OnePass:
    """A model as TRL's loss calls it, that makes its own loss on the way and keeps it."""

    def __init__(self, model: Any, arguments: dict[str, Any]) -> None:
        self.model, self.arguments = model, arguments
        self.output: Any = None

    def __call__(self, **inputs: Any) -> SimpleNamespace:
        mask, old = self.arguments["mask"], self.arguments["old_logps"]
        self.output = self.model(**inputs, **self.arguments, logits_to_keep=mask.shape[1])
        # A token that does not count was not scored; for TRL, which multiplies by the mask, its
        # ratio has to be finite.
        logps = self.output.logps
        logps = logps if old is None else torch.where(mask.bool(), logps, old.to(logps.dtype))
        return SimpleNamespace(
            log_probs=logps, entropy=self.output.entropy, aux_loss=self.output.aux_loss
        )


def _compare(theirs: float, mine: float) -> None:
    if abs(theirs - mine) > _ABSOLUTE + _RELATIVE * abs(theirs):
        raise RuntimeError(
            f"loss: expected TRL's, {theirs:.6g}, as the value whose gradient was taken; got "
            f"{mine:.6g}. This version of TRL, or a subclass of its trainer, computes something "
            "else than grpo_kernels knows: use GRPOTrainer, and please report it"
        )

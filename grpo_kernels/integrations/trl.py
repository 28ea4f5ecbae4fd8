"""TRL's GRPOTrainer on this library's head: the same arguments, loss, metrics and gradients.

    from grpo_kernels.integrations.trl import FusedGRPOTrainer      # instead of GRPOTrainer
    trainer = FusedGRPOTrainer(model, reward_funcs=..., args=GRPOConfig(...), train_dataset=...)

TRL's own code computes the loss and what it logs. It asks the model for log-probs and entropies;
here they come from `attach_fused_head`. Where the objective is token-local the loss's gradient is
made along with them, in one pass: TRL's loss is then the value, and ours the gradient, which are
compared in each step. Otherwise TRL's loss is differentiated through `linear_logprobs`.

What is private of TRL's is used in this file alone: `GRPOTrainer._compute_loss` and
`_get_per_token_logps_and_entropies`, which calls a model with `fused_lm_head=True`; what the
constructor calls, `grpo_trainer.add_fused_lm_head`, and by which it refuses adapters on the head,
which its own would leave out, `grpo_trainer.BaseTunerLayer`; and the entropy bonus's state,
`_entropy_bonus_enabled` and `_last_world_entropy`.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor

from ..config import GRPOLossConfig
from .head import check_options, corrected, head_of, is_prompt_learning
from .transformers import Objective, attach_fused_head, has_fused_head

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


try:
    check_version(metadata.version("trl"))
except metadata.PackageNotFoundError as error:
    raise ImportError(
        f"grpo_kernels.integrations.trl: expected TRL {SUPPORTED}; it is not installed: "
        f"pip install 'trl=={SUPPORTED}.*'"
    ) from error

from trl.trainer import grpo_trainer  # noqa: E402
from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402

_LOSS, _LOGPS = "_compute_loss", "_get_per_token_logps_and_entropies"
_PATCHED = "_patched_by_grpo_kernels"
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
        _check_trainer(self)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        return _loss(super()._compute_loss, self, model, inputs)

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return super()._get_per_token_logps_and_entropies(_asked(model), *args, **kwargs)


class patch_trl:
    """Gives every `GRPOTrainer` made from here on the fused head, `FusedGRPOTrainer`'s.

    For a trainer that one does not construct oneself, or a subclass of TRL's. As a function it
    stays until `undo()`; as a context manager until the end of the block:

        with patch_trl():
            trainer = GRPOTrainer(...)
            trainer.train()

    Trainers made before it, or trained after it, compute as TRL's do.

    Args:
        head_options: as `FusedGRPOTrainer`'s, by name.

    Raises:
        RuntimeError: TRL is patched already.
    """

    def __init__(self, **head_options: Any) -> None:
        if _PATCHED in vars(GRPOTrainer):
            raise RuntimeError("patch_trl: expected TRL's own trainer; it is patched: undo() first")
        own = {name: getattr(GRPOTrainer, name) for name in (_LOSS, _LOGPS, "__init__")}

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            own["__init__"](self, *args, **kwargs)
            _check_trainer(self)

        def loss(self: Any, model: Any, inputs: dict[str, Any]) -> Tensor:
            return _loss(partial(own[_LOSS], self), self, model, inputs)

        def logps(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            return own[_LOGPS](self, _asked(model), *args, **kwargs)

        self._own, self._head = own, _our_head(head_options)
        self._head.__enter__()
        for name, patched in ((_LOSS, loss), (_LOGPS, logps), ("__init__", init), (_PATCHED, True)):
            setattr(GRPOTrainer, name, patched)

    def undo(self) -> None:
        """Puts TRL's own back."""
        if self._own:
            for name, own in self._own.items():
                setattr(GRPOTrainer, name, own)
            delattr(GRPOTrainer, _PATCHED)
            self._head.__exit__(None, None, None)
        self._own = {}

    def __enter__(self) -> patch_trl:
        return self

    def __exit__(self, *_: Any) -> None:
        self.undo()


@contextmanager
def _our_head(options: dict[str, Any]) -> Iterator[None]:
    """The head that a trainer's constructor puts on its models."""
    check_options(options, stored=True)
    if "temperature" in options:
        raise TypeError("temperature: expected it in GRPOConfig; got it for the head as well")

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

    ours: dict[str, Any] = {"add_fused_lm_head": add_fused_lm_head}
    if hasattr(grpo_trainer, "BaseTunerLayer"):  # without PEFT it is not there
        ours["BaseTunerLayer"] = NoLayer
    own = {name: getattr(grpo_trainer, name) for name in ours}
    vars(grpo_trainer).update(ours)
    try:
        yield
    finally:
        vars(grpo_trainer).update(own)


def _check_trainer(trainer: Any) -> None:
    if is_prompt_learning(trainer.model):
        raise ValueError(
            "peft_config: expected adapters inside the layers (LoRA and its kind); got "
            f"{trainer.model.active_peft_config.peft_type.value}, which puts virtual tokens before "
            "the prompt"
        )
    if _token_local(trainer):
        _config(trainer, 1)  # says now what it would refuse in the first step


class _Call:
    """A model as TRL calls it, with an objective; keeps what comes out as it is made.

    What a wrapper makes of that (FSDP2 under accelerate: bf16) is not what is worked with.
    """

    def __init__(self, model: Any, objective: Objective, fused: bool) -> None:
        self.model, self.objective, self.fused = model, objective, fused

    def __call__(self, **inputs: Any) -> Any:
        if not self.fused:
            return self.model(**inputs)
        self.model(**inputs | {"fused_lm_head": self.objective})
        assert self.objective.output is not None
        return self.objective.output


class _OnePass(_Call):
    """That makes its own loss on the way."""

    def __call__(self, **inputs: Any) -> Any:
        mask, old = self.objective.mask, self.objective.old_logps
        assert mask is not None
        out = super().__call__(**inputs, logits_to_keep=mask.shape[1])
        # A token that does not count was not scored; for TRL, which multiplies by the mask, its
        # ratio has to be finite.
        logps = out.logps if old is None else torch.where(mask.bool(), out.logps, old.float())
        return SimpleNamespace(log_probs=logps, entropy=out.entropy, aux_loss=out.aux_loss)


def _asked(model: Any) -> Any:
    """For log-probs alone, unless it has been asked for more."""
    if isinstance(model, _Call):
        return model
    return _Call(model, Objective(), has_fused_head(extract_model_from_parallel(model)))


def _loss(
    own: Callable[[Any, dict[str, Any]], Tensor], trainer: Any, model: Any, inputs: dict[str, Any]
) -> Tensor:
    """TRL's loss; its gradient in one pass where the objective allows it."""
    there = torch.is_grad_enabled() and not isinstance(model, _Call)
    if not (there and _token_local(trainer) and has_fused_head(extract_model_from_parallel(model))):
        return own(model, inputs)
    training = trainer.model.training
    accumulation = trainer.current_gradient_accumulation_steps if training else 1
    # Before TRL's code, which moves the entropy's coefficient on to the next step.
    objective, share = _objective(trainer, inputs, accumulation if training else 0)
    one_pass = _OnePass(model, objective, True)
    value = own(one_pass, inputs)
    out = objective.output
    assert out is not None and out.loss is not None
    mine, experts = out.loss * share, 0.0
    if trainer.aux_loss_enabled:
        assert out.aux_loss is not None
        experts = trainer.router_aux_loss_coef * out.aux_loss.detach() / accumulation
    _compare(float(value.detach() - experts), float(mine.detach()), _size(trainer, objective))
    # TRL's value, and the gradient of the experts' part; ours adds 0 to it and the gradient.
    return value + (mine - mine.detach())


def _token_local(trainer: Any) -> bool:
    return (
        trainer.loss_type in _TOKEN_LOCAL
        and trainer.importance_sampling_level == "token"
        and trainer.off_policy_mask_threshold is None
        and trainer.top_entropy_quantile == 1.0
    )


def _config(trainer: Any, bonus_share: float) -> GRPOLossConfig:
    """TRL's options, in this library's terms; `bonus_share`: a factor on the entropy bonus."""
    args, loss_type = trainer.args, trainer.loss_type
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
        if not adaptive or trainer._last_world_entropy <= args.entropy_target:
            options["entropy_coef"] = trainer.entropy_coef * bonus_share
    return GRPOLossConfig(**options)


def _objective(trainer: Any, inputs: dict[str, Any], accumulation: int) -> tuple[Objective, float]:
    """What TRL's loss computes from `inputs`, and what its loss is multiplied by.

    `accumulation`: micro-batches an optimizer step; 0 in evaluation.
    """
    mask = inputs["completion_mask"]
    if "tool_mask" in inputs:
        mask = mask * inputs["tool_mask"]
    advantages = inputs["advantages"]
    if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
        advantages = corrected(advantages, inputs["importance_sampling_ratio"], mask)
    share, num_items = 1 / max(1, accumulation), None
    if trainer.loss_type in _STEP_WIDE:
        # Of the generation batch; an optimizer step is one of several on it.
        tokens = max(1.0, float(inputs["num_items_in_batch"])) / trainer.accelerator.num_processes
        if accumulation:
            tokens *= accumulation / trainer.args.steps_per_generation
        # Here fewer than one are one.
        num_items = max(1.0, tokens)
        share = num_items / tokens
    # TRL divides the bonus by the accumulation's steps, whatever it divides the rest by.
    config = _config(trainer, 1 / max(1, accumulation) / share)
    return Objective(
        advantages.float(), mask=mask, config=config, num_items=num_items,
        old_logps=inputs.get("old_per_token_logps"),
        ref_logps=inputs["ref_per_token_logps"] if trainer.beta else None,
    ), share  # fmt: skip


def _size(trainer: Any, objective: Objective) -> float:
    """Of the terms of the loss, of which little may be left."""
    assert objective.advantages is not None and objective.mask is not None
    size = max(1.0, float(objective.advantages.abs().amax()))
    return size * objective.mask.shape[1] if trainer.loss_type == "luspo" else size


def _compare(theirs: float, mine: float, size: float) -> None:
    allowed = _ABSOLUTE * size + _RELATIVE * abs(theirs)
    if not math.isfinite(theirs) or abs(theirs - mine) <= allowed:
        return
    raise RuntimeError(
        f"loss: expected TRL's, {theirs:.6g}, as the value whose gradient was taken; got "
        f"{mine:.6g}. This version of TRL, or a subclass of its trainer, computes something else "
        "than grpo_kernels knows: use GRPOTrainer, and please report it"
    )

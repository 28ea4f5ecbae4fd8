"""Makes a causal language model of transformers return log-probs or the GRPO loss, not logits.

    attach_fused_head(model)
    out = model(input_ids, attention_mask=mask, labels=labels, fused_head=True)
    out.logps, out.entropy                                    # [B, S - 1], differentiable
    objective = Objective(advantages, old_logps=old_logps)
    model(input_ids, attention_mask=mask, labels=labels, fused_head=objective).loss.backward()

The head and the loss run inside the model's own forward, so that wrappers (DDP, FSDP2, ZeRO-3,
PEFT) gather weights and reduce gradients as they do for the model alone.

`attach_fused_head` gives the model a class whose forward passes calls with the keyword to
`_fused_forward`. `_fused_forward` runs the body of the model, picks the hidden states and labels to
score (`Labels`), and calls the loss (`_score`).
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..base.checks import check_bool, check_tensor
from ..base.outputs import GRPOLossOutput
from ..fused_grpo_loss import fused_grpo_loss
from ..head.execution import Execution, check_execution
from ..head.linear_logprobs import linear_logprobs
from ..head.lm_head import LMHead, Reference, Support
from ..loss.config import TOKEN_MEANS, GRPOLossConfig
from ..loss.inputs import check_config
from .hf_head import (
    base_model,
    body_of,
    check_is_loaded,
    check_logits,
    gather_head,
    head_of,
    head_snapshot,
    is_prompt_learning,
    is_sharded,
    register_with_zero3,
    reshard_head,
)
from .patching import check_head_options

if TYPE_CHECKING:
    from ..explain import Explanation

try:
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput

    from .call_arguments import Labels, check_arguments, check_one_sequence, usual_results
except ImportError as error:
    raise ImportError(
        f"{__name__}: expected the package transformers, 5.0 or newer; got: {error}. "
        "Install it with: pip install 'transformers>=5.0'"
    ) from error

_DEFAULT = GRPOLossConfig()
# Attributes of a model with a fused head (its state), and of its class (the class before).
_ATTRIBUTE, _CLASS_BEFORE = "_grpo_kernels_head", "_grpo_kernels_without_head"


@dataclass
class FusedHeadOutput(ModelOutput):
    """The result of a call with a fused head; per-token values are 0 at labels of -100.

    Args:
        loss: the GRPO loss, 0-d; None without advantages.
        logps: log-prob of each label but the first, predicted by the position before it: float32
            `[B, S - 1]`, `[B, logits_to_keep]` with that argument, `[B, S]` with `shift_labels`.
            Differentiable without advantages, detached with them.
        entropy: in nats; shape, dtype and gradient as `logps`.
        mask: bool, in the shape of `logps`: True where a token is scored.
        metrics, ref_logps, kl: as in `fused_grpo_loss`; None without advantages.
        aux_loss: the load-balancing loss of a mixture of experts, if the config or the argument
            `output_router_logits` asks for it. It is not part of `loss`.
    """

    loss: Tensor | None = None
    logps: Tensor | None = None
    entropy: Tensor | None = None
    mask: Tensor | None = None
    metrics: Mapping[str, Tensor] | None = None
    ref_logps: Tensor | None = None
    kl: Tensor | None = None
    aux_loss: Tensor | None = None

    @property
    def log_probs(self) -> Tensor | None:
        """`logps`, by TRL's name."""
        return self.logps


class Objective:
    """Asks a fused head for the GRPO loss or, without advantages, for log-probs only.

    An object instead of arguments of the forward, because FSDP's mixed precision rounds arguments
    and results of a forward to bf16. After the call, `output` holds the `FusedHeadOutput` before
    any wrapper rounds it.

    Args:
        advantages: `[B]`, or in the shape of the log-probs, like all per-token values here. None:
            log-probs only.
        mask: bool or 0/1; 0 leaves out a token, in addition to labels of -100.
        old_logps, ref_logps, sampling_logps: as in `fused_grpo_loss`.
        ce_weights: as in `fused_grpo_loss`; 0 where the label is -100.
        config, num_items: as in `fused_grpo_loss`.
        support: the ids that the sampler kept for each token, as in `fused_grpo_loss`, with tokens
            in the row-major order of the log-probs. Also works without advantages.
        reference: another model's states and head on the same tokens, as in `fused_grpo_loss`.
        states: scores nothing, and sets `reference` to this model's hidden states and head, for the
            objectives of other calls, also after a step. A head that is trained (`requires_grad`)
            or sharded is copied; a frozen head is shared with the model.
        temperature: divides the logits of this call; None: as in `attach_fused_head`.
        execution: backend and memory of this call; None: as in `attach_fused_head`.

    Raises:
        TypeError: a config or an execution of another type.
        ValueError: an argument of the loss without advantages.
    """

    def __init__(
        self,
        advantages: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        old_logps: Tensor | None = None,
        ref_logps: Tensor | None = None,
        sampling_logps: Tensor | None = None,
        ce_weights: Tensor | None = None,
        config: GRPOLossConfig | None = None,
        num_items: float | Tensor | None = None,
        support: Support | None = None,
        reference: Reference | None = None,
        states: bool = False,
        temperature: float | Tensor | None = None,
        execution: Execution | None = None,
    ) -> None:
        if config is not None:
            check_config(config)
        if execution is not None:
            check_execution(execution)
        optional = {
            "old_logps": old_logps,
            "ref_logps": ref_logps,
            "sampling_logps": sampling_logps,
            "ce_weights": ce_weights,
            "config": config,
            "num_items": num_items,
            "reference": reference,
        }
        self.loss_arguments: dict[str, Any] = {
            name: x for name, x in optional.items() if x is not None
        }
        if advantages is None and self.loss_arguments:
            raise ValueError(
                f"{', '.join(self.loss_arguments)}: no effect without advantages: pass "
                "Objective(advantages, ...)"
            )
        check_bool("states", states)
        if states and (advantages is not None or mask is not None or support is not None):
            raise ValueError(
                "states=True does not work with advantages, mask or support, because it scores "
                "nothing: pass states=True alone"
            )
        self.advantages, self.mask, self.old_logps = advantages, mask, old_logps
        self.support, self.temperature, self.execution = support, temperature, execution
        self.states, self.reference = states, reference
        self.output: FusedHeadOutput | None = None
        self.config = config or _DEFAULT
        self._call: dict[str, Any] = {}  # the call's arguments, for `explain`

    def explain(self, **more: Any) -> Explanation:
        """Explains the loss of the last call with this objective, token by token.

        Args:
            more: further arguments of `grpo_kernels.explain.explain`, such as `tokenizer`.

        Raises:
            ValueError: no call has computed a loss yet.
        """
        from ..explain import explain

        out = self.output
        if out is None or out.loss is None or out.logps is None or out.metrics is None:
            raise ValueError(
                "objective: has no loss yet: pass it to the model as fused_head=, with advantages"
            )
        names = ("logps", "entropy", "ref_logps", "kl")
        values = {name: getattr(out, name) for name in names}
        loss = GRPOLossOutput(loss=out.loss.detach(), metrics=out.metrics, **values)
        return explain(loss, config=self.config, **self._call, **more)


@dataclass
class _Attached:
    """The state of a fused head, an attribute of its model."""

    keyword: str
    float32: bool
    options: dict[str, Any]  # of `Head.at`
    execution: Execution
    own_forward: Any  # the instance's forward from before; None: it had the class's

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        # Pickle restores a method by its name, which now leads to the fused head's forward.
        own = self.own_forward
        if hasattr(own, "__func__") and own.__func__ is type(own.__self__).forward:
            self.own_forward = None


def attach_fused_head(
    model: Any,
    *,
    keyword: str = "fused_head",
    float32: bool = False,
    check: bool = True,
    temperature: float = 1.0,
    logits_dtype: str = "fp32",
    execution: Execution = Execution(),  # noqa: B008 - frozen
) -> None:
    """Makes a causal language model accept `fused_head=`, which skips its logits.

    `model(input_ids, attention_mask=..., labels=..., fused_head=True)` returns a
    `FusedHeadOutput` with log-probs and entropy of the labels other than -100, as
    `linear_logprobs` computes them. `fused_head=Objective(advantages, ...)` adds the loss of
    `fused_grpo_loss`. With `logits_to_keep=T` only the last T labels are scored and per-token
    shapes are `[B, T]`. `shift_labels` replaces `labels` if they are shifted already. Any other
    call, `model.generate` included, works as before. To attach again with the same keyword
    replaces the options.

    Equivalent PyTorch:

        logits = model(input_ids, attention_mask=...).logits[:, :-1].float() / temperature
        logps = logits.log_softmax(-1).gather(-1, labels[:, 1:, None])[..., 0]

    Args:
        model: a causal language model of transformers whose logits are a linear layer of its last
            hidden states (with a bias, scale and softcap as the config says), or PEFT's LoRA
            around such a model, on the body and on the head. Attach before wrapping with DDP, FSDP2
            or DeepSpeed.
        keyword: the name of the new argument.
        float32: multiply hidden states and head in float32, outside autocast.
        check: compare with the model's own logits on a few ids, at the cost of one forward. Skipped
            if the weights are not on this rank (ZeRO-3, FSDP2, the meta device).
        temperature: divides the logits of all calls, as in `LMHead`.
        logits_dtype: as in `LMHead`, for all calls.
        execution: backend and memory of all calls.

    Raises:
        TypeError: the model is not one of transformers, or an option has another type.
        ValueError: PEFT with virtual tokens, an encoder-decoder, a head with another keyword,
            or logits that are not such a linear layer.
    """
    options = {"temperature": temperature, "logits_dtype": logits_dtype}
    check_head_options(execution, **options)
    if is_prompt_learning(model):
        raise ValueError(
            "model: expected adapters inside the layers (such as LoRA), or none; got PEFT's "
            f"{model.active_peft_config.peft_type.value}, which puts virtual tokens before the "
            "prompt"
        )
    model = base_model(model)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            "model: expected a model of transformers, or PEFT around one; got "
            f"{type(model).__name__}"
        )
    attached = vars(model).get(_ATTRIBUTE)
    if attached is not None and attached.keyword != keyword:
        raise ValueError(
            f"model: has a fused head already, with keyword={attached.keyword!r}: call "
            "detach_fused_head(model) first"
        )
    if model.config.is_encoder_decoder:
        raise ValueError(f"model: expected a decoder-only model; got {type(model).__name__}")
    head = head_of(model)
    if check and not is_sharded(head.weight):
        check_logits(model)
    if attached is not None:
        changed = replace(attached, float32=float32, options=options, execution=execution)
        setattr(model, _ATTRIBUTE, changed)
        return
    own_forward = vars(model).pop("forward", None)
    setattr(model, _ATTRIBUTE, _Attached(keyword, float32, options, execution, own_forward))
    cls = type(model)  # a fused head's class already, if made from another model's
    model.__class__ = _with_head(vars(cls).get(_CLASS_BEFORE, cls))


@functools.cache
def _with_head(cls: Any) -> Any:
    """Returns a subclass of a model's class, with its name, whose forward takes the keyword.

    A class, because wrappers, copies and pickle look for a forward there.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        attached = vars(self).get(_ATTRIBUTE)
        if attached is None:  # FSDP2's class stays after detach_fused_head
            return cls.forward(self, *args, **kwargs)
        request = kwargs.pop(attached.keyword, False)
        if request is not False:
            return _fused_forward(self, attached, request, args, kwargs)
        return (attached.own_forward or partial(cls.forward, self))(*args, **kwargs)

    def reduce(self: Any, protocol: Any) -> Any:
        reduced = cls.__reduce_ex__(self, max(protocol, 2))
        # FSDP2's subclass of it has no pickle.
        return (_new, (cls,), *reduced[2:]) if type(self) is fused else reduced

    # generate and Trainer read the signature. functools.wraps would also set __wrapped__, which
    # accelerate unwraps.
    forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]
    forward.__doc__ = cls.forward.__doc__
    names = ("__module__", "__qualname__", "__doc__")
    members = {name: getattr(cls, name) for name in names}
    members |= {"forward": forward, "__reduce_ex__": reduce, _CLASS_BEFORE: cls}
    fused = type(cls.__name__, (cls,), members)
    return fused


def _new(cls: Any) -> Any:
    """Makes an empty model with a fused head, whose state a copy or pickle restores."""
    fused = _with_head(cls)
    return fused.__new__(fused)


def detach_fused_head(model: Any) -> None:
    """Undoes `attach_fused_head`.

    Raises:
        ValueError: the model has no fused head, or its forward has been wrapped since.
    """
    model = base_model(model)
    if not has_fused_head(model):
        raise ValueError("model: has no fused head to detach: call attach_fused_head(model) first")
    current = vars(model).get("forward")
    if current not in (None, types.MethodType(type(model).forward, model)):
        raise ValueError(
            "model: its forward was wrapped after attach_fused_head: unwrap it first "
            "(accelerator.unwrap_model(model, keep_fp32_wrapper=False))"
        )
    vars(model).pop("forward", None)
    attached = vars(model).pop(_ATTRIBUTE)
    if attached.own_forward is not None:
        model.forward = attached.own_forward
    # FSDP2 has made a subclass of the class; it stays, and forwards as the model's class does.
    if _CLASS_BEFORE in vars(type(model)):
        model.__class__ = vars(type(model))[_CLASS_BEFORE]


def has_fused_head(model: Any) -> bool:
    """Returns True if `attach_fused_head` was called on the model, or on the model PEFT wraps."""
    return hasattr(base_model(model), _ATTRIBUTE)


def _fused_forward(
    model: Any, attached: _Attached, request: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> FusedHeadOutput:
    """Runs the body, then log-probs or loss in place of the head."""
    objective = Objective() if request is True else request
    if not isinstance(objective, Objective):
        raise TypeError(f"fused_head: expected True or an Objective; got {request!r}")
    names = [*inspect.signature(type(model).forward).parameters][1:]
    kwargs = dict(zip(names, args, strict=False)) | kwargs
    check_arguments(model, kwargs)
    config = model.config.get_text_config()
    if getattr(config, "output_router_logits", False):
        kwargs.setdefault("output_router_logits", True)
    labels = Labels.pop_from(kwargs)
    items = _items_of(objective, kwargs.pop("num_items_in_batch", None))
    outputs = body_of(model)(use_cache=False, **kwargs, **usual_results(config))
    gather_head(model)
    head = head_of(model)
    check_is_loaded(head.weight)
    for weight in (head.weight, *(adapter.lora_b.weight for adapter in head.adapters)):
        register_with_zero3(model, weight)
    # A model spread over devices may have its head on another device than its last layer.
    device = head.weight.device
    hidden = outputs.last_hidden_state
    targets, hidden = labels.targets(hidden).to(device), labels.predicting(hidden).to(device)
    execution = objective.execution or attached.execution
    if objective.advantages is not None and objective.config.needs_sequences:
        loss_type, scored = objective.config.loss_type, targets != -100
        mask = objective.mask
        if isinstance(mask, Tensor) and mask.shape == scored.shape:  # others are refused later
            scored = scored & (_to(device, mask) != 0)
        check_one_sequence(kwargs, labels, scored, loss_type)
    precision: AbstractContextManager[Any] = nullcontext()
    if attached.float32:
        hidden = hidden.float()
        precision = torch.autocast(device.type, enabled=False)
    options = dict(attached.options)
    if objective.temperature is not None:
        options["temperature"] = _to(device, objective.temperature)
    with precision:
        lm_head = head.at(hidden, **options)
        if objective.states:
            objective.reference = Reference(hidden.detach(), head_snapshot(model, lm_head))
            out = FusedHeadOutput()
        else:
            out = _score(hidden, lm_head, targets, objective, items, execution)
    if kwargs.get("output_router_logits"):
        out.aux_loss = _load_balancing_loss(config, outputs, kwargs.get("attention_mask"))
    objective.output = out
    reshard_head(model)
    return out


def _items_of(objective: Objective, num_items: Any) -> dict[str, Any]:
    """The loss's `num_items`, which transformers calls `num_items_in_batch`."""
    if num_items is None:
        return {}
    reason = ""
    if objective.advantages is None:
        reason = "without advantages, because there is no loss to divide: leave it out"
    elif "num_items" in objective.loss_arguments:
        return {}  # the objective's counts; Trainer adds `num_items_in_batch` to every call
    elif (aggregation := objective.config.effective_aggregation) not in TOKEN_MEANS:
        reason = (
            f"with the {aggregation!r} aggregation, which divides by the number of sequences: pass "
            "that number as Objective(num_items=...)"
        )
    if reason:
        raise ValueError(f"num_items_in_batch={num_items!r} does not work {reason}")
    return {"num_items": num_items}


def _to(device: torch.device, x: Any) -> Any:
    """Moves a tensor, except from the meta device, where it is refused by name later."""
    return x.to(device) if isinstance(x, Tensor) and x.device.type != "meta" else x


def _score(
    hidden: Tensor, head: LMHead, targets: Tensor, objective: Objective, items: dict[str, Any],
    execution: Execution,
) -> FusedHeadOutput:  # fmt: skip
    device, mask, support = hidden.device, targets != -100, objective.support
    if objective.mask is not None:
        objective_mask = _to(device, objective.mask)
        objective_mask = check_tensor("mask", objective_mask, shape=mask.shape, device=mask.device)
        # Keeps values other than 0 and 1, so that they are refused.
        mask = objective_mask.masked_fill(~mask, 0)
    if isinstance(support, tuple) and len(support) == 2:  # anything else is refused
        support = Support(*(_to(device, x) for x in support))
    if objective.advantages is None:
        scored = linear_logprobs(
            hidden, head, targets, mask, entropy=True, support=support, execution=execution
        )
        return FusedHeadOutput(logps=scored.logps, entropy=scored.entropy, mask=mask.bool())
    arguments = objective.loss_arguments | items
    arguments = {name: _to(device, x) for name, x in arguments.items()}
    advantages = _to(device, objective.advantages)
    out = fused_grpo_loss(
        hidden,
        head,
        targets,
        advantages,
        mask,
        support=support,
        execution=execution,
        **arguments,
    )
    constants = {k: x for k, x in arguments.items() if k not in ("config", "reference")}
    objective._call = {"targets": targets, "advantages": advantages, "mask": mask, **constants}
    mask = mask.bool()
    if "ce_weights" in arguments:
        mask = mask | (arguments["ce_weights"] != 0)
    return FusedHeadOutput(mask=mask, **out._asdict())


def _load_balancing_loss(config: Any, outputs: Any, attention_mask: Tensor | None) -> Tensor:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((x for name in names if (x := getattr(config, name, None)) is not None), None)
    if experts is None:
        raise ValueError(
            f"output_router_logits: expected a config with one of {', '.join(names)}; got "
            f"{type(config).__name__}"
        )
    loss = load_balancing_loss_func(
        outputs.router_logits, experts, config.num_experts_per_tok, attention_mask
    )
    assert isinstance(loss, Tensor)
    return loss

"""The fused head of verl: a backend named `grpo_kernels`, and the call of verl's kernel.

    actor_rollout_ref.model.use_fused_kernels=True
    actor_rollout_ref.model.fused_kernel_options.impl_backend=grpo_kernels

verl loads `verl_plugin.py` in each of its processes by an entry point, which adds the name; other
backends stay as they are. `VERL_USE_EXTERNAL_PLUGINS=none` turns it off.

This file depends on these parts of verl 0.9:

- `monkey_patch.patch_forward_with_backends`, which gives a model verl's forward, and ignores
  unknown backends;
- `torch_functional.FusedLinearForPPO`, which that forward constructs with the model's backend;
- `FSDPEngineWithLMHead.forward_step`, whose micro-batch says whether to compute entropies;
- `apply_fsdp2`, in which an untied head is a separate unit;
- `HFModelConfig`, which has the backend, and `linear_cross_entropy`, the one fused head for
  Megatron.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..base.checks import check_choice
from ..head.execution import Execution, check_execution
from ..head.linear_logprobs import linear_logprobs
from ..head.lm_head import LMHead, Support, VocabRanks
from .hf_head import body_of, gather_head, head_of, reshard_head
from .patching import Patch, check_version, is_ours

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NAME = "grpo_kernels"
_FSDP = "verl.workers.engine.fsdp.transformer_impl"
# Whether the running forward computes entropies. A forward outside of verl's engines does.
_ENTROPY: ContextVar[bool] = ContextVar("entropy", default=True)


class patch_verl(Patch):
    """Adds the backend `grpo_kernels` to verl's fused head; other backends stay as they are.

    verl does this itself if this library is installed. Call it for another `execution`, in a module
    that `VERL_USE_EXTERNAL_MODULES` names: verl imports these modules before plug-ins. The patch
    lasts until `undo()`, or the end of a `with` block.

    Args:
        execution: backend and memory of the head's calls.

    Raises:
        ImportError: no verl 0.9 is installed.
        TypeError, ValueError: naming the option, what was expected and what came.
        RuntimeError: verl is patched already.
    """

    def __init__(self, *, execution: Execution = Execution()) -> None:  # noqa: B008 - frozen
        check_version("verl", "0.9", "0.10")
        from verl.models.transformers import monkey_patch
        from verl.utils.experimental import torch_functional
        from verl.utils.kernel import linear_cross_entropy as kernel
        from verl.workers.config.model import HFModelConfig

        check_execution(execution)  # raises now, not in the first call
        self._execution = execution
        self._engines: Patch | None = None
        self._hooks = list[RemovableHandle]()
        self._is_chosen, self._is_announced = False, False
        verl_forward = monkey_patch.patch_forward_with_backends
        verl_kernel, verl_check = kernel.linear_cross_entropy, HFModelConfig.__post_init__

        def patch_forward_with_backends(
            model: Any, use_fused_kernels: bool = False, fused_kernels_backend: str | None = None
        ) -> None:
            if not use_fused_kernels or fused_kernels_backend != NAME:
                verl_forward(model, use_fused_kernels, fused_kernels_backend)
                return
            _check_head(model)
            verl_forward(model, use_fused_kernels, "torch")
            self._attach(model)

        def post_init(config: Any) -> None:
            verl_check(config)
            backend = (config.fused_kernel_options or {}).get("impl_backend")
            if config.use_fused_kernels and backend == NAME:
                _check_targets_of_lora(config)
                self._is_chosen = True

        def megatron_head(hidden: Tensor, weight: Tensor, labels: Tensor, *args: Any) -> Any:
            call = self._megatron_head if self._is_chosen else verl_kernel
            return call(hidden, weight, labels, *args)

        fused = _fused_linear(torch_functional.FusedLinearForPPO, execution)
        super().__init__(
            (
                (monkey_patch, "patch_forward_with_backends", patch_forward_with_backends),
                (torch_functional, "FusedLinearForPPO", fused),
                (HFModelConfig, "__post_init__", post_init),
                (kernel, "linear_cross_entropy", megatron_head),
            )
        )

    @staticmethod
    def active() -> bool:
        from verl.utils.kernel import linear_cross_entropy as kernel

        return is_ours(kernel.linear_cross_entropy)

    def undo(self) -> None:
        if self._engines is not None:
            self._engines.undo()
        for hook in self._hooks:
            hook.remove()
        super().undo()

    def _attach(self, model: Any) -> None:
        """Marks a model with verl's forward; gathers its head if FSDP2 shards it."""
        model._verl_fused_kernels_backend = NAME
        # verl's forward does not call the head, so FSDP2 does not gather a head in a separate unit.
        self._hooks += [
            body_of(model).register_forward_hook(lambda *_: gather_head(model)),
            model.register_forward_hook(lambda *_: reshard_head(model)),
        ]
        self._watch_engine()
        print(f"Using {NAME} for the fused head of {type(model).__name__}")

    def _megatron_head(self, hidden: Tensor, weight: Tensor, labels: Tensor, *args: Any) -> Any:
        if not self._is_announced:
            print(f"Using {NAME} where Megatron has its fused head")
            self._is_announced = True
        # Megatron's states are [S, 1, H], its labels [1, S].
        states, labels = hidden.flatten(0, -2), labels.flatten()
        return linear_cross_entropy(states, weight, labels, *args, execution=self._execution)

    def _watch_engine(self) -> None:
        """Computes entropies only for micro-batches of the engine that need them."""
        engine = getattr(sys.modules.get(_FSDP), "FSDPEngineWithLMHead", None)
        if engine is None or self._engines is not None:
            return
        verl_step, checked = engine.forward_step, WeakSet[Any]()

        def forward_step(self: Any, micro_batch: Any, *args: Any, **kwargs: Any) -> Any:
            from verl.utils.tensordict_utils import get_non_tensor_data

            if self not in checked:
                _check_engine(self.module, getattr(self, "model_config", None))
                checked.add(self)
            needs_entropy = get_non_tensor_data(
                data=micro_batch, key="calculate_entropy", default=False
            )
            before = _ENTROPY.set(bool(needs_entropy))
            try:
                return verl_step(self, micro_batch, *args, **kwargs)
            finally:
                _ENTROPY.reset(before)

        self._engines = Patch([(engine, "forward_step", forward_step)])


def _check_head(model: Any) -> None:
    """Raises ValueError for a head with parts that verl's forward ignores."""
    head = head_of(model)
    more = {
        "a bias": head.bias is not None,
        "a softcap": head.softcap is not None,
        f"a scale of {head.logit_scale}": head.logit_scale != 1.0,
        "an adapter": bool(head.adapters),
    }
    for what, there in more.items():
        if there:
            raise ValueError(
                f"use_fused_kernels=True does not work with {type(model).__name__}, whose head has "
                f"{what}: {_WEIGHT_ALONE}. Pass use_fused_kernels=False"
            )


_WEIGHT_ALONE = "verl's fused forward uses lm_head.weight only"


def _check_targets_of_lora(config: Any) -> None:
    """Raises ValueError for a LoRA on the head, which verl adds after the forward is patched."""
    targets = config.target_modules
    named = [targets] if isinstance(targets, str) else targets or []
    if config.lora_rank > 0 and any("lm_head" in name for name in named):
        raise ValueError(
            f"target_modules={targets!r} does not work with use_fused_kernels=True: "
            f"{_WEIGHT_ALONE}. Leave lm_head out of target_modules"
        )


def _check_engine(model: Any, config: Any) -> None:
    """Raises ValueError for LoRA on the head and for offloading, seen only in a wrapped model."""
    if not any(getattr(x, "_verl_fused_kernels_backend", None) == NAME for x in model.modules()):
        return
    for name, module in model.named_modules():
        if not name.endswith("lm_head"):
            continue
        if getattr(module, "lora_A", None):
            raise ValueError(
                f"lora_adapter_path: an adapter on lm_head does not work: {_WEIGHT_ALONE}. Pass an "
                "adapter without lm_head, or use_fused_kernels=False"
            )
        if hasattr(module, "unshard") and getattr(config, "enable_activation_offload", False):
            raise ValueError(
                "enable_activation_offload=True does not work with use_fused_kernels=True and an "
                "untied head under fsdp2: verl waits for a call of lm_head that never comes. Pass "
                "enable_activation_offload=False"
            )


def _fused_linear(base: type, execution: Execution) -> type:
    """A subclass of verl's fused head, which uses this library for the backend `grpo_kernels`."""

    class FusedLinearForPPO(base):  # type: ignore[misc, valid-type, unused-ignore]
        def __init__(self, chunk_size: int = 512, impl_backend: str = "torch") -> None:
            super().__init__(chunk_size, "torch" if impl_backend == NAME else impl_backend)
            self.impl_backend = impl_backend

        def forward(
            self,
            hidden_states: Tensor,
            vocab_weights: Tensor,
            input_ids: Tensor,
            temperature: float = 1.0,
        ) -> tuple[Tensor, Tensor | None]:
            if self.impl_backend != NAME:
                return super().forward(hidden_states, vocab_weights, input_ids, temperature)
            head = LMHead(vocab_weights, temperature=temperature)
            out = linear_logprobs(
                hidden_states, head, input_ids.long(), entropy=_ENTROPY.get(), execution=execution
            )
            return out.logps, out.entropy

    return FusedLinearForPPO


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float | Tensor = 1.0,
    reduction: str = "none",
    dist_process_group: ProcessGroup | None = None,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    support: Support | None = None,
    execution: Execution = Execution(),  # noqa: B008 - frozen
) -> tuple[Tensor, Tensor]:
    """Returns log-probs of the labels and entropies, both differentiable, without the logits.

    Equivalent PyTorch:

        log_p = (hidden @ weight.T).float().div(temperature).log_softmax(-1)
        logprobs = log_p.gather(-1, labels[..., None])[..., 0]
        entropy = -(log_p.exp() * log_p).sum(-1)

    Args:
        hidden: `[N, H]` or `[B, T, H]`.
        weight: `[V, H]`; with a process group this rank's rows of it.
        labels: `[N]` or `[B, T]`, int64 token ids.
        temperature: divides the logits; a number, or a tensor with one value per token.
        reduction: `"none"`, `"sum"` or `"mean"` of the log-probs, which are not negated.
        dist_process_group: ranks that share the vocabulary, in the order of its columns. As with
            verl's kernel, the gradient of `hidden` is then this rank's part, which the caller sums:
            `VocabRanks(group, hidden="partial")`.
        mask: as in `linear_logprobs`.
        bias: `[V]`, as in `LMHead`.
        support: as in `linear_logprobs`; both results are then of the truncated policy.
        execution: as in `linear_logprobs`.

    Returns:
        `logprobs` and `entropy` (nats), float32, in the shape of the labels (verl's are flat);
        `logprobs` is 0-d if reduced.

    Raises:
        TypeError, ValueError: as in `linear_logprobs`.
    """
    check_choice("reduction", reduction, ("none", "sum", "mean"))
    ranks = None
    if dist_process_group is not None:
        ranks = VocabRanks(dist_process_group, hidden="partial")
    head = LMHead(weight, bias, temperature=temperature, ranks=ranks)
    out = linear_logprobs(
        hidden, head, labels, mask, entropy=True, support=support, execution=execution
    )
    assert out.entropy is not None
    logps = out.logps if reduction == "none" else getattr(out.logps, reduction)()
    return logps, out.entropy

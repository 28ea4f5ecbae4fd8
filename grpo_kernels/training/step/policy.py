"""`Policy`: a causal language model; loss, log-probs and samples all come from its forward.

DDP only reduces the gradients of a forward of the module that it wraps, so the head and the loss
are computed inside `Policy.forward`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import GRPOLossConfig
from ...base.layout import to_device
from ...base.outputs import GRPOLossOutput
from ...fused_grpo_loss import fused_grpo_loss
from ...head.linear_logprobs import linear_logprobs
from ...head.lm_head import LMHead, Reference, Support
from ...integrations.hf_head import base_model, body_of, evaluating, head_of
from ...integrations.private import is_recurrent, without_memory
from ..config import TrainingConfig
from ..run.metrics import Clock
from ..sampling.completions import end_tokens, pad


@dataclass(frozen=True)
class Batch:
    """Completions and the prompts they share, each prompt once."""

    prompts: Tensor  # [U, P], int64, padded on the left
    prompt_mask: Tensor  # [U, P], int64
    prompt_of: Tensor  # [B], int64, row of `prompts`
    completions: Tensor  # [B, T], int64, padded on the right
    attention: Tensor  # [B, T], int64: tokens that are no padding
    mask: Tensor  # [B, T], int64: tokens that count in the loss
    support: Support | None = None  # of the B * T tokens

    @staticmethod
    def from_rows(
        prompts: Sequence[Sequence[int]], prompt_of: Sequence[int],
        completions: Sequence[Sequence[int]], pad_id: int, device: Any = None,
    ) -> Batch:  # fmt: skip
        """Pads completions and their prompts, `prompts[prompt_of[i]]`."""
        places: dict[int, int] = {}
        rows = [places.setdefault(p, len(places)) for p in prompt_of]
        used = [prompts[p] for p in places]
        prompt_ids, prompt_mask = pad(used, pad_id, left=True, device=device)
        ids, attention = pad(completions, pad_id, device=device)
        places_of = to_device(torch.tensor(rows, dtype=torch.int64, device="cpu"), device)
        return Batch(prompt_ids, prompt_mask, places_of, ids, attention, mask=attention)


class Cached(NamedTuple):
    """A key-value cache, and its name among a model's outputs and arguments.

    The name is `cache` from transformers 5.24 on, `past_key_values` before. A forward may ignore an
    unknown name, so `check_has` compares lengths.
    """

    name: str
    keys_and_values: Any

    @staticmethod
    def from_output(output: Any) -> Cached | None:
        """Returns the cache in a model's output, or None."""
        from transformers import Cache

        caches = (Cached(name, x) for name, x in output.items() if isinstance(x, Cache))
        return next(caches, None)

    def check_has(self, length: int, model: Any) -> None:
        """Refuses a model that ignored the cache, which otherwise has `length` tokens."""
        if (present := self.keys_and_values.get_seq_length()) < length:
            raise RuntimeError(
                f"share_prompts: {type(model).__name__} did not continue from {self.name}, which "
                f"has {present} tokens instead of {length}: turn share_prompts off"
            )


class Policy(nn.Module):
    """`policy("loss" | "logps" | "generate" | "hidden", ...)`: see the methods of these names.

    With `share_prompts` the prompt of a group is encoded once, for training and for sampling:
    a forward over the prompts fills the cache, which is then repeated for the completions, and
    gradients flow back through it. `temperature` is as in `LMHead`.
    """

    def __init__(
        self, model: nn.Module, *, share_prompts: bool = True, temperature: float = 1.0
    ) -> None:
        super().__init__()
        self.model, self.temperature = model, temperature
        self.why_not_shared = why_not_shared(model) if share_prompts else "share_prompts is off"

    @staticmethod
    def from_config(model: nn.Module, config: TrainingConfig) -> Policy:
        """Makes the policy of a run, or its reference."""
        return Policy(model, share_prompts=config.share_prompts, temperature=config.temperature)

    @property
    def shares_prompts(self) -> bool:
        """True if a prompt is encoded once for its completions; else see `why_not_shared`."""
        return self.why_not_shared is None

    def forward(self, what: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, what)(*args, **kwargs)

    def loss(
        self, batch: Batch, advantages: Tensor, config: GRPOLossConfig, clock: Clock,
        **options: Any,
    ) -> GRPOLossOutput:  # fmt: skip
        """Computes the loss of the completions, with `options` of `fused_grpo_loss`.

        `clock` counts the seconds of head and loss.
        """
        hidden = self.hidden(batch)
        with clock.head():
            out = fused_grpo_loss(
                hidden, self.head(hidden), batch.completions, advantages, batch.mask,
                config=config, support=batch.support, **options,
            )  # fmt: skip
        clock.head_backward(out.loss, hidden)
        return out

    @torch.no_grad()
    def logps(
        self, batch: Batch, entropy: bool = False, *, logits_dtype: str = "fp32"
    ) -> tuple[Tensor, Tensor | None]:
        """Computes `[B, T]` log-probs of the completions, and their entropy if asked for.

        `logits_dtype` is as in `LMHead`.
        """
        hidden = self.hidden(batch)
        out = linear_logprobs(
            hidden, self.head(hidden, logits_dtype), batch.completions, batch.mask,
            entropy=entropy, support=batch.support,
        )  # fmt: skip
        return out.logps, out.entropy

    @torch.no_grad()
    def as_reference(self, batch: Batch) -> Reference:
        """Returns the states that predict the completions, and the head, as a `Reference`."""
        hidden = self.hidden(batch)
        return Reference(hidden, self.head(hidden))

    def generate(
        self, ids: Tensor, mask: Tensor, count: int, options: dict[str, Any], tokenizer: Any
    ) -> tuple[Tensor, list[int]]:
        """Returns `[U * count, P + T]` tokens of `model.generate`, and the end tokens."""
        inputs: dict[str, Any] = {
            "input_ids": ids.repeat_interleave(count, 0),
            "attention_mask": mask.repeat_interleave(count, 0),
        }
        cache = None
        if count > 1 and ids.shape[1] > 1 and self.shares_prompts:
            # All but the last token of each prompt, encoded once; generate goes on from there.
            _, cache = self._encode(ids[:, :-1], mask[:, :-1])
            cache.keys_and_values.batch_repeat_interleave(count)
            # Overrides a config without a cache, or with another cache, which generate would use.
            inputs |= {cache.name: cache.keys_and_values, "use_cache": True}
            inputs["cache_implementation"] = None
        eos = end_tokens(self.model, tokenizer)
        inputs["eos_token_id"] = eos or None
        with _without_sampling_defaults(self.model, base_model(self.model)):
            tokens = self.model.generate(**inputs, **options)  # type: ignore[operator]
        if cache is not None:
            cache.check_has(ids.shape[1], self.model)
        return tokens, eos

    def hidden(self, batch: Batch) -> Tensor:
        """Computes the states that predict the tokens of the completions: `[B, T, H]`."""
        T = batch.completions.shape[1]
        prompt_mask = batch.prompt_mask[batch.prompt_of]
        attention = torch.cat([prompt_mask, batch.attention], 1)[:, :-1]
        if not self.shares_prompts:
            ids = torch.cat([batch.prompts[batch.prompt_of], batch.completions], 1)[:, :-1]
            states = self._body(
                input_ids=ids, attention_mask=attention, position_ids=position_ids_of(attention),
                use_cache=False,
            )  # fmt: skip
            return states.last_hidden_state[:, -T:]
        encoded, cache = self._encode(batch.prompts, batch.prompt_mask)
        if T == 1:
            return encoded[batch.prompt_of, -1:]
        cache.keys_and_values.batch_select_indices(batch.prompt_of)
        states = self._body(
            input_ids=batch.completions[:, :-1], attention_mask=attention,
            position_ids=position_ids_of(attention)[:, 1 - T :], use_cache=True,
            **{cache.name: cache.keys_and_values},
        )  # fmt: skip
        cache.check_has(attention.shape[1], self._body)
        return torch.cat([encoded[batch.prompt_of, -1:], states.last_hidden_state], 1)

    def head(self, hidden: Tensor, logits_dtype: str = "fp32") -> LMHead:
        head, t = head_of(self.model), self.temperature
        return head.at(hidden, temperature=t, logits_dtype=logits_dtype)

    def _encode(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Cached]:
        out = self._body(
            input_ids=ids, attention_mask=mask, position_ids=position_ids_of(mask), use_cache=True
        )
        cache = Cached.from_output(out)
        if cache is None:
            raise RuntimeError(
                f"share_prompts: {type(self._body).__name__} no longer returns a key-value cache: "
                "turn share_prompts off"
            )
        return out.last_hidden_state, cache

    @property
    def _body(self) -> Any:
        return body_of(base_model(self.model))


@contextmanager
def _without_sampling_defaults(*models: Any) -> Iterator[None]:
    """Disables the models' options of `generate`, except token ids and the cache.

    With their penalties, truncation or beams, samples would not be the policy's.
    """
    before = [model.generation_config for model in models]
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "cache_implementation")
    try:
        for model, config in zip(models, before, strict=True):
            options = {k: x for k in names if (x := getattr(config, k, None)) is not None}
            model.generation_config = type(config)(**options)
        yield
    finally:
        for model, config in zip(models, before, strict=True):
            model.generation_config = config


def without_dropout(policy: Policy) -> Policy:
    """Puts the policy into evaluation mode, as every dropout mask is another policy.

    Checkpointed layers stay in training mode, as checkpointing needs it; the modules inside them do
    not.
    """
    policy.eval()
    for module in policy.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
    return policy


def misses_parameters(model: nn.Module, ids: Tensor) -> bool:
    """True if logits of a text do not depend on some trained parameter.

    Examples are weights of an image tower, and experts that the text is not routed to. DDP then
    needs `find_unused_parameters`, or a step waits for their gradients.
    """
    ids = ids.to(next(model.parameters()).device)
    with torch.enable_grad():
        nodes = [model(input_ids=ids, use_cache=False).logits.grad_fn]
    seen, reached = set[Any](), set[int]()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
            reached.add(id(getattr(node, "variable", None)))
    return any(p.requires_grad and id(p) not in reached for p in model.parameters())


def position_ids_of(mask: Tensor) -> Tensor:
    """Returns position ids, which padding on the left does not advance."""
    return (mask.cumsum(1) - 1).clamp(min=0)


def why_not_shared(model: Any) -> str | None:
    """Returns why a cache cannot carry a prompt over to its completions; None if it can."""
    from transformers.cache_utils import DynamicLayer

    model = base_model(model)
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return "gradient checkpointing keeps no cache"
    if is_recurrent(model):
        return f"{type(model).__name__} keeps a recurrent state"
    cache = _cache_of_a_token(model)
    if cache is None:
        return f"{type(model).__name__} has no key-value cache"
    kinds = map(type, cache.keys_and_values.layers)
    other = next((kind.__name__ for kind in kinds if kind is not DynamicLayer), "")
    return f"{type(model).__name__} has a {other} in its cache" if other else None


@torch.no_grad()
def _cache_of_a_token(model: Any) -> Cached | None:
    """Runs the body on one token; returns its cache, or None."""
    body, device = body_of(model), model.get_input_embeddings().weight.device
    forecast = device.type == "meta"
    with evaluating(model), without_memory() if forecast else nullcontext():
        state = fake_cpu_tensors(body) if forecast else {}
        ids = torch.zeros(1, 1, dtype=torch.int64, device="cpu" if forecast else device)
        inputs = {"input_ids": ids, "use_cache": True}
        return Cached.from_output(torch.func.functional_call(body, state, (), inputs))


def fake_cpu_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Makes CPU tensors for a module on the meta device, in a block `without_memory`."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        name: torch.empty(x.shape, dtype=x.dtype, device="cpu", requires_grad=x.requires_grad)
        for name, x in tensors.items()
    }

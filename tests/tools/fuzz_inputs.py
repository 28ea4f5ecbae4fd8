"""What `fuzz.py` draws: valid calls, and things that may happen to them.

Parameters are read off the signatures of the calls, and the fields of `LMHead`, `Execution` and of
what these hold; each has a generator in `GENERATORS` or `FIELDS`.
"""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, replace
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import grpo_kernels
from grpo_kernels import Execution, GRPOLossConfig, LMHead, Support, VocabRanks
from grpo_kernels.head.lm_head import HIDDEN_LAYOUTS, LOGITS_DTYPES
from grpo_kernels.integrations import verl
from grpo_kernels.integrations.liger import FusedLinearGRPOLoss
from grpo_kernels.integrations.transformers import Objective
from tests.helpers.batches import OBJECTIVES, Batch, config, make_batch, packed, with_cross_entropy
from tests.helpers.supports import make_support
from tests.helpers.tiny_models import V as ENTRIES_OF_MODEL

FUNCTIONS: dict[str, tuple[Callable[..., Any], ...]] = {
    "fused_grpo_loss": (grpo_kernels.fused_grpo_loss,),
    "linear_logprobs": (grpo_kernels.linear_logprobs,),
    "grpo_loss": (grpo_kernels.grpo_loss,),
    "selective_log_softmax": (grpo_kernels.selective_log_softmax,),
    "liger": (FusedLinearGRPOLoss.__init__, FusedLinearGRPOLoss.forward),
    "verl": (verl.linear_cross_entropy,),
    "transformers": (Objective.__init__,),
}
CALLS, DROP_INS = tuple(FUNCTIONS)[:4], tuple(FUNCTIONS)[4:]
# Ours for the names of drop-ins.
OURS = {
    "labels": "targets", "selected_token_ids": "targets", "_input": "hidden",
    "lin_weight": "weight", "attention_mask": "mask", "old_per_token_logps": "old_logps",
    "ref_per_token_logps": "ref_logps", "num_items_in_batch": "num_items",
    "epsilon_low": "epsilon", "dist_process_group": "ranks",
}  # fmt: skip
CONFIG_FIELDS = {field.name for field in fields(GRPOLossConfig)}
# What has a gradient, and what belongs to a loss.
TRAINED = ("hidden", "weight", "bias", "low_rank", "logps", "logits", "entropy")
OF_LOSS = set(inspect.signature(grpo_kernels.grpo_loss).parameters) - {"mask", "backend"}


@cache
def parameters(call: str) -> dict[str, bool]:
    """What a call takes, heads and executions field by field, and whether it has to be given."""
    found: dict[str, bool] = {}
    for function in FUNCTIONS[call]:
        for name, its in inspect.signature(function).parameters.items():
            nested = {"head": LMHead, "execution": Execution}.get(name)
            if nested is not None:
                found |= {field.name: field.default is MISSING for field in fields(nested)}
            elif name not in ("self", "states"):  # which asks for no scores
                found[name] = its.default is inspect.Parameter.empty
    return found


@cache
def objectives(call: str) -> list[str]:
    """The objectives that a call has."""
    if call != "liger":
        return list(OBJECTIVES)
    names, found = {OURS.get(x, x): x for x in parameters(call)}, []
    for objective, (options, tensors) in OBJECTIVES.items():
        if names.keys() >= {*options, *tensors}:
            made = config(**options)
            with contextlib.suppress(ValueError):
                FusedLinearGRPOLoss(**{names[k]: getattr(made, k) for k in options})
                found.append(objective)
    return found


def rows_of(batch: Batch) -> Tensor:
    """The tokens that take part: those of the mask, and of the cross-entropy."""
    return batch.mask if batch.ce_weights is None else batch.mask | (batch.ce_weights != 0)


class Built(NamedTuple):
    """An object that is made in the call: what it checks is part of it."""

    make: Callable[..., Any]
    options: dict[str, Any]


class Valid:
    """A valid call: its batch, its objective, and a value for whatever it may be given."""

    def __init__(self, call: str, draw: random.Random) -> None:
        self.call, self.draw = call, draw
        B, T = draw.randint(1, 4), draw.randint(1 if call in CALLS else 2, 7)
        H, V = draw.choice((1, 3, 16)), draw.choice((2, 17, 130, 1025, 5000))
        if call == "liger" and draw.random() < 0.02:
            H, V = 1, 200_000
        V = ENTRIES_OF_MODEL if call == "transformers" else V
        self.batch = make_batch(B=B, T=T, H=H, V=V, seed=draw.randrange(10**6))
        if "ce_weights" in parameters(call) and draw.random() < 0.15:
            self.batch = with_cross_entropy(self.batch)
        if call not in ("liger", "transformers") and draw.random() < 0.3:
            self.batch = packed(self.batch)
        options, self.tensors = OBJECTIVES[draw.choice(objectives(call))]
        self.config = config(**options)
        if call != "liger" and draw.random() < 0.3:
            option = {draw.choice(sorted(CONFIG_FIELDS)): draw.choice((0.3, 1.5))}
            with contextlib.suppress(TypeError, ValueError):
                self.config = replace(self.config, **option)
                self.tensors = (*self.tensors, *(["ref_logps"] if self.config.beta else []))
        has_loss = "advantages" in parameters(call)
        if call == "transformers" and draw.random() < 0.3:
            has_loss = False
        # Masked positions hold NaN.
        self.needed = {"mask"}
        if has_loss:
            self.needed |= {"advantages", "cu_seqlens", "ce_weights", "config", "use_ref_model",
                            *CONFIG_FIELDS, *self.tensors}  # fmt: skip
        if self.config.entropy_coef or self.config.top_entropy_quantile < 1:
            self.needed.add("entropy")
        self.unused = set() if has_loss else OF_LOSS

    def given(self) -> dict[str, Any]:
        found = {}
        for name, needed in parameters(self.call).items():
            ours = OURS.get(name, name)
            needed |= ours in self.needed
            if ours not in self.unused and (needed or self.draw.random() < 0.12):
                value = self.value(ours)
                if value is not None:
                    found[name] = value
        return found

    def value(self, name: str) -> Any:
        """A value of the parameter; None: it is left out."""
        if name in CONFIG_FIELDS - GENERATORS.keys():
            value = getattr(self.config, name)
            return self.config.epsilon if name == "epsilon_high" and value is None else value
        return GENERATORS[name](self)

    def built(self, make: type) -> Built:
        """An object most of whose fields are not the defaults."""
        names = [field.name for field in fields(make) if self.draw.random() < 0.8]
        return Built(make, {name: FIELDS[make][name](self) for name in names})

    def backend(self) -> str:
        """Triton where the interpreter has few programs to run."""
        return self.draw.choice(("auto", "torch", *(["triton"] * (len(self.batch.weight) < 200))))

    def temperature(self) -> Any:
        x = self.batch.temperature
        if self.call == "selective_log_softmax":
            x = x.nan_to_num(nan=1.0)
        return self.draw.choice((0.7, x))

    def low_rank(self) -> tuple[Tensor, Tensor]:
        rank = min(4, self.batch.weight.shape[1])
        return self.batch.hidden[..., :rank] / 4, self.batch.weight[:, -rank:] / 4

    def support(self) -> Support:
        batch = replace(self.batch, mask=rows_of(self.batch))
        return make_support(batch, seed=self.draw.randrange(10**6), most=9)

    def random_like(self, x: Tensor) -> Tensor:
        g = torch.Generator().manual_seed(self.draw.randrange(10**6))
        return torch.rand(x.shape, generator=g)

    def ranks(self) -> Any:
        return dist.group.WORLD if self.call == "verl" else self.built(VocabRanks)


def product(a: Tensor, b: Tensor) -> Tensor:
    """The matmul of a sampler."""
    return torch.mm(a, b)


# A value of every parameter and field, by name; those of `GRPOLossConfig` are in OBJECTIVES.
Generator = Callable[[Valid], Any]
GENERATORS: dict[str, Generator] = {
    **{name: attrgetter(f"batch.{name}") for name in (
        "hidden", "weight", "bias", "mask", "advantages", "old_logps", "ref_logps",
        "sampling_logps", "ce_weights", "cu_seqlens")},
    "low_rank": Valid.low_rank,
    "logit_scale": lambda v: v.draw.choice((0.5, 1.3)),
    "softcap": lambda v: v.draw.choice((5.0, 30.0)),
    "temperature": Valid.temperature,
    "logits_dtype": lambda v: v.draw.choice(LOGITS_DTYPES),
    "ranks": Valid.ranks,
    "backend": Valid.backend,
    "chunk_bytes": lambda v: 4 * len(v.batch.weight) * v.draw.randint(1, 9),
    "batch_invariant": lambda v: True,
    "matmul": lambda v: product,
    "capturable": lambda v: True,
    "exp_gemm": lambda v: False,  # most of what is drawn needs logits
    "keep_gradients": lambda v: False,
    "entries": lambda v: False,
    # Two models are test_pairs'.
    "reference": lambda v: None,
    "targets": lambda v: v.batch.targets.clamp(min=0) if v.call == "selective_log_softmax" else (
        v.batch.targets),
    "support": Valid.support,
    "config": lambda v: Built(config, {
        field.name: x for field in fields(v.config)
        if (x := getattr(v.config, field.name)) != field.default}),
    "num_items": lambda v: v.draw.choice((1, 7.5, torch.tensor(9.0))),
    "entropy": lambda v: v.random_like(v.batch.mask) if v.call == "grpo_loss" else True,
    "logps": lambda v: v.batch.old_logps.nan_to_num(0.0) + 0.1,
    "logits": lambda v: v.batch.hidden.nan_to_num() @ v.batch.weight.T,
    # Of the drop-ins alone.
    "reduction": lambda v: v.draw.choice(("none", "sum", "mean")),
    "compiled": lambda v: v.draw.random() < 0.5,
    "chunk_size": lambda v: v.draw.randint(1, 9),
    "use_ref_model": lambda v: "ref_logps" in v.tensors,
    "vllm_is_ratio": lambda v: torch.full(
        v.draw.choice((v.batch.mask.shape, v.batch.mask[:, :1].shape, v.batch.mask[:, 0].shape)),
        v.draw.choice((1.0, 1.0, 0.5))),
    # Where there are log-probs of the reference these do not count.
    "ref_input": lambda v: v.batch.hidden if "ref_logps" in v.tensors else None,
    "ref_weight": lambda v: v.batch.weight,
    "ref_bias": lambda v: v.batch.bias,
}  # fmt: skip
# Likewise of what fields hold.
FIELDS: dict[type, dict[str, Generator]] = {
    VocabRanks: {
        "group": lambda v: dist.group.WORLD,
        "start": lambda v: 0,
        "hidden": lambda v: v.draw.choice(HIDDEN_LAYOUTS),
    },
}
JUNK = (
    0, 1, -1, 2.5, None, True, "x", "torch", "triton", float("inf"), float("nan"), 10**9,
    torch.tensor(1.0), torch.ones(3), [], (), {}, 1e-30,
    Support(torch.zeros(1).long(), torch.zeros(2).long()),
)  # fmt: skip
# A second change may not go with the first.
NOT_TOGETHER = (
    RuntimeError, IndexError, KeyError, AttributeError, TypeError, NotImplementedError
)  # fmt: skip
# After these a call is more likely to be right.
_MAY_BE_RIGHT = ("strides", "half", "value", "needs grad", "small", "large", "expanded")


def happens(call: str, given: dict[str, Any], kept: Sequence[str], draw: random.Random) -> str:
    """Changes what is given, but for what is `kept`, and tells what was done."""
    name, place = draw.choice([at for at in places(given) if at[0] not in kept])
    x = at_place(given, name, place)
    g = torch.Generator().manual_seed(draw.randrange(10**6))
    changes: dict[str, Any] = {
        "strides": lambda: _strided(x, draw),
        "half": lambda: x.to(draw.choice((torch.float16, torch.bfloat16, torch.float64))),
        "dtype": lambda: x.to(
            draw.choice((torch.int32, torch.int64, torch.float32, torch.bool))
        ),
        "odd dtype": lambda: x.to(draw.choice((torch.complex64, torch.uint8, torch.int8))),
        "one less": lambda: x[: len(x) - 1] if x.ndim else x,
        "one more": lambda: torch.cat([x, x[:1]]) if x.ndim else x,
        "another dimension": lambda: x[None] if draw.random() < 0.5 else x[..., None],
        "flat": lambda: x.flatten(),
        "empty": lambda: x[:0] if x.ndim else x,
        "none": lambda: None,
        "no tensor": lambda: draw.choice((1, 0.5, "x", [1.0], (), {}, float("nan"), -1)),
        "list": lambda: x.tolist(),
        "meta": lambda: x.to("meta"),
        "large": lambda: x * (draw.choice((1e4, 1e20, -1e30)) if x.is_floating_point() else 3),
        "small": lambda: x * 1e-30 if x.is_floating_point() else x,
        "value": lambda: _with_value(x, draw, g),
        "needs grad": lambda: x.clone().requires_grad_() if x.is_floating_point() else x,
        "transposed": lambda: x.transpose(0, -1) if x.ndim > 1 else x,
        "expanded": lambda: x[:1].expand(x.shape) if x.ndim and len(x) else x,
    }  # fmt: skip
    kinds = [*changes, *_MAY_BE_RIGHT, "alias", "option", "option", "missing", "head in half"]
    kind = draw.choice(kinds)
    if kind == "alias":
        _alias(given)
    elif kind == "option":
        name = _option(call, given, draw)
    elif kind == "missing":
        del given[name]
    elif kind == "head in half":
        dtype = draw.choice((torch.float16, torch.bfloat16))
        for name, place in places(given):
            if OURS.get(name, name) in TRAINED:
                put(given, name, place, at_place(given, name, place).to(dtype))
    else:
        put(given, name, place, changes[kind]())
    return f"{kind} of {name}"


def _alias(given: dict[str, Any]) -> None:
    """The hidden states are rows of the head."""
    names = {OURS.get(name, name): name for name in given}
    weight, mask = (given[names[x]] for x in ("weight", "mask"))
    if 0 < mask.numel() <= len(weight):
        rows = weight[: mask.numel()]
        given[names["hidden"]] = rows.view(*mask.shape, weight.shape[1])


def _option(call: str, given: dict[str, Any], draw: random.Random) -> str:
    """Any value for any parameter, or for a field of what one holds."""
    value, built = draw.choice(JUNK), [name for name, x in given.items() if isinstance(x, Built)]
    if built and draw.random() < 0.3:
        name = draw.choice(built)
        make, options = given[name]
        field = draw.choice(fields(GRPOLossConfig if make is config else make)).name
        given[name] = Built(make, options | {field: value})
        return f"{name}.{field}"
    name = draw.choice([*parameters(call), "unknown"])
    given[name] = value
    return name


def _strided(x: Tensor, draw: random.Random) -> Tensor:
    """The same values at other strides."""
    if not x.ndim:
        return x
    if x.ndim > 1 and draw.random() < 0.5:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    return torch.stack([x, x], -1)[..., 0]


def _with_value(x: Tensor, draw: random.Random, g: torch.Generator) -> Tensor:
    """Some of its values are others."""
    values = (-1, 2, 10**6, -100, -(10**9))
    if x.is_floating_point():
        values = (float("nan"), float("inf"), -float("inf"), 0.0, -1.0, 1e30, 1e-40)
    if x.dtype == torch.bool or not x.numel():
        return ~x if x.dtype == torch.bool else x
    return torch.where(torch.rand(x.shape, generator=g) < 0.2, draw.choice(values), x).to(x.dtype)


def places(given: dict[str, Any]) -> list[tuple[str, int | None]]:
    """Where tensors are given: names, and places in the tuples that some of these hold."""
    found: list[tuple[str, int | None]] = []
    for name, x in given.items():
        if isinstance(x, Tensor):
            found.append((name, None))
        elif isinstance(x, tuple) and not isinstance(x, Built):
            found += [(name, i) for i, y in enumerate(x) if isinstance(y, Tensor)]
    return found


def at_place(given: dict[str, Any], name: str, place: int | None) -> Any:
    return given[name] if place is None else given[name][place]


def put(given: dict[str, Any], name: str, place: int | None, x: Any) -> None:
    if place is not None:
        held = given[name]
        values = [*held[:place], x, *held[place + 1 :]]
        x = type(held)(*values) if hasattr(held, "_fields") else tuple(values)
    given[name] = x


def resolved(x: Any) -> Any:
    return x.make(**x.options) if isinstance(x, Built) else x

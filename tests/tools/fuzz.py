"""Calls drawn at random, most of them a little wrong: each is right, or refused in words.

    python -m tests.tools.fuzz --seconds 600 [--seed 7]

Each input is a valid call of one of the four functions, or of a drop-in (Liger's class, verl's
function, a fused head on a model of transformers), to which up to three things happen: other
strides, dtypes, layouts, an alias, extreme or missing values, another shape, an option with any
value. It may raise a TypeError or ValueError that says what was expected. Else value and gradients
are those of the float64 reference, or, where the reference is not finite either or float32 cannot
know, they are at least there. Anything else is printed with its seed, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from copy import deepcopy
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import grpo_kernels
from grpo_kernels import GRPOLossConfig, reference
from grpo_kernels.hf_head import HEAD_OPTIONS
from grpo_kernels.integrations import verl
from grpo_kernels.integrations.liger import FusedLinearGRPOLoss
from grpo_kernels.integrations.transformers import Objective, attach_fused_head, detach_fused_head
from tests.support.batches import OBJECTIVES, config, make_batch, packed
from tests.support.tiny_models import V as WORDS_OF_MODEL
from tests.support.tiny_models import make_model

CALLS = ("fused_grpo_loss", "linear_logprobs", "grpo_loss", "selective_log_softmax")
# What an error has to say.
IN_WORDS = re.compile(r"(expected|unexpected keyword|required positional|multiple values|must be)")
PER_TOKEN = ("old_logps", "ref_logps", "sampling_logps", "temperature", "ce_weights")
HEAD = ("hidden", "weight", "bias")
# Objectives that Liger's class has, and the options it names as we do.
_OF_LIGER = (
    "on_policy", "old_logps", "clip_asymmetric", "no_clip_range", "delta", "luspo", "kl",
    "kl_metric_only", "kl_old_delta", "kl_uncorrected", "cispo", "sapo", "sequence", "vespo",
)  # fmt: skip
_LIGER_OPTIONS = (
    "loss_type", "beta", "epsilon_high", "delta", "max_completion_length", "temperature",
    "importance_sampling_level", "use_bias_correction_kl", "sapo_temperature_pos",
    "sapo_temperature_neg", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg",
)  # fmt: skip


class Call:
    """A call of a function by names, and what happened to it."""

    names: tuple[str, ...] = CALLS
    kept: tuple[str, ...] = ()  # to which nothing happens

    def __init__(self, seed: int) -> None:
        self.seed, self.draw = seed, random.Random(seed)
        self.name = self.draw.choice(self.names)
        self.notes: list[str] = []
        self.given = self._valid()
        for _ in range(self.draw.choice((0, 1, 1, 1, 2, 2, 3))):
            # A second change may not go with the first.
            with contextlib.suppress(RuntimeError, IndexError, TypeError, NotImplementedError):
                self.notes.append(self._happens())

    def _valid(self) -> dict[str, Any]:
        draw = self.draw
        B, T = draw.randint(1, 4), draw.randint(1, 7)
        H, V = draw.choice((1, 3, 16)), draw.choice((2, 17, 130, 1025, 5000))
        batch = make_batch(B=B, T=T, H=H, V=V, seed=draw.randrange(10**6))
        if draw.random() < 0.3:
            batch = packed(batch)
        given: dict[str, Any] = {"mask": batch.mask}
        if batch.cu_seqlens is not None and self.name in ("fused_grpo_loss", "grpo_loss"):
            given["cu_seqlens"] = batch.cu_seqlens
        if self.name == "selective_log_softmax":
            logits = batch.hidden.nan_to_num() @ batch.weight.T
            return {"logits": logits, "targets": batch.targets.clamp(min=0)}
        if self.name != "grpo_loss":
            given |= {"hidden": batch.hidden, "weight": batch.weight, "targets": batch.targets}
            given |= {"bias": batch.bias} if draw.random() < 0.3 else {}
            given |= {"temperature": batch.temperature} if draw.random() < 0.3 else {}
            given |= {"softcap": 30.0} if draw.random() < 0.2 else {}
            given |= {"chunk_bytes": 4 * V * draw.randint(1, 9)} if draw.random() < 0.5 else {}
            given |= {"batch_invariant": True} if draw.random() < 0.1 else {}
            given |= {"logits_dtype": draw.choice(("fp32", "model"))} if draw.random() < 0.2 else {}
        if self.name == "linear_logprobs":
            given["entropy"] = draw.random() < 0.5
            return given
        options, tensors = OBJECTIVES[draw.choice(list(OBJECTIVES))]
        given |= {"config": config(**options), "advantages": batch.advantages}
        given |= {name: getattr(batch, name) for name in tensors}
        if self.name == "grpo_loss":
            logps = batch.old_logps.nan_to_num(0.0) + 0.1
            given |= {"logps": logps}
            if options.get("entropy_coef") or "top_entropy_quantile" in options:
                given["entropy"] = torch.rand(logps.shape)
        if draw.random() < 0.2:
            given["num_items"] = draw.choice((1, 7.5, torch.tensor(9.0)))
        return given

    def _happens(self) -> str:
        draw = self.draw
        tensors = [k for k, v in self.given.items() if isinstance(v, Tensor) and k not in self.kept]
        name = draw.choice(tensors)
        x = self.given[name]
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
        kind = draw.choice([*changes, "alias", "option", "missing", "head in half"])
        if kind == "alias" and {"hidden", "weight"} <= self.given.keys():
            weight = self.given["weight"]
            rows = self.given["mask"].numel() if isinstance(self.given.get("mask"), Tensor) else 0
            if isinstance(weight, Tensor) and weight.ndim == 2 and 0 < rows <= len(weight):
                shape = (*self.given["mask"].shape, weight.shape[1])
                self.given["hidden"] = (
                    weight[:rows].view(shape) if weight.is_contiguous() else weight
                )
        elif kind == "option":
            name = draw.choice((
                "temperature", "softcap", "logit_scale", "chunk_bytes", "num_items", "backend",
                "backward", "tolerance", "seed", "logits_dtype", "config", "capturable",
                "batch_invariant", "matmul", "entropy", "unknown",
            ))  # fmt: skip
            self.given[name] = draw.choice((
                0, 1, -1, 2.5, None, True, "x", "torch", "sampled", float("inf"), float("nan"),
                10**9, torch.tensor(1.0), torch.ones(3), [], 1e-30,
            ))  # fmt: skip
        elif kind == "missing":
            del self.given[name]
        elif kind == "head in half":
            dtype = draw.choice((torch.float16, torch.bfloat16))
            for name in HEAD:
                if isinstance(self.given.get(name), Tensor):
                    self.given[name] = self.given[name].to(dtype)
        elif kind in changes:
            self.given[name] = changes[kind]()
        return f"{kind} of {name}"

    def run(self, exact: bool) -> dict[str, Tensor]:
        """Values and gradients; in float64 with the reference."""
        given, leaves = dict(self.given), {}
        for name in (*HEAD, "logps", "logits"):
            x = given.get(name)
            if isinstance(x, Tensor) and x.is_floating_point() and x.device.type == "cpu":
                given[name] = leaves[name] = (
                    x.detach().double() if exact else x.detach().view(x.shape)
                ).requires_grad_()
        if exact:
            given = {k: _widened(v) for k, v in given.items() if k not in _FAST}
            if given.get("logits_dtype") == "model":
                given["logits_dtype"] = self.given["hidden"].dtype
            elif "logits_dtype" in given:
                del given["logits_dtype"]
            if self.name == "linear_logprobs":
                given.pop("entropy", None)
        out = self._call(exact, given)
        names = ["loss", "logps"]
        # The reference of `linear_logprobs` always has them.
        if self.name != "linear_logprobs" or self.given.get("entropy"):
            names.append("entropy")
        values = {"out": out} if isinstance(out, Tensor) else {
            k: v for k in names if isinstance(v := getattr(out, k, None), Tensor)
        }  # fmt: skip
        total = values.get("loss", sum(v.float().sum() for v in values.values()))
        if isinstance(total, Tensor) and total.requires_grad:
            total.backward()
        grads = {f"d_{k}": x.grad for k, x in leaves.items() if x.grad is not None}
        return {k: v.detach() for k, v in (values | grads).items()}

    def _call(self, exact: bool, given: dict[str, Any]) -> Any:
        return getattr(reference if exact else grpo_kernels, self.name)(**given)


class NoReference(Exception):
    """What a drop-in does with this input has no counterpart here."""


class DropIn(Call):
    """A call of a drop-in, with the names of `fused_grpo_loss` until it is made."""

    names = ("liger", "verl", "transformers")
    kept = ("input_ids", "attention_mask")

    def _valid(self) -> dict[str, Any]:
        draw = self.draw
        B, T = draw.randint(1, 4), draw.randint(2, 7)
        V = 200_000 if draw.random() < 0.01 else draw.choice((2, 17, 130, 1025))
        H = 1 if V == 200_000 else draw.choice((1, 3, 16))
        batch = make_batch(B=B, T=T, H=H, V=WORDS_OF_MODEL if self.name == "transformers" else V,
                           seed=draw.randrange(10**6))  # fmt: skip
        given: dict[str, Any] = {"targets": batch.targets, "mask": batch.mask}
        if self.name == "transformers":
            given["input_ids"] = torch.where(batch.mask, batch.targets, 1)
            given["attention_mask"] = torch.ones_like(batch.targets)
        else:
            given |= {"hidden": batch.hidden, "weight": batch.weight}
            given |= {"bias": batch.bias} if draw.random() < 0.3 else {}
        if self.name == "verl":
            given |= {"temperature": 0.7} if draw.random() < 0.3 else {}
            given |= {"reduction": draw.choice(("none", "sum", "mean"))}
            return given
        if self.name == "transformers" and draw.random() < 0.3:
            return given
        if self.name == "liger" and draw.random() < 0.2:
            shape = draw.choice((batch.mask.shape, (B, 1), (B,)))
            given["vllm_is_ratio"] = torch.full(shape, draw.choice((1.0, 1.0, 0.5)))
        objectives = _OF_LIGER if self.name == "liger" else list(OBJECTIVES)
        options, tensors = OBJECTIVES[draw.choice(objectives)]
        given |= {"config": config(**options), "advantages": batch.advantages}
        given |= {name: getattr(batch, name) for name in tensors}
        if draw.random() < 0.2:
            given["num_items"] = draw.choice((1, 7.5, torch.tensor(9.0)))
        return given

    def _call(self, exact: bool, given: dict[str, Any]) -> Any:
        if self.name == "verl":
            if not exact:
                given = {"labels" if k == "targets" else k: v for k, v in given.items()}
                logps, entropy = verl.linear_cross_entropy(**given)
                return SimpleNamespace(logps=logps, entropy=entropy)
            reduction = given.pop("reduction", "none")
            out = reference.linear_logprobs(**given)
            logps = out.logps if reduction == "none" else getattr(out.logps, reduction)()
            return SimpleNamespace(logps=logps, entropy=out.entropy)
        if exact:
            options = given.get("config")
            if getattr(options, "loss_type", "") not in ("dapo", "cispo", "vespo"):
                given.pop("num_items", None)  # Liger's others do not take it
            else:
                num_items = given.get("num_items")
                num_items = given["mask"].sum() if num_items is None else num_items
                given["num_items"] = max(1.0, float(num_items))
            if (weights := given.pop("vllm_is_ratio", None)) is not None:
                if options.loss_type == "vespo" and not (weights == 1).all():
                    raise NoReference
                x = given["advantages"]
                weights, x = (y[:, None] if y.ndim == 1 else y for y in (weights, x))
                given["advantages"] = (x * weights).expand(given["mask"].shape)
            return SimpleNamespace(loss=reference.fused_grpo_loss(**given).loss)
        options = given.pop("config", None)
        names = {
            "hidden": "_input", "weight": "lin_weight", "targets": "selected_token_ids",
            "mask": "attention_mask", "old_logps": "old_per_token_logps",
            "ref_logps": "ref_per_token_logps", "num_items": "num_items_in_batch",
        }  # fmt: skip
        made: dict[str, Any] = {"use_ref_model": "ref_logps" in given}
        if isinstance(options, GRPOLossConfig):
            of_config = {k: v for k, v in vars(options).items() if k in _LIGER_OPTIONS}
            made |= of_config | {"epsilon_low": options.epsilon}
            if options.epsilon_high is None:
                made["epsilon_high"] = options.epsilon
        else:
            made["loss_type"] = options
        head = {k: given.pop(k) for k in [*given] if k in HEAD_OPTIONS}
        loss = FusedLinearGRPOLoss(**made, **head)
        return SimpleNamespace(loss=loss(**{names.get(k, k): v for k, v in given.items()})[0])

    def run(self, exact: bool) -> dict[str, Tensor]:
        """As of a call; of a model with the gradients of its head and of its first layer."""
        if self.name != "transformers":
            return super().run(exact)
        model = _model(exact)
        model.zero_grad()
        given = dict(self.given)
        ids, attention = given.pop("input_ids"), given.pop("attention_mask")
        labels = given.pop("targets", None)
        if exact:
            given = {k: _widened(v) for k, v in given.items() if k not in (*_FAST, "logits_dtype")}
            hidden = model.model(ids, attention_mask=attention).last_hidden_state
            # As with the model's own labels, -100 is not scored, whatever the mask says.
            mask = given.get("mask")
            given["mask"] = (labels != -100) & (
                torch.ones_like(ids) if mask is None else mask
            ).bool()
            given |= {"hidden": hidden, "weight": model.lm_head.weight, "targets": labels}
            function = "fused_grpo_loss" if "advantages" in given else "linear_logprobs"
            out = getattr(reference, function)(**given)
        else:
            # A label is predicted by the position before it.
            longer = (torch.nn.functional.pad(x, (0, 1), value=1) for x in (ids, attention))
            if isinstance(labels, Tensor) and labels.ndim == 2:
                labels = torch.nn.functional.pad(labels, (1, 0))
            ids, attention = longer
            objective = Objective(**given)
            out = model(ids, attention_mask=attention, labels=labels, fused_head=objective)
        loss = getattr(out, "loss", None)
        total = out.logps.sum() + out.entropy.sum() if loss is None else loss
        total.backward()
        found = {"logps": out.logps, "entropy": out.entropy, "d_head": model.lm_head.weight.grad}
        found["d_first"] = model.model.layers[0].self_attn.q_proj.weight.grad
        found |= {} if loss is None else {"loss": loss}
        return {k: v.detach().clone() for k, v in found.items()}


@cache
def _model(exact: bool) -> Any:
    """A model of transformers with a fused head; the same in float64."""
    if exact:
        model = deepcopy(_model(False))
        detach_fused_head(model)
        return model.double()
    model = make_model("llama", tie_word_embeddings=False).eval()
    attach_fused_head(model)
    return model


_FAST = {
    "backend", "chunk_bytes", "backward", "tolerance", "seed", "batch_invariant", "capturable",
    "matmul",
}  # fmt: skip


def _widened(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.dtype == torch.float32 else x


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


def verdict(call: Call) -> str:
    """`"refused"`, `"equal"`, `"not compared: ..."`; anything else raises."""
    try:
        found = call.run(exact=False)
    except (TypeError, ValueError) as error:
        if IN_WORDS.search(str(error)):
            return "refused"
        raise
    if any(x.device.type == "meta" for x in found.values()):
        return "not compared: meta"
    try:
        expected = call.run(exact=True)
    except NoReference:
        return "not compared: there is no reference"
    except Exception as error:
        return f"not compared: the reference raises {type(error).__name__}"
    if not all(bool(x.isfinite().all()) for x in expected.values()):
        return "not compared: the reference is not finite"
    if not all(bool(x.isfinite().all()) for x in found.values()) and _not_finite(call):
        return "not compared: not finite, as what was given"
    if call.given.get("backward") == "sampled" or call.given.get("logits_dtype") == "model":
        return "not compared: drawn, or rounded to one neighbour or the other"
    if max(map(_largest, expected.values()), default=0.0) > 1e30:
        return "not compared: float32 ends there"
    half = any(x.dtype in (torch.float16, torch.bfloat16) for x in _tensors(call))
    loss_of_digits = _digits(call)
    if loss_of_digits > 1e-3 or _close_entropies(call, expected):
        return "not compared: float32 does not know"
    if half and max(map(_largest, expected.values()), default=0.0) > 3e4:
        return "not compared: half precision ends there"
    # Logits are known to so much, and what is made of their differences to no more.
    tolerance = (3e-2 if half else 2e-3) + 100 * loss_of_digits
    # Terms of this size may cancel in a gradient, and a GEMM may add them up one after the other.
    V = len(call.given["weight"]) if "weight" in call.given else 1
    floor = (1e-2 + 2e-6 * V) * max(map(_largest, expected.values()), default=0.0)
    for name, value in expected.items():
        if not value.numel():
            continue
        mine = found[name].double()
        least = 1e-3 if name.startswith("d_") else 1.0
        scale = max(least, floor, _largest(value))
        error = float((mine - value.double()).abs().max())
        if not error <= tolerance * scale:
            raise AssertionError(f"{name}: off by {error:.2e}, values up to {scale:.2e}")
    return "equal"


def _close_entropies(call: Call, expected: dict[str, Tensor]) -> bool:
    """Whether rounding may put a token on the other side of a quantile of entropies."""
    options, entropy = call.given.get("config"), expected.get("entropy", call.given.get("entropy"))
    if getattr(options, "top_entropy_quantile", 1.0) == 1.0 or not isinstance(entropy, Tensor):
        return False
    gaps = entropy[entropy != 0].double().sort().values.diff()
    return bool((gaps < 1e-5).any())


def _not_finite(call: Call) -> bool:
    """Whether a token of the mask was given a value that is not finite."""
    mask = call.given.get("mask")
    return isinstance(mask, Tensor) and any(
        bool((~x[mask != 0].isfinite()).any())
        for x in _tensors(call)
        if x.is_floating_point() and x.shape == mask.shape
    )


def _tensors(call: Call) -> list[Tensor]:
    return [x for x in call.given.values() if isinstance(x, Tensor)]


def _digits(call: Call) -> float:
    """How much of a log-prob float32 does not know, by the size of logits and of log-probs."""
    largest = 0.0
    given = call.given
    if {"hidden", "weight"} <= given.keys():
        largest = _largest(given["hidden"]) * _largest(given["weight"]) * given["weight"].shape[-1]
        largest = (largest + _largest(given.get("bias"))) * abs(given.get("logit_scale") or 1.0)
        temperature = given.get("temperature")
        if isinstance(temperature, Tensor) and temperature.numel():
            temperature = float(temperature.double().nan_to_num(1.0, 1.0, 1.0).abs().min())
        largest /= max(temperature, 1e-30) if isinstance(temperature, (int, float)) else 1.0
    for name in ("logits", "logps", "old_logps", "ref_logps", "sampling_logps", "advantages"):
        x = given.get(name)
        if isinstance(x, Tensor) and x.is_floating_point():
            largest = max(largest, _largest(x))
    return largest * 1.2e-7


def _largest(x: Any) -> float:
    """The largest finite absolute value of a tensor; 0 without any."""
    if not isinstance(x, Tensor) or not x.numel() or x.is_complex():
        return 0.0
    return float(x.detach().double().nan_to_num(0, 0, 0).abs().max())


def fuzz(seconds: float, seed: int, most: int = 10**12) -> tuple[Counter[str], list[int]]:
    """Draws calls for so long; the verdicts, and the seeds of what should not be."""
    told, bad, end = Counter[str](), list[int](), time.monotonic() + seconds
    while time.monotonic() < end and told.total() < most:
        seed += 1
        call = (DropIn if seed % 4 == 0 else Call)(seed)
        try:
            told[verdict(call)] += 1
        except Exception as error:
            told["WRONG"] += 1
            bad.append(seed)
            where = traceback.extract_tb(error.__traceback__)[-1]
            print(
                f"seed {seed}: {call.name}, {'; '.join(call.notes) or 'as it is'}: "
                f"{type(error).__name__}: {str(error)[:160]} ({where.filename}:{where.lineno})",
                flush=True,
            )
    return told, bad


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0, help="the first input's, less 1")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    told, bad = fuzz(args.seconds, args.seed)
    print(
        f"{sum(told.values()):,} inputs: {', '.join(f'{n:,} {k}' for k, n in told.most_common())}"
    )
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())

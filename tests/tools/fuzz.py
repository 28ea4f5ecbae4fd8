"""Calls drawn at random, most of them a little wrong: each is right, or refused in words.

    python -m tests.tools.fuzz --seconds 600 [--seed 7]

Each input is a valid call of one of the four functions, or of a drop-in (Liger's class, verl's
function, a fused head on a model of transformers), to which up to three things happen: other
strides, dtypes, layouts, an alias, extreme or missing values, another shape, an option with any
value. It may raise a TypeError or ValueError that says what was expected. Else value and gradients
are those of the float64 reference, or, where the reference is not finite either or float32 cannot
know, they are at least there. Anything else is printed with its seed, and the exit status is 1.

What is drawn is in `fuzz_inputs.py`. With TRITON_INTERPRET=1 Triton's kernels are called, too.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import random
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import grpo_kernels
from grpo_kernels import Execution, GRPOLossConfig
from grpo_kernels import reference as slow
from grpo_kernels.integrations import verl
from grpo_kernels.integrations.liger import FusedLinearGRPOLoss
from grpo_kernels.integrations.transformers import Objective, attach_fused_head, detach_fused_head
from tests.helpers import flat_calls
from tests.helpers.flat_calls import EXECUTION_FIELDS, HEAD_FIELDS
from tests.helpers.tiny_models import make_model
from tests.tools.fuzz_inputs import (
    CALLS,
    CONFIG_FIELDS,
    DROP_INS,
    NOT_TOGETHER,
    OURS,
    TRAINED,
    Built,
    Valid,
    at_place,
    happens,
    parameters,
    places,
    put,
    resolved,
    rows_of,
)

# What an error has to say.
IN_WORDS = re.compile(
    r"(expected|unexpected keyword|required positional|multiple values|must be|needs)"
)


class Call:
    """A call of a function by names, and what happened to it."""

    names: tuple[str, ...] = CALLS
    kept: tuple[str, ...] = ()  # to which nothing happens

    def __init__(self, seed: int) -> None:
        self.seed, self.draw = seed, random.Random(seed)
        self.name = self.draw.choice(self.names)
        self.notes: list[str] = []
        self.given = self._valid(Valid(self.name, self.draw))
        for _ in range(self.draw.choice((0, 1, 1, 1, 2, 2, 3))):
            with contextlib.suppress(*NOT_TOGETHER):
                self.notes.append(happens(self.name, self.given, self.kept, self.draw))

    def _valid(self, valid: Valid) -> dict[str, Any]:
        return valid.given()

    @property
    def ours(self) -> dict[str, Any]:
        """What is given, by our names."""
        return {OURS.get(name, name): value for name, value in self.given.items()}

    def run(self, exact: bool) -> dict[str, Tensor]:
        """Values and gradients; in float64 with the reference."""
        given, leaves = {k: resolved(v) for k, v in self.given.items()}, {}
        for name, place in places(given):
            x = at_place(given, name, place)
            trained = OURS.get(name, name) in TRAINED
            if trained and x.is_floating_point() and x.device.type == "cpu":
                x = x.detach().double() if exact else x.detach().view(x.shape)
                leaves[f"{name}{'' if place is None else place}"] = x.requires_grad_()
                put(given, name, place, x)
        if exact:
            given = {k: _widened(v) for k, v in given.items()}
        out = self._call(exact, given)
        names = ["loss", "logps", "logsumexp"]
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
        if exact:
            return truth(self.name, given)
        of_head = "weight" in parameters(self.name)
        return getattr(flat_calls if of_head else grpo_kernels, self.name)(**given)


def truth(call: str, given: dict[str, Any]) -> Any:
    """The reference, of what concerns it."""
    if given.get("logits_dtype") == "model":
        given["logits_dtype"] = given["hidden"].dtype
    takes = {*inspect.signature(getattr(slow, call)).parameters, "weight"}
    if "of_loss" in takes:
        takes |= {*inspect.signature(slow.grpo_loss).parameters}
    if "head" in takes:
        takes |= set(HEAD_FIELDS)
    return getattr(flat_calls.reference, call)(**{k: v for k, v in given.items() if k in takes})


class NoReference(Exception):
    """What a drop-in does with this input has no counterpart here."""


class DropIn(Call):
    """A call of a drop-in, with its own names."""

    names = DROP_INS
    kept = ("input_ids", "attention_mask")

    def _valid(self, valid: Valid) -> dict[str, Any]:
        given, batch = super()._valid(valid), valid.batch
        if self.name == "transformers":
            ids = torch.where(rows_of(batch), batch.targets, 1)
            given |= {"input_ids": ids, "targets": batch.targets,
                      "attention_mask": torch.ones_like(batch.targets)}  # fmt: skip
        if self.name == "liger":
            self.kept = ()
            # Of the ways to have a reference one is enough.
            if "ref_input" in given and "ref_weight" in given:
                given.pop("ref_per_token_logps")
        return given

    def _call(self, exact: bool, given: dict[str, Any]) -> Any:
        if exact:
            given = {OURS.get(name, name): x for name, x in given.items()}
            return _truth_of_verl(given) if self.name == "verl" else _truth_of_liger(given)
        execution = {k: given.pop(k) for k in EXECUTION_FIELDS if k in given}
        if execution:
            given["execution"] = Execution(**execution)
        if self.name == "verl":
            logps, entropy = verl.linear_cross_entropy(**given)
            return SimpleNamespace(logps=logps, entropy=entropy)
        of_call = inspect.signature(FusedLinearGRPOLoss.forward).parameters
        loss = FusedLinearGRPOLoss(**{k: x for k, x in given.items() if k not in of_call})
        return SimpleNamespace(loss=loss(**{k: x for k, x in given.items() if k in of_call})[0])

    def run(self, exact: bool) -> dict[str, Tensor]:
        """As of a call; of a model with the gradients of its head and of its first layer."""
        if self.name != "transformers":
            return super().run(exact)
        model = _model(exact)
        model.zero_grad()
        given = {k: resolved(v) for k, v in self.given.items()}
        ids, attention = given.pop("input_ids"), given.pop("attention_mask")
        labels = given.pop("targets", None)
        if exact:
            given = {k: _widened(v) for k, v in given.items()}
            hidden = model.model(ids, attention_mask=attention).last_hidden_state
            # As with the model's own labels, -100 is not scored, whatever the mask says.
            mask = given.get("mask")
            given["mask"] = (labels != -100) & (
                torch.ones_like(ids) if mask is None else mask
            ).bool()
            given |= {"hidden": hidden, "weight": model.lm_head.weight, "targets": labels}
            has_loss = given.get("advantages") is not None
            out = truth("fused_grpo_loss" if has_loss else "linear_logprobs", given)
        else:
            # A label is predicted by the position before it.
            longer = (torch.nn.functional.pad(x, (0, 1), value=1) for x in (ids, attention))
            if isinstance(labels, Tensor) and labels.ndim == 2:
                labels = torch.nn.functional.pad(labels, (1, 0))
            ids, attention = longer
            execution = {k: given.pop(k) for k in EXECUTION_FIELDS if k in given}
            if execution:
                given["execution"] = Execution(**execution)
            objective = Objective(**given)
            out = model(ids, attention_mask=attention, labels=labels, fused_head=objective)
        loss = getattr(out, "loss", None)
        total = out.logps.sum() + out.entropy.sum() if loss is None else loss
        total.backward()
        found = {"logps": out.logps, "entropy": out.entropy, "d_head": model.lm_head.weight.grad}
        found["d_first"] = model.model.layers[0].self_attn.q_proj.weight.grad
        found |= {} if loss is None else {"loss": loss}
        return {k: v.detach().clone() for k, v in found.items()}


def _truth_of_verl(given: dict[str, Any]) -> Any:
    reduction = given.pop("reduction", "none")
    given.pop("ranks", None)
    out = truth("linear_logprobs", given)
    logps = out.logps if reduction == "none" else getattr(out.logps, reduction)()
    return SimpleNamespace(logps=logps, entropy=out.entropy)


def _truth_of_liger(given: dict[str, Any]) -> Any:
    made = {k: given.pop(k) for k in [*given] if k in CONFIG_FIELDS}
    if made.get("epsilon_high") == made.get("epsilon"):
        made.pop("epsilon_high", None)
    if not given.get("use_ref_model", True):
        made["beta"] = 0.0
    elif "ref_logps" not in given:
        with torch.no_grad():
            reference = {**given, "hidden": given["ref_input"], "weight": given["ref_weight"]}
            reference["bias"] = given.get("ref_bias")
            given["ref_logps"] = truth("linear_logprobs", reference).logps
    options = GRPOLossConfig(**made)
    if options.loss_type not in ("dapo", "cispo", "vespo"):
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
    return SimpleNamespace(loss=truth("fused_grpo_loss", given | {"config": options}).loss)


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


def _widened(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.dtype == torch.float32 else x


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
    if call.ours.get("logits_dtype") == "model":
        return "not compared: rounded to one neighbour or the other"
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
    weight = call.ours.get("weight")
    V = len(weight) if isinstance(weight, Tensor) else 1
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
    """Whether rounding may put a token on the other side of a threshold of entropies."""
    options = call.given.get("config")
    entropy = expected.get("entropy", call.given.get("entropy"))
    of_config = options.options if isinstance(options, Built) else {}
    if of_config.get("top_entropy_quantile", 1.0) == 1.0 or not isinstance(entropy, Tensor):
        return False
    ordered = entropy[entropy != 0].double().sort().values
    threshold = of_config.get("entropy_threshold")
    gaps = ordered.diff() if threshold is None else (ordered - threshold).abs()
    return bool((gaps < 1e-5).any())


def _not_finite(call: Call) -> bool:
    """Whether a token of the mask was given a value that is not finite."""
    mask = call.ours.get("mask")
    return isinstance(mask, Tensor) and any(
        bool((~x[mask != 0].isfinite()).any())
        for x in _tensors(call)
        if x.is_floating_point() and x.shape == mask.shape
    )


def _tensors(call: Call) -> list[Tensor]:
    return [at_place(call.given, *at) for at in places(call.given)]


def _digits(call: Call) -> float:
    """How much of a log-prob float32 does not know, by the size of logits and of log-probs."""
    largest, given = 0.0, call.ours
    pairs = [(given.get("hidden"), given.get("weight")), given.get("low_rank") or (None, None)]
    for x, y in pairs:
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            largest += _largest(x) * _largest(y) * y.shape[-1]
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


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone, which shares the vocabulary with itself."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


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
    with one_rank():
        told, bad = fuzz(args.seconds, args.seed)
    print(
        f"{sum(told.values()):,} inputs: {', '.join(f'{n:,} {k}' for k, n in told.most_common())}"
    )
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())

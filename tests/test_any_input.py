"""Calls of which arguments are changed at random: right, or refused by an argument's name."""

import inspect
import re

import pytest
import torch

pytest.importorskip("hypothesis")
from hypothesis import given
from hypothesis import strategies as st

import grpo_kernels
from grpo_kernels import reference as exact
from tests.helpers.batches import EXECUTION_FIELDS, HEAD_FIELDS, called, make_batch, packed
from tests.helpers.supports import make_support

TAKES = {
    name: {*inspect.signature(getattr(grpo_kernels, name)).parameters}
    for name in ("fused_grpo_loss", "linear_logprobs", "grpo_loss", "selective_log_softmax")
}
for takes in (TAKES["fused_grpo_loss"], TAKES["linear_logprobs"]):
    takes |= {"weight", *HEAD_FIELDS, *EXECUTION_FIELDS}
REFUSED = re.compile(rf"({'|'.join(sorted(set.union(*TAKES.values())))})\b.*: ")
# Optional arguments of a call, made from the batch.
OPTIONAL = {
    "bias": lambda b: b.bias,
    "low_rank": lambda b: (b.hidden[..., :2] / 4, b.weight[:, -2:] / 4),
    "temperature": lambda b: b.temperature.nan_to_num(1.0),
    "softcap": lambda b: 30.0,
    "chunk_bytes": lambda b: 12 * len(b.weight),
    "batch_invariant": lambda b: True,
    "backend": lambda b: "torch",
    "support": make_support,
    "old_logps": lambda b: b.old_logps,
    "num_items": lambda b: torch.tensor(9.0),
}
NOT_DRAWN = {"ref_logps", "sampling_logps", "ce_weights"}  # of which the objective makes no use
INF, NAN = float("inf"), float("nan")
JUNK = (
    0, 1, -1, 2.5, None, True, "x", "torch", INF, NAN, 10**9, 1e-30, torch.tensor(1.0),
    torch.tensor(1j), torch.ones(3), [], (), {},
)  # fmt: skip
DTYPES = ("float16", "bfloat16", "float64", "int32", "int64", "bool", "uint8", "complex64")
# Changes of a tensor; the first three leave the values alone.
CHANGES = {
    "strides": lambda x, draw: torch.stack([x, x], -1)[..., 0],
    "columns": lambda x, draw: x.transpose(0, -1).contiguous().transpose(0, -1) if x.ndim else x,
    "a gradient": lambda x, draw: x.clone().requires_grad_() if x.is_floating_point() else x,
    "dtype": lambda x, draw: x.to(getattr(torch, draw(st.sampled_from(DTYPES)))),
    "one less": lambda x, draw: x[:-1] if x.ndim else x,
    "one more": lambda x, draw: torch.cat([x, x[:1]]) if x.ndim else x,
    "a dimension more": lambda x, draw: x[None] if draw(st.booleans()) else x[..., None],
    "flat": lambda x, draw: x.flatten(),
    "empty": lambda x, draw: x[:0] if x.ndim else x,
    "list": lambda x, draw: x.tolist(),
    "meta": lambda x, draw: x.to("meta"),
    "values": lambda x, draw: torch.where(
        torch.arange(x.numel()).view(x.shape) % 3 == 0,
        draw(st.sampled_from((NAN, INF, -INF, -1, 0, 3, 1e20, 10**6, -100))),
        x,
    ).to(x.dtype),
}


@st.composite
def calls(draw):
    """A call and its arguments, up to two of which are changed."""
    call = draw(st.sampled_from([*TAKES]))
    sizes = {"B": (1, 2, 4), "T": (1, 2, 5), "H": (3, 16), "V": (2, 17, 130)}
    batch = make_batch(**{name: draw(st.sampled_from(x)) for name, x in sizes.items()})
    if call != "selective_log_softmax" and draw(st.booleans()):
        batch = packed(batch)
    needed = vars(batch) | {"logps": batch.old_logps.nan_to_num(-2.0) + 0.1}
    if call == "selective_log_softmax":
        logits = batch.hidden.nan_to_num() @ batch.weight.T
        needed |= {"logits": logits, "targets": batch.targets.clamp(min=0)}
    names = (needed.keys() & TAKES[call]) - OPTIONAL.keys() - NOT_DRAWN
    kwargs = {name: needed[name] for name in sorted(names) if needed[name] is not None}
    optional = sorted(OPTIONAL.keys() & TAKES[call])
    for name in draw(st.lists(st.sampled_from(optional), max_size=3, unique=True)):
        kwargs[name] = OPTIONAL[name](batch)
    for name in draw(st.lists(st.sampled_from(sorted(kwargs)), max_size=2, unique=True)):
        if isinstance(x := kwargs[name], torch.Tensor) and draw(st.integers(0, 3)):
            kwargs[name] = CHANGES[draw(st.sampled_from(sorted(CHANGES)))](x, draw)
        else:
            kwargs[name] = draw(st.sampled_from(JUNK))
    return call, kwargs


def results(call, kwargs, module):
    """The value, log-probs and gradients of a call; in float64 with the reference."""
    leaves = {}
    for name in sorted(kwargs.keys() & {"hidden", "weight", "bias", "logps", "logits"}):
        if isinstance(x := kwargs[name], torch.Tensor) and x.is_floating_point():
            leaves[name] = x.detach().double() if module is exact else x.detach()
            leaves[name].requires_grad_()
    if "weight" in kwargs:
        out = called(module, call, kwargs | leaves)
    else:
        out = getattr(module, call)(**kwargs | leaves)
    logps = out if isinstance(out, torch.Tensor) else getattr(out, "logps", out[0])
    value = getattr(out, "loss", logps.sum())
    if value.requires_grad:
        value.backward()
    grads = (x.grad for x in leaves.values() if x.grad is not None)
    return [value.detach(), logps.detach(), *grads]


@given(calls())
def test_right_or_refused(drawn):
    call, kwargs = drawn
    try:
        actual = results(call, kwargs, grpo_kernels)
    except (TypeError, ValueError) as error:
        assert REFUSED.match(str(error)), error
        return
    try:
        expected = results(call, {k: x for k, x in kwargs.items() if k != "backend"}, exact)
    except Exception:  # of what it does not check, as it is for right inputs alone
        return
    # Beyond 1e5 float32 does not know.
    known = all(x.isfinite().all() and not (x.abs() > 1e5).any() for x in expected)
    if known and not actual[0].is_meta and len(actual) == len(expected):
        for value, truth in zip(actual, expected, strict=True):
            torch.testing.assert_close(value.double(), truth.double(), rtol=3e-2, atol=3e-2)

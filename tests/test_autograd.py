"""The calls inside the machinery of training: each gives what it gives alone."""

import ast
import contextlib
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import grpo_kernels
from grpo_kernels import (
    Execution,
    GRPOLossConfig,
    LMHead,
    Reference,
    Support,
    fused_distillation_loss,
    fused_grpo_loss,
    grpo_loss,
    linear_logprobs,
)
from grpo_kernels.base.autograd import float16_scale
from grpo_kernels.kernels.divergences import DIVERGENCES
from tests.helpers.batches import make_batch, relative_error
from tests.helpers.head_options import BACKENDS, expect_equal
from tests.helpers.supports import make_support
from tests.helpers.tiers import cases, in_turn

LEAVES = ("hidden", "weight", "bias", "logits", "logps", "entropy")


@pytest.fixture
def inputs():
    return inputs_of(make_batch(H=24, V=61))


def inputs_of(batch):
    """Tensors for every call, by name; what is masked is finite."""
    mask, V, hidden = batch.mask, len(batch.weight), batch.hidden.nan_to_num()
    ids, old_logps = batch.targets.masked_fill(~mask, 0), batch.old_logps.nan_to_num(-1.0)
    factors = torch.linspace(0.5, 1.5, mask.numel()).view(mask.shape)
    logits = torch.randn(*mask.shape, V, generator=torch.Generator().manual_seed(3))
    support = make_support(batch, without=0.0, most=9)
    return {
        "hidden": hidden, "weight": batch.weight, "bias": batch.bias, "temperature": factors,
        "logits": logits, "logps": old_logps - 0.2 * factors, "entropy": factors,
        "targets": ids, "several": torch.stack([ids, ids * 7 % V], -1), "mask": mask,
        "advantages": batch.advantages[:, None] * factors, "ce_weights": factors / 100,
        "old_logps": old_logps, "ref_logps": old_logps + 0.1, "sampling_logps": old_logps - 0.1,
        "ref_hidden": hidden.flip(0), "ref_weight": batch.weight.flip(1),
        "ref_logits": logits.flip(0), "token_ids": support.token_ids, "offsets": support.offsets,
    }  # fmt: skip


def prepared(inputs, backend="torch", num_items=None):
    """Arguments of every call."""
    leaves = {name: inputs[name].detach().requires_grad_() for name in LEAVES}
    x = SimpleNamespace(**inputs | leaves, backend=backend, num_items=num_items)
    return with_head(x)


def with_head(x):
    x.head = LMHead(x.weight, x.bias, softcap=9.0, temperature=x.temperature)
    x.policy = x.hidden, x.head, x.targets, x.advantages, x.mask
    x.execution = {"execution": Execution(backend=x.backend)}
    x.how = {"num_items": x.num_items, **x.execution}
    x.support, x.reference = Support(x.token_ids, x.offsets), Reference(x.ref_hidden, x.ref_weight)
    return x


EXACT_KL = GRPOLossConfig(beta=0.1, kl_estimator="exact", entropy_coef=0.1, loss_type="grpo")
CORRECTED = GRPOLossConfig(is_correction="token_truncate", off_policy_threshold=0.1)
# Every public call that has a gradient.
CALLS = {
    "fused_loss": lambda x: fused_grpo_loss(
        *x.policy, old_logps=x.old_logps, ref_logps=x.ref_logps, ce_weights=x.ce_weights, **x.how
    ),
    "exact_kl": lambda x: fused_grpo_loss(
        *x.policy, reference=x.reference, config=EXACT_KL, **x.how
    ),
    "truncated_loss": lambda x: fused_grpo_loss(*x.policy, support=x.support, **x.how),
    **{kind: lambda x, kind=kind: fused_distillation_loss(
        x.hidden, x.head, x.reference, x.mask if x.num_items is None else None, kind=kind, **x.how
    ) for kind in DIVERGENCES},
    "log_probs": lambda x: linear_logprobs(
        x.hidden, x.head, x.targets, x.mask, entropy=True, **x.execution
    ),
    "several": lambda x: linear_logprobs(x.hidden, x.head, x.several, x.mask, **x.execution),
    "support": lambda x: linear_logprobs(
        x.hidden, x.head, x.targets, x.mask, support=x.support, entropy=True, **x.execution
    ),
    "entries": lambda x: linear_logprobs(
        x.hidden, x.head, None, x.mask, support=x.support, entries=True, **x.execution
    ),
    "log_softmax": lambda x: grpo_kernels.selective_log_softmax(
        x.logits, x.targets, temperature=x.temperature, backend=x.backend
    ),
    "loss": lambda x: grpo_loss(
        x.logps, x.advantages, x.mask, entropy=x.entropy, old_logps=x.old_logps,
        sampling_logps=x.sampling_logps, ce_weights=x.ce_weights, num_items=x.num_items,
        config=CORRECTED, backend=x.backend,
    ),
    "kl": lambda x: grpo_kernels.per_token_kl(
        x.logps, x.ref_logps, x.mask, estimator="k3+", clamp=1.0
    ),
    **{f"topk_{kind}": lambda x, kind=kind: grpo_kernels.topk_kl(
        *(y.log_softmax(-1)[..., :4] for y in (x.logits, x.ref_logits)), direction=kind
    ) for kind in DIVERGENCES},
}  # fmt: skip
every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def tensors_in(results):
    return [x for x in tree_leaves(results) if isinstance(x, torch.Tensor)]


def total_of(results):
    """A sum of the results in which elements have weights of their own."""
    parts = [
        x * (torch.arange(1, x.numel() + 1, device=x.device).view(x.shape) % 5) for x in results
    ]
    return sum(part.sum() for part in parts if part.requires_grad)


def run(call, inputs, *options):
    """The results of a call, then the gradients of the sum of them."""
    x = prepared(inputs, *options)
    results = tensors_in(call(x))
    total_of(results).backward()
    gradients = [y.grad for name in LEAVES if (y := getattr(x, name)).grad is not None]
    assert all(y.norm() > 0 for y in gradients)
    return [*(y.detach() for y in results), *gradients]


def expect_close(actual, expected, tolerance=2e-6):
    for x, y in zip(actual, expected, strict=True):
        assert x.dtype == y.dtype and relative_error(x, y) <= tolerance


LAYOUTS = {
    "strided": lambda x: torch.stack([x, x, x], -1)[..., 1],
    "transposed": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
    # A sum's gradient is one number.
    "expanded": lambda x: x.flatten()[0].expand(x.shape) if (x == x.flatten()[0]).all() else x,
}


@pytest.mark.parametrize(("name", "layout", "backend"), in_turn(CALLS, LAYOUTS, BACKENDS))
def test_inputs_and_gradients_that_are_not_dense(name, layout, backend, inputs):
    """Kernels address them as if they were."""
    lay_out = LAYOUTS[layout]
    if backend == "triton":  # whose interpreter is slow
        inputs = inputs_of(make_batch(B=2, T=3, H=24, V=61))

    def with_gradients(made):
        def call(x):
            results = [y for y in tensors_in(CALLS[name](x)) if y.requires_grad]
            for y in results:
                y.register_hook(lambda g: made(torch.ones_like(g) if layout == "expanded" else g))
            return results

        return call

    expected = run(with_gradients(torch.Tensor.contiguous), inputs, backend)
    inputs = {name: lay_out(x) if x.dim() else x for name, x in inputs.items()}
    expect_close(run(with_gradients(lay_out), inputs, backend), expected)


@every_call
def test_constants_made_in_inference_mode(call, inputs):
    """Rollouts make such constants."""
    with torch.inference_mode():
        constants = {name: x.clone() for name, x in inputs.items() if name not in LEAVES}
    expect_close(run(call, inputs | constants), run(call, inputs), 0.0)


def other_results(inputs):
    """Results of the calls that have no gradient."""
    old, rewards = inputs["old_logps"], torch.linspace(0, 1, 514, dtype=torch.float32, device="cpu")
    for options in ({}, {"scale": "batch"}, {"aggregation": "normalize_then_sum"}):
        options = {"weights": [1.0, 0.3], **options}
        yield grpo_kernels.group_advantages(rewards.square().view(-1, 2), 257, **options)
    gap = grpo_kernels.check_sampler(old, old - 0.1, old * 1.01, inputs["mask"])
    yield torch.tensor(gap, dtype=torch.float64, device="cpu")


@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


DEFAULTS = {
    **{str(x): partial(default_dtype, x) for x in (torch.bfloat16, torch.float16, torch.float64)},
    "device": partial(torch.device, "meta"),
}


@pytest.mark.parametrize(
    ("name", "backend"), cases(DEFAULTS, BACKENDS, fast=lambda _, backend: backend == "torch")
)
def test_other_defaults_change_nothing(name, backend, real_memory):
    """Scripts set them for a model that they load. In half precision 267 or 70,001 is no number."""
    T, numbers = 91, (None, 257, torch.tensor(70_001), torch.tensor(257.5))
    if backend == "triton":  # whose interpreter is slow
        T, numbers = 2, (torch.tensor(70_001),)
    inputs = inputs_of(make_batch(B=2, T=T, H=8, V=13))

    def everything():
        yield from other_results(inputs)
        for name, call in CALLS.items():
            is_loss = "loss" in name or name in ("exact_kl", *DIVERGENCES)
            for number in numbers if is_loss else (None,):
                yield from run(call, inputs, backend, number)

    expected = list(everything())
    with DEFAULTS[name]():
        actual = list(everything())
    assert sum(bool((x != 0).any()) for x in expected) > 0.7 * len(expected)
    expect_close(actual, expected, 0.0)


@every_call
def test_autocast_computes_in_float32(call, inputs):
    def under_autocast(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return call(x)

    expect_close(run(under_autocast, inputs), run(call, inputs))


@pytest.mark.parametrize(
    ("half", "loss_type"), (("hidden", "dapo"), ("weight", "gspo"), ("hidden weight", "dapo"))
)
def test_mixed_dtypes(half, loss_type):
    """A float32 head under a bf16 body, the reverse, or an adapter as PEFT trains it."""
    batch, config = make_batch(), GRPOLossConfig(loss_type=loss_type)
    low_rank = batch.hidden[..., :5] / 4, batch.weight[:, -5:] / 4
    for name in half.split():
        setattr(batch, name, getattr(batch, name).bfloat16())
    options = {"head": {"low_rank": low_rank}, "old_logps": True, "config": config}
    expect_equal(batch, options, tolerance=2.5e-3)


@pytest.mark.parametrize("use_reentrant", (False, True))
@every_call
def test_gradient_checkpointing(call, use_reentrant, inputs):
    count = sum(y.requires_grad for y in tensors_in(call(prepared(inputs))))

    def recomputed(x):
        def with_leaves(*leaves):
            again = with_head(SimpleNamespace(**vars(x) | dict(zip(LEAVES, leaves, strict=True))))
            return tuple(tensors_in(call(again))[:count])

        leaves = [getattr(x, name) for name in LEAVES]
        return checkpoint(with_leaves, *leaves, use_reentrant=use_reentrant)

    expected = run(lambda x: tensors_in(call(x))[:count], inputs)
    expect_close(run(recomputed, inputs), expected, 0.0)


@every_call
def test_retained_graph_gives_the_same_twice(call, inputs):
    x, expected = prepared(inputs), run(call, inputs)
    total, leaves = total_of(tensors_in(call(x))), [getattr(x, name) for name in LEAVES]
    how = {"retain_graph": True, "allow_unused": True}
    kept = []
    for factor in (3, 1):
        gradients = torch.autograd.grad(factor * total, leaves, **how)
        kept.append((factor, [None if y is None else y.clone() for y in gradients]))
        for y in gradients:
            if y is not None:
                y.zero_()  # the caller's own: what the graph keeps is another
    total.backward()
    for factor, gradients in (*kept, (1, [leaf.grad for leaf in leaves])):
        gradients = [y / factor for y in gradients if y is not None]
        expect_close(gradients, expected[-len(gradients) :])
    with pytest.raises(RuntimeError, match="second time"):
        total.backward()


@pytest.mark.parametrize(
    ("name", "leaf", "said"),
    (
        ("fused_loss", "hidden", "fused_grpo_loss: "), ("log_probs", "weight", ""),
        ("reverse", "hidden", "fused_distillation_loss: "), ("loss", "logps", "grpo_loss: "),
        ("log_softmax", "logits", "selective_log_softmax: "),
    ),
)  # fmt: skip
def test_double_backward_is_refused(name, leaf, said, inputs):
    x = prepared(inputs)
    total = total_of(tensors_in(CALLS[name](x)))
    with pytest.raises(RuntimeError, match=f"^{said}.*double backward is not supported"):
        torch.autograd.grad(total, getattr(x, leaf), create_graph=True)


@pytest.mark.parametrize("name", ("fused_loss", "exact_kl", "reverse", "loss"))
def test_nothing_but_the_loss_has_a_gradient(name, inputs):
    first, *rest = tensors_in(CALLS[name](prepared(inputs)))
    assert first.requires_grad and not any(x.requires_grad for x in rest)


@pytest.mark.parametrize("largest", (0.0, 1e-40, 1e-25, 0.999, 1.0, 700.0, 1e30, float("inf")))
def test_what_float16_holds_is_brought_to_between_1_and_2(largest):
    """Neither the scale nor its inverse is 0, infinite or below float32's normal numbers."""
    scale = float16_scale([torch.float32, torch.float16], lambda: torch.tensor(largest))
    assert 2.0**-126 <= float(scale) <= 2.0**126 and float(scale.log2()) % 1 == 0
    assert 1.0 <= largest * float(scale) < 2.0 or not 1e-30 < largest < 1e38


FLOATS = {
    "tensor", "as_tensor", "asarray", "scalar_tensor", "zeros", "ones", "empty", "full", "eye",
    "empty_strided", "linspace", "logspace", "rand", "randn", "normal", "Tensor", "FloatTensor",
}  # fmt: skip
MAKERS = FLOATS | {"arange", "randint", "randperm"}


def test_every_tensor_is_made_with_a_dtype_and_a_device():
    """No call in the package leaves them out: `new_zeros` has those of its tensor."""
    for path in Path(grpo_kernels.__file__).parent.rglob("*.py"):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        placed = {
            id(x) for node in nodes if isinstance(node, ast.With)
            and ast.unparse(node.items[0]).startswith("torch.device(") for x in ast.walk(node)
        }  # fmt: skip
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module == "torch":
                assert not MAKERS - {"Tensor"} & {x.name for x in node.names}, path
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            calls_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            if calls_torch and (name := node.func.attr) in MAKERS:
                given = {x.arg for x in node.keywords}
                assert "dtype" in given or name not in FLOATS, f"{path}:{node.lineno}"
                # The doctor is a command, which sets no default.
                here = id(node) in placed or path.name == "doctor.py"
                assert "device" in given or here, f"{path}:{node.lineno}"

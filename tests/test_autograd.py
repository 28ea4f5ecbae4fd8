"""The calls inside the machinery of training."""

import ast
import warnings
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import grpo_kernels
from grpo_kernels import (
    Execution,
    GRPOLossConfig,
    LMHead,
    Reference,
    Support,
    check_sampler,
    fused_distillation_loss,
    fused_grpo_loss,
    group_advantages,
    grpo_loss,
    linear_logprobs,
    per_token_kl,
    reference,
    selective_log_softmax,
    topk_kl,
)
from grpo_kernels.head import call as head_calls
from grpo_kernels.kernels.divergences import DIVERGENCES
from tests.helpers.batches import make_batch, relative_error, run_fused
from tests.helpers.fake_cuda import CountedCUDA
from tests.helpers.head_options import BACKENDS
from tests.helpers.supports import make_support
from tests.helpers.tiers import in_turn


def head(batch, *names):
    return [getattr(batch, n).clone().requires_grad_() for n in names or ("hidden", "weight")]


def call_fused(batch, hidden, weight):
    args = batch.targets, batch.advantages, batch.mask
    return fused_grpo_loss(hidden, weight, *args, old_logps=batch.old_logps).loss


def call_two_passes(batch, hidden, weight):
    out = linear_logprobs(hidden, weight, batch.targets, mask=batch.mask)
    return grpo_loss(out.logps, batch.advantages, batch.mask, old_logps=batch.old_logps).loss


CALLS = {"fused": call_fused, "two_passes": call_two_passes}


@pytest.fixture
def batch():
    return make_batch()


@pytest.fixture
def expected(batch):
    return run_fused(batch, exact=True, old_logps=True).gradients


def assert_gradients(hidden, weight, expected, tolerance=2e-5):
    assert relative_error(hidden.grad, expected["hidden"]) < tolerance
    assert relative_error(weight.grad, expected["weight"]) < tolerance


@pytest.mark.parametrize("call", CALLS)
def test_outer_scale_and_accumulation(call, batch, expected):
    hidden, weight = head(batch)
    for factor in (0.25, 0.5, 0.25):
        (factor * CALLS[call](batch, hidden, weight)).backward()
    assert_gradients(hidden, weight, expected)


def laid_out(x, kind):
    """The same values, with memory beside them that is filled; expanded if all are the same."""
    if kind == "strided":
        return torch.stack([x, x, x], -1)[..., 1]
    if kind == "transposed":
        return x.movedim(-1, 0).contiguous().movedim(0, -1)
    if kind == "expanded" and bool((x == x.flatten()[0]).all()):
        return x.flatten()[0].expand(x.shape)
    return x


@pytest.mark.parametrize(
    ("call", "kind", "backend"),
    in_turn(
        ("entries", "support", "logprobs", "several", "logits", "loss"),
        ("strided", "transposed", "expanded"),
        BACKENDS,
    ),
)
def test_inputs_and_gradients_that_are_not_dense(call, kind, backend):
    """Kernels address them as if they were."""
    batch = make_batch(H=24, V=61)
    support = make_support(batch, without=0.0, most=20)
    mask, ids, shape = batch.mask, batch.targets.masked_fill(~batch.mask, 0), batch.mask.shape
    factors = torch.linspace(0.5, 1.5, mask.numel()).view(shape)
    grads_of_both = []
    for how in ("dense", kind):
        leaves = [batch.hidden.nan_to_num(), batch.weight, batch.bias]
        leaves = [laid_out(x, how).detach().requires_grad_() for x in leaves]
        states, weight, bias = leaves
        temperature, options = laid_out(factors, how), {"execution": Execution(backend=backend)}
        lm_head = LMHead(weight, bias, softcap=9.0, temperature=temperature)
        targets, count = laid_out(ids, how), laid_out(mask, how)
        if call == "loss":
            constants = {"old_logps": batch.old_logps, "ref_logps": batch.old_logps + 0.1}
            constants = {
                n: laid_out(x, how) for n, x in {**constants, "ce_weights": factors}.items()
            }
            advantages = laid_out(batch.advantages[:, None] * factors, how)
            out = fused_grpo_loss(
                states, lm_head, targets, advantages, count, **constants, **options
            )
            results = [out.loss]
        elif call == "logits":
            logits = laid_out(states @ weight.T + bias, how)
            results = [
                selective_log_softmax(logits, targets, temperature=temperature, backend=backend)
            ]
        else:
            if call in ("entries", "support"):
                options["support"] = Support(*(laid_out(x, how) for x in support))
            if call == "entries":
                targets, options["entries"] = None, True
            if call == "several":
                targets = laid_out(torch.stack([ids, ids * 7 % 61], -1), how)
            results = linear_logprobs(states, lm_head, targets, count, entropy=True, **options)[:3]
        total = 0.0
        for x in results:
            weights = torch.arange(1, x.numel() + 1).view(x.shape) % 5
            x.register_hook(lambda g, how=how: laid_out(g, how))
            total = total + (x if kind == "expanded" else x * weights).sum()
        total.backward()
        grads_of_both.append([x.grad for x in leaves])
    for dense, other in zip(*grads_of_both, strict=True):
        assert dense.norm() > 0 and relative_error(other, dense) < 1e-6


@pytest.mark.parametrize("name", ("advantages", "mask", "old_logps", "targets"))
@pytest.mark.parametrize("call", ("fused", "loss", "logits"))
def test_constants_made_in_inference_mode(call, name, batch):
    """Rollouts make such constants."""
    results = []
    for mode in (False, True):
        constants = {n: getattr(batch, n) for n in ("advantages", "mask", "old_logps")}
        constants["targets"] = batch.targets.masked_fill(~batch.mask, 0)
        with torch.inference_mode(mode):
            constants[name] = constants[name].clone()
        hidden, weight = head(batch)
        hidden.data.nan_to_num_()
        advantages, mask, old, targets = constants.values()
        if call == "fused":
            loss = fused_grpo_loss(hidden, weight, targets, advantages, mask, old_logps=old).loss
        elif call == "logits":
            loss = selective_log_softmax(hidden @ weight.T, targets).square().sum()
        else:
            logps = linear_logprobs(hidden, weight, targets, mask).logps
            loss = grpo_loss(logps, advantages, mask, old_logps=old).loss
        loss.backward()
        results.append((hidden.grad, weight.grad))
    for expected, actual in zip(*results, strict=True):
        assert expected.norm() > 0 and torch.equal(actual, expected)


EXACT_KL = GRPOLossConfig(beta=0.1, kl_estimator="exact", entropy_coef=0.1, loss_type="grpo")
CORRECTED = GRPOLossConfig(is_correction="token_truncate", off_policy_threshold=0.1)


def everything(batch, backend, numbers):
    """Results and gradients of each public call; two tokens of each row are masked."""
    (hidden, weight), results = head(batch), []
    hidden.data.nan_to_num_()
    B, T = batch.mask.shape
    mask, old = (torch.arange(T) < T - 2).expand(B, T), batch.old_logps.nan_to_num(-1.0)
    targets = batch.targets.clamp(min=0)
    head_args, on = (hidden, weight, targets, batch.advantages), {"backend": backend}
    teacher = Reference(hidden.detach().flip(0), weight.detach().flip(1))
    how = {"execution": Execution(backend=backend)}
    sets = Support(
        torch.stack([targets, (targets + 1) % 13], -1).flatten(), 2 * torch.arange(B * T + 1)
    )

    def add(out):
        tensors = [out] if isinstance(out, torch.Tensor) else [*out]
        for x in tensors:
            results.extend(x.values() if isinstance(x, dict) else () if x is None else [x])
        if tensors[0].requires_grad:
            d = torch.autograd.grad(tensors[0].sum(), (hidden, weight), retain_graph=True)
            results.extend(d)
        return out

    scored = add(linear_logprobs(hidden, weight, targets, mask, entropy=True, **how))
    many = add(linear_logprobs(hidden, weight, targets[..., None] % 7 + torch.arange(4), **how))
    add(linear_logprobs(hidden, weight, None, support=sets, entries=True, **how))
    add(selective_log_softmax(hidden @ weight.T, targets, **on))
    constants = {"old_logps": old, "sampling_logps": old - 0.1, "ce_weights": old / 1000}
    for number in numbers:
        numbered = how | {"num_items": number}
        for kind in DIVERGENCES:
            args = hidden, weight, teacher, mask if number is None else None
            add(fused_distillation_loss(*args, kind=kind, **numbered))
        args = scored.logps, batch.advantages, mask
        add(grpo_loss(*args, config=CORRECTED, num_items=number, **constants, **on))
        add(fused_grpo_loss(*head_args, mask, **constants, **numbered))
        add(fused_grpo_loss(*head_args, reference=teacher, config=EXACT_KL, **numbered))
        add(fused_grpo_loss(*head_args, mask, support=sets, **numbered))
    rewards = torch.linspace(0, 1, 514, dtype=torch.float32).square().view(-1, 2)
    for options in ({}, {"scale": "batch"}, {"aggregation": "normalize_then_sum"}):
        add(group_advantages(rewards, 257, weights=[1.0, 0.3], **options))
    add(group_advantages(rewards, 257, baseline="length", lengths=torch.arange(257) + 1))
    add(per_token_kl(scored.logps, old, mask, estimator="k3+", clamp=1.0))
    for direction in DIVERGENCES:
        add(topk_kl(many.logps, many.logps.detach() - 0.1, direction=direction))
    gap = check_sampler(old, old - 0.1, old * 1.01, mask)
    results.append(torch.tensor(gap, dtype=torch.float64))
    return results


@pytest.mark.parametrize(
    ("dtype", "backend"),
    in_turn((torch.bfloat16, torch.float16, torch.float64), BACKENDS),
)
def test_another_default_dtype_changes_nothing(dtype, backend):
    """Scripts set one for a model that they load. In half precision 267 or 70,001 is no number."""
    T, numbers = 91, (None, 257, torch.tensor(70_001), torch.tensor(257.5))
    if backend == "triton":  # whose interpreter is slow
        T, numbers = 3, (torch.tensor(70_001),)
    args = make_batch(B=3, T=T, H=8, V=13), backend, numbers
    expected = everything(*args)
    torch.set_default_dtype(dtype)
    try:
        actual = everything(*args)
    finally:
        torch.set_default_dtype(torch.float32)
    assert sum(bool((x != 0).any()) for x in expected) > 0.7 * len(expected)
    for after, before in zip(actual, expected, strict=True):
        assert after.dtype == before.dtype and torch.equal(after, before)


MAKERS = {
    "tensor", "as_tensor", "asarray", "scalar_tensor", "zeros", "ones", "empty", "full", "eye",
    "empty_strided", "linspace", "logspace", "rand", "randn", "normal", "Tensor", "FloatTensor",
}  # fmt: skip


def test_every_tensor_is_made_with_a_dtype():
    """No call in the package leaves it out: `arange` has int64, `new_zeros` that of its tensor."""
    for path in Path(grpo_kernels.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "torch":
                assert not MAKERS - {"Tensor"} & {x.name for x in node.names}, path
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            calls_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            if calls_torch and node.func.attr in MAKERS:
                assert "dtype" in {x.arg for x in node.keywords}, f"{path}:{node.lineno}"


@pytest.mark.parametrize("call", CALLS)
def test_tied_head(call, batch):
    """The weight is the embedding, too: both gradients arrive, in one tensor."""
    ids = torch.randint(0, 1003, batch.mask.shape)
    grads = []
    for exact in (True, False):
        table = batch.weight.double() if exact else batch.weight.clone()
        table.requires_grad_()
        mix = torch.nn.functional.embedding(ids, table).tanh() * 0.3
        if exact:
            loss = reference.fused_grpo_loss(
                mix, table, batch.targets, batch.advantages, batch.mask,
                old_logps=batch.old_logps.double(),
            ).loss  # fmt: skip
        else:
            loss = CALLS[call](batch, mix, table)
        loss.backward()
        grads.append(table.grad)
    assert relative_error(grads[1], grads[0]) < 2e-5


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_autocast_computes_in_float32(call, dtype, batch, expected):
    hidden, weight = head(batch)
    with torch.autocast("cpu", dtype=dtype):
        loss = CALLS[call](batch, hidden, weight)
    assert loss.dtype == torch.float32
    loss.backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32
    assert_gradients(hidden, weight, expected)


def test_a_bf16_head_with_a_float32_adapter():
    """PEFT trains `lora_b` and freezes the weight."""
    batch, grads = make_batch(), []
    g = torch.Generator().manual_seed(1)
    tensors = (
        batch.hidden.bfloat16(),
        batch.hidden[..., :5].clone(),
        torch.randn(1003, 5, generator=g),
    )
    for call, dtype in ((fused_grpo_loss, None), (reference.fused_grpo_loss, torch.float64)):
        leaves = [x.detach().to(dtype or x.dtype, copy=True).requires_grad_() for x in tensors]
        weight = batch.weight.bfloat16().to(dtype or torch.bfloat16)
        args = batch.targets, batch.advantages, batch.mask
        lm_head = LMHead(weight, low_rank=tuple(leaves[1:]))
        call(leaves[0], lm_head, *args, old_logps=batch.old_logps).loss.backward()
        grads.append([x.grad for x in leaves])
    for actual, truth, x in zip(*grads, tensors, strict=True):
        assert actual.dtype == x.dtype and relative_error(actual, truth) < 2.5e-3


@pytest.mark.parametrize("call", CALLS)
def test_mixed_dtypes(call, batch):
    """A float32 head under a bf16 body, and the reverse: computed from both as they are."""
    for names in (("hidden",), ("weight",)):
        mixed = make_batch()
        for name in names:
            setattr(mixed, name, getattr(mixed, name).bfloat16())
        expected = run_fused(mixed, exact=True, old_logps=True).gradients
        hidden, weight = head(mixed)
        CALLS[call](mixed, hidden, weight).backward()
        assert hidden.grad.dtype == hidden.dtype and weight.grad.dtype == weight.dtype
        assert_gradients(hidden, weight, expected, 2.5e-3)


def test_operands_of_two_dtypes_are_warned_of_once(real_memory, monkeypatch):
    """On a GPU, outside autocast: their GEMMs run in float32."""
    head_calls._warn_of_float32_products.cache_clear()
    said = "weight: bfloat16 hidden states and a float32 head are multiplied in float32"
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda _: torch.bfloat16)
    for autocast, expected in ((True, 0), (False, 1), (False, 0)):
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda _, on=autocast: on)
        with CountedCUDA(), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            hidden = torch.empty(8, 16, dtype=torch.bfloat16, device="cuda")
            targets = torch.empty(8, dtype=torch.long, device="cuda")
            linear_logprobs(hidden, torch.empty(99, 16, device="cuda"), targets)
        assert [said in str(x.message) for x in warned].count(True) == expected


@pytest.mark.parametrize("use_reentrant", (False, True))
@pytest.mark.parametrize("call", CALLS)
def test_gradient_checkpointing(call, use_reentrant, batch, expected):
    hidden, weight = head(batch)
    loss = checkpoint(CALLS[call], batch, hidden, weight, use_reentrant=use_reentrant)
    loss.backward()
    assert_gradients(hidden, weight, expected)


class Products(TorchDispatchMode):
    """Records which gradients of the head are computed, by the shapes of the products."""

    def __init__(self, hidden, weight):
        super().__init__()
        self.H, self.weight, self.computed = hidden.shape[-1], tuple(weight.shape), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            if tuple(out.shape) == self.weight:
                self.computed.add("weight")
            elif out.shape[1] == self.H:
                self.computed.add("hidden")
        return out


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("trained", ((), ("hidden",), ("weight",), ("hidden", "weight")), ids=str)
def test_what_is_frozen_costs_no_work(trained, call, batch):
    hidden, weight = head(batch)
    hidden.requires_grad_("hidden" in trained)
    weight.requires_grad_("weight" in trained)
    with Products(hidden, weight) as products, torch.set_grad_enabled(bool(trained)):
        loss = CALLS[call](batch, hidden, weight)
        if trained:
            loss.backward()
    assert products.computed == set(trained) and loss.requires_grad == bool(trained)


@pytest.mark.parametrize("call", CALLS)
def test_retained_graph_gives_the_same_twice(call, batch, expected):
    hidden, weight = head(batch)
    loss = CALLS[call](batch, hidden, weight)
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    (3 * loss).backward(retain_graph=True)
    for one, three in zip(first, (hidden.grad, weight.grad), strict=True):
        torch.testing.assert_close(3 * one, three)
    hidden.grad = weight.grad = None
    loss.backward()
    assert_gradients(hidden, weight, expected)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_double_backward_is_refused(batch):
    hidden, weight = head(batch)
    logps = batch.old_logps.nan_to_num().requires_grad_()
    logits = torch.randn(3, 11, requires_grad=True)
    for name, result, leaf in (
        ("fused_grpo_loss", call_fused(batch, hidden, weight), hidden),
        ("linear_logprobs", call_two_passes(batch, hidden, weight), hidden),
        ("grpo_loss", grpo_loss(logps, batch.advantages, batch.mask).loss, logps),
        ("selective_log_softmax", selective_log_softmax(logits, torch.arange(3)).sum(), logits),
    ):
        with pytest.raises(RuntimeError, match="double backward is not supported") as caught:
            torch.autograd.grad(result, leaf, create_graph=True)
        assert name == "linear_logprobs" or name in str(caught.value)


def test_outputs_do_not_require_grad_but_the_loss(batch):
    hidden, weight = head(batch)
    out = fused_grpo_loss(hidden, weight, batch.targets, batch.advantages, batch.mask)
    assert out.loss.requires_grad and not out.logps.requires_grad
    assert not any(m.requires_grad or m.ndim for m in out.metrics.values())


# `capturable=True`: every row takes part, and nothing is read back


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_masked_row_of_large_logits(backend):
    """A masked row's logits are the bias alone; e to one of them is infinite, and times 0 NaN."""
    batch = make_batch()
    gradients = []
    for options in ({}, {"capturable": True}):
        head = [x.clone().requires_grad_() for x in (batch.hidden, batch.weight)]
        bias = torch.zeros(len(batch.weight)).index_fill_(0, torch.tensor(3), 3.0).requires_grad_()
        lm_head, how = (
            LMHead(head[1], bias, temperature=0.03),
            Execution(backend=backend, **options),
        )
        logps = linear_logprobs(head[0], lm_head, batch.targets, batch.mask, execution=how).logps
        logps.sum().backward()
        gradients.append([head[1].grad, bias.grad])
    for plain, capturable in zip(*gradients, strict=True):
        assert plain.norm() > 0 and relative_error(capturable, plain) <= 1e-5


@pytest.mark.gpu
@pytest.mark.real_gpu
@pytest.mark.parametrize("masked", (False, True), ids=("all", "masked"))
def test_cuda_graph(masked):
    """A captured step, replayed on other inputs, gives what a plain call gives."""
    batches = [make_batch(B=6, T=11, V=5003, seed=s).to("cuda", torch.bfloat16) for s in (0, 1)]
    names = ("hidden", "weight", "targets", "advantages", "mask")

    def inputs_of(batch):
        values = [getattr(batch, name).clone() for name in names]
        if not masked:
            values[0], values[2] = values[0].nan_to_num(), values[2].clamp(0, 5002)
            values[4] = torch.ones_like(values[4])
        return values

    def step(values, **options):
        head = [x.detach().requires_grad_() for x in values[:2]]
        how = Execution(**options)
        fused_grpo_loss(*head, *values[2:], execution=how).loss.backward()
        return [x.grad for x in head]

    static = inputs_of(batches[0])
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            step(static, capturable=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(static, capturable=True)
    for batch in batches:
        values = inputs_of(batch)
        for place, value in zip(static, values, strict=True):
            place.copy_(value)
        graph.replay()
        for actual, plain in zip(captured, step(values), strict=True):
            assert plain.norm() > 0 and relative_error(actual, plain) <= 3e-3

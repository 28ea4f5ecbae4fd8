"""`torch.compile(fullgraph=True)` around the calls: results, gradients, and what stays eager."""

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import grpo_kernels
from grpo_kernels import Execution, GRPOLossConfig, LMHead, Support
from grpo_kernels.compiled.leaves import leaves_of
from grpo_kernels.head.linear_logprobs import second_pass
from grpo_kernels.integrations.transformers import Objective, attach_fused_head
from grpo_kernels.training.policy import Batch, Policy
from tests.helpers.batches import make_batch, relative_error
from tests.helpers.model_families import family_model
from tests.helpers.tiers import cases

B, T, H, V = 4, 9, 48, 1003


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch, tmp_path):
    """Without graphs of other tests, and of earlier runs."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    yield
    torch._dynamo.reset()


def whole(call, backend="aot_eager", **options):
    return torch.compile(call, backend=backend, fullgraph=True, **options)


# Log-probs


def tensors(*, frozen=False, dtype=torch.float32):
    batch = make_batch()
    leaves = {
        "hidden": torch.randn(B, T, H, dtype=dtype), "weight": torch.randn(V, H, dtype=dtype),
        "bias": torch.randn(V), "a_out": torch.randn(B, T, 3), "lora_b": torch.randn(V, 3),
    }  # fmt: skip
    for name, x in leaves.items():
        x.requires_grad_(not frozen or name in ("hidden", "a_out"))
    return batch, leaves


def logprobs_loss(
    batch, leaves, *, several=False, per_token=False, entropy=True, mask=True,
    execution=Execution(),  # noqa: B008 - frozen
):  # fmt: skip
    """A loss of all results, with a head made inside."""
    low_rank = leaves["a_out"] * 2, leaves["lora_b"]
    temperature = batch.temperature.nan_to_num(1.0).clamp(0.5) if per_token else 0.7
    head = LMHead(leaves["weight"], leaves["bias"], low_rank, softcap=9.0, temperature=temperature)
    targets = batch.targets.clamp(0)
    if several:
        targets = torch.stack([targets, (targets + 5) % V, targets], -1)
    out = grpo_kernels.linear_logprobs(
        leaves["hidden"] * 1.5, head, targets, batch.mask if mask else None, entropy=entropy,
        execution=execution,
    )  # fmt: skip
    shape = (B, 1, 1) if several else (B, 1)
    loss = (out.logps * batch.advantages.view(shape)).sum()
    if entropy:
        loss = loss + 0.1 * out.entropy.sum() - 0.01 * out.logsumexp.sum()
    return loss, out.logps


def gradients(loss, leaves):
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    return dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values())), strict=True))


@pytest.mark.parametrize(
    ("options", "frozen"),
    (
        ({}, False),
        ({"execution": Execution(capturable=True)}, False),  # masked rows take part
        pytest.param({"per_token": True, "mask": False}, False, marks=pytest.mark.slow),
        pytest.param({"several": True}, False, marks=pytest.mark.slow),
        ({"entropy": False}, True),
        pytest.param({}, True, marks=pytest.mark.slow),
    ),
    ids=lambda x: ", ".join(x) if isinstance(x, dict) else str(x),
)
@pytest.mark.parametrize("backend", cases(("aot_eager", "inductor"), fast="aot_eager".__eq__))
def test_log_probs(backend, options, frozen):
    batch, leaves = tensors(frozen=frozen)
    run = partial(logprobs_loss, batch, **options)
    loss, logps = run(leaves)
    expected = gradients(loss, leaves)
    loss, found = whole(run, backend)(leaves)
    assert relative_error(found, logps) < 1e-6
    for name, gradient in gradients(loss, leaves).items():
        assert relative_error(gradient, expected[name]) < 1e-5, name


def test_a_frozen_head_keeps_the_gradient(monkeypatch):
    """The backward then has no product."""
    batch, leaves = tensors(frozen=True)
    loss, _ = whole(partial(logprobs_loss, batch, entropy=False))(leaves)
    monkeypatch.setattr(second_pass.__globals__["torch"], "mm", None)
    monkeypatch.setattr(second_pass.__globals__["torch"], "addmm", None)
    assert gradients(loss, leaves)["hidden"].norm() > 0


def calls_of_sizes():
    def loss(hidden, weight, targets, advantages):
        return grpo_kernels.fused_grpo_loss(hidden, weight, targets, advantages).loss

    def logps(hidden, weight, targets, advantages):
        found = grpo_kernels.linear_logprobs(hidden, weight, targets).logps
        return (found * advantages[:, None]).sum()

    return {"loss": loss, "logps": logps}


@pytest.mark.slow
@pytest.mark.parametrize("call", calls_of_sizes())
@pytest.mark.parametrize("dynamic", (True, None))
def test_other_sizes(dynamic, call):
    """The second size of a batch makes it a variable of the graph, the third one fits."""
    graphs, step = [], calls_of_sizes()[call]

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    run = whole(step, counting, dynamic=dynamic)
    weight = torch.randn(V, H, requires_grad=True)
    for B in (3, 5, 8):
        given = torch.randint(V, (B, T)), torch.randn(B)
        hidden = torch.randn(B, T, H, requires_grad=True)
        expected = step(hidden, weight, *given)
        loss = run(hidden, weight, *given)
        for mine, theirs in zip(
            torch.autograd.grad(loss, (hidden, weight)),
            torch.autograd.grad(expected, (hidden, weight)),
            strict=True,
        ):
            assert relative_error(mine, theirs) < 1e-6
    assert len(graphs) == (1 if dynamic else 2)


@pytest.mark.parametrize("backend", cases(("eager", "inductor"), fast="eager".__eq__))
@pytest.mark.parametrize("name", ("temperature", "logit_scale", "softcap", "num_items"))
def test_other_numbers_are_no_other_graphs(name, backend):
    """The second number makes it a variable of the graph."""
    batch, leaves = tensors()
    hidden, weight = leaves["hidden"], leaves["weight"]
    compiler, graphs = torch._dynamo.lookup_backend(backend), []

    def counting(graph, inputs):
        graphs.append(graph)
        return compiler(graph, inputs)

    def step(number):
        head = LMHead(weight, **({} if name == "num_items" else {name: number}))
        of_loss = {"num_items": number} if name == "num_items" else {}
        targets, advantages = batch.targets.clamp(0), batch.advantages
        out = grpo_kernels.fused_grpo_loss(hidden, head, targets, advantages, **of_loss)
        return out.loss, out.logps

    run, seen = whole(step, counting), []
    for number in (0.5, 0.7, 0.9, 1.3):
        expected, found = step(number), run(number)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        gradient, wanted = (torch.autograd.grad(x[0], hidden)[0] for x in (found, expected))
        assert relative_error(gradient, wanted) < 1e-6
        seen.append(float(found[0]) if name == "num_items" else float(found[1].sum()))
    assert len(set(seen)) == 4 and len(graphs) == 2


# Steps of a model, whole


def gradients_of(model, loss):
    model.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def expect_one_graph(model, step, *inputs, backend="aot_eager"):
    """The step's loss and gradients are those of its one graph."""
    eager, compiled_ = step(*inputs), whole(step, backend)(*inputs)
    torch.testing.assert_close(compiled_, eager, rtol=1e-5, atol=1e-6)
    wanted, got = gradients_of(model, eager), gradients_of(model, compiled_)
    assert all(x.any() for x in wanted)
    for a, b in zip(got, wanted, strict=True):
        assert relative_error(a, b) < 1e-5


@pytest.mark.parametrize("fused_head", cases(("loss", "logps"), fast="loss".__eq__))
@pytest.mark.parametrize("backend", cases(("aot_eager", "inductor"), fast="aot_eager".__eq__))
def test_a_model_with_a_fused_head(backend, fused_head):
    model = family_model("qwen2")
    attach_fused_head(model)
    ids = torch.randint(0, model.config.vocab_size, (4, 12))
    labels = ids.clone()
    labels[:, :5] = labels[0, 9:] = -100
    old_logps, weights = torch.randn(4, 11).sub(4.0), torch.randn(4, 11)

    def step(ids, labels, weights, old_logps):
        if fused_head == "logps":
            return (model(ids, labels=labels, fused_head=True).logps * weights).sum()
        objective = Objective(weights[:, 0], old_logps=old_logps)
        return model(ids, labels=labels, fused_head=objective).loss

    expect_one_graph(model, step, ids, labels, weights, old_logps, backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("share_prompts", (True, False))
def test_the_policy_of_this_trainer(share_prompts):
    policy = Policy(family_model("qwen2"), share_prompts=share_prompts)
    texts = [[3, 4, 5, 6], [7, 8]], (0, 0, 1, 1), [[9, 10, 11], [12, 13], [14], [15, 16, 17, 18]]
    batch = Batch.of_rows(*texts, pad_id=0)
    settings = GRPOLossConfig(loss_type="grpo")

    def step(advantages, old_logps):
        return policy.loss(batch, advantages, settings, old_logps=old_logps)[0]

    old_logps = torch.randn(batch.completions.shape).sub(4.0)
    expect_one_graph(policy, step, torch.tensor([1.0, -1.0, 0.7, -0.3]), old_logps)


def test_two_passes_and_log_softmax():
    """The other two calls; a bfloat16 tensor gets its gradient rounded once."""
    batch, leaves = tensors(dtype=torch.bfloat16)
    targets = batch.targets.clamp(0)
    config = GRPOLossConfig(loss_type="gspo_token", entropy_coef=0.1)

    def step(hidden, weight, entropy):
        logits = hidden @ weight.T
        logps = grpo_kernels.selective_log_softmax(logits, targets, temperature=0.7)
        out = grpo_kernels.grpo_loss(
            logps, batch.advantages, batch.mask, old_logps=batch.old_logps, entropy=entropy,
            config=config, num_items=30.0,
        )  # fmt: skip
        return out.loss, out.metrics

    entropy = torch.rand(B, T, requires_grad=True)
    given = (leaves["hidden"], leaves["weight"], entropy)
    results = []
    for run in (step, whole(step)):
        loss, metrics = run(*given)
        results.append((loss.detach(), metrics, torch.autograd.grad(3 * loss, given)))
    (loss, metrics, grads), (found, of_graph, others) = results
    assert relative_error(found, loss) < 1e-6
    assert metrics.keys() == of_graph.keys()
    for name, x in metrics.items():
        torch.testing.assert_close(of_graph[name], x.float(), msg=name, equal_nan=True)
    for mine, theirs in zip(others, grads, strict=True):
        assert mine.dtype == theirs.dtype and relative_error(mine, theirs) < 4e-3


@pytest.mark.parametrize(
    ("enabled", "wants"), ((True, False), (False, True)), ids=("frozen", "no_grad")
)
def test_without_a_gradient(enabled, wants):
    batch, leaves = tensors()
    hidden = leaves["hidden"].detach().requires_grad_(wants)
    weight = leaves["weight"].detach()
    given = weight, batch.targets.clamp(0), batch.advantages
    run = lambda hidden: grpo_kernels.fused_grpo_loss(hidden, *given)  # noqa: E731
    with torch.set_grad_enabled(enabled):
        expected, found = run(hidden), whole(run)(hidden)
    assert found.loss == expected.loss and not found.loss.requires_grad
    assert found.metrics.keys() == expected.metrics.keys()


def test_under_autocast():
    """A graph keeps no autocast, and the rounding of a model's logits follows it."""
    batch, leaves = tensors()
    head = LMHead(leaves["weight"], logits_dtype="model")
    run = lambda h: grpo_kernels.linear_logprobs(h, head, batch.targets.clamp(0)).logps  # noqa: E731
    plain = run(leaves["hidden"])
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = run(leaves["hidden"]), whole(run)(leaves["hidden"])
    assert torch.equal(found, expected) and not torch.equal(plain, expected)


def test_another_config_is_another_graph():
    batch, leaves = tensors()
    given = (leaves["hidden"], leaves["weight"], batch.targets.clamp(0), batch.advantages)
    old = batch.old_logps.nan_to_num()

    def step(config):
        return grpo_kernels.fused_grpo_loss(*given, old_logps=old, config=config).loss

    run, found = whole(step), []
    for epsilon in (0.2, 0.01):
        config = GRPOLossConfig(epsilon=epsilon)
        found.append(float(run(config).detach()))
        assert found[-1] == pytest.approx(float(step(config).detach()), rel=1e-6)
    assert found[0] != pytest.approx(found[1], rel=1e-3)


def test_while_another_thread_compiles(monkeypatch):
    """Then `torch.compiler.is_compiling()` for all threads."""
    batch, leaves = tensors()
    given = (leaves["hidden"], leaves["weight"], batch.targets.clamp(0), batch.advantages)
    step = lambda: grpo_kernels.fused_grpo_loss(*given).loss  # noqa: E731
    run = whole(step)
    expected = run().detach()
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    assert torch.compiler.is_compiling()
    assert torch.equal(step().detach(), expected) and torch.equal(run().detach(), expected)


@pytest.mark.slow
def test_strides_of_all_kinds():
    """Gradients are contiguous, also to inductor, which relies on it."""
    batch, _ = tensors()
    hidden = torch.randn(T, B, H).transpose(0, 1).requires_grad_()
    weight = torch.randn(H, V).requires_grad_()
    entropy = torch.rand(T, B).t().requires_grad_()
    targets = batch.targets.clamp(0)

    def step(hidden, weight, entropy):
        one = grpo_kernels.fused_grpo_loss(hidden, weight.t(), targets, batch.advantages)
        two = grpo_kernels.linear_logprobs(hidden, weight.t(), targets)
        # Of the entropy there are metrics alone.
        out = grpo_kernels.grpo_loss(
            two.logps.t().contiguous().t(), batch.advantages, entropy=entropy
        )
        return one.loss + out.loss

    given = (hidden, weight, entropy)
    gradients_of = partial(torch.autograd.grad, inputs=given, materialize_grads=True)
    expected, found = gradients_of(step(*given)), gradients_of(whole(step, "inductor")(*given))
    for mine, theirs in zip(found, expected, strict=True):
        assert relative_error(mine, theirs) < 1e-5


@pytest.mark.slow
def test_float16_neither_overflows_nor_vanishes():
    """One target for 4,096 tokens, so that a column of the head has the gradients of all."""
    tokens = 4096
    hidden = (1 + 0.1 * torch.randn(1, tokens, 16)).half().requires_grad_()
    weight = (0.1 * torch.randn(40, 16)).half().requires_grad_()
    targets, advantages = torch.zeros(1, tokens, dtype=torch.long), torch.ones(1)
    step = lambda: grpo_kernels.fused_grpo_loss(hidden, weight, targets, advantages).loss  # noqa: E731
    scale = 2.0**16
    for mine, theirs in zip(
        torch.autograd.grad(scale * whole(step)(), (hidden, weight)),
        torch.autograd.grad(scale * step(), (hidden, weight)),
        strict=True,
    ):
        # What AMP's scale makes too large is too large in both.
        assert torch.equal(mine.isfinite(), theirs.isfinite())
        fits = theirs.isfinite()
        assert relative_error(mine[fits], theirs[fits]) < 2e-3


@pytest.mark.parametrize("backend", ("eager", "aot_eager"))
def test_double_backward_is_refused(backend):
    batch, leaves = tensors()
    run = whole(partial(logprobs_loss, batch), backend)
    loss, _ = run(leaves)
    with pytest.raises(RuntimeError, match=r"double backward|donated buffer"):
        (gradient,) = torch.autograd.grad(loss, leaves["hidden"], create_graph=True)
        gradient.sum().backward()


@pytest.mark.slow
def test_two_copies(tmp_path):
    """An installed package and one of a hub or inside another, whose operators are their own."""
    name = "third.party.grpo_kernels"
    shutil.copytree(Path(grpo_kernels.__file__).parent, tmp_path / name.replace(".", "/"))
    code = f"""
import torch, grpo_kernels
import {name} as copy_of_grpo
hidden, weight = torch.randn(2, 3, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
for package in (grpo_kernels, copy_of_grpo, grpo_kernels):
    torch._dynamo.reset()
    call = torch.compile(package.linear_logprobs, backend="aot_eager", fullgraph=True)
    call(hidden, weight, torch.zeros(2, 3, dtype=torch.long)).logps.sum().backward()
    call = torch.compile(package.grpo_loss, backend="aot_eager", fullgraph=True)
    call(hidden[..., 0], torch.ones(2)).loss.backward()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(grpo_kernels.__file__).parents[1]}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


# The operators by torch's own checks


@pytest.mark.slow
@pytest.mark.parametrize("frozen", (False, True))
def test_opcheck(frozen):
    batch, leaves = tensors(frozen=frozen)
    targets, ops = batch.targets.clamp(0), torch.ops.grpo_kernels
    low_rank = leaves["a_out"], leaves["lora_b"]
    given = {
        "hidden": leaves["hidden"], "head": LMHead(leaves["weight"], leaves["bias"], low_rank),
        "targets": targets, "mask": batch.mask, "execution": Execution(),
    }  # fmt: skip
    flat = leaves_of({**given, "entropy": True}, targets)
    torch.library.opcheck(ops.linear_logprobs.default, flat)
    found = [x.detach() for x in ops.linear_logprobs.default(*flat)]
    constant = flat._replace(tensors=[x.detach() for x in flat.tensors])
    d_results = torch.randn(B * T), None, None
    torch.library.opcheck(ops.linear_logprobs_backward.default, (*constant, found, *d_results))
    of_loss = {
        "advantages": batch.advantages, "old_logps": None, "ref_logps": None,
        "sampling_logps": None, "ce_weights": None, "num_items": 7.0, "cu_seqlens": None,
        "config": GRPOLossConfig(),
    }  # fmt: skip
    count = len(grpo_kernels.fused_grpo_loss(**given, **of_loss).metrics)
    flat = leaves_of({**given, **of_loss}, targets)
    torch.library.opcheck(ops.fused_grpo_loss.default, (*flat, count))
    given = {"logps": torch.randn(B, T, requires_grad=True), "mask": batch.mask, **of_loss}
    count = len(grpo_kernels.grpo_loss(**given).metrics)
    torch.library.opcheck(ops.grpo_loss.default, (*leaves_of(given, targets), count))
    logits = torch.randn(B, T, 50, requires_grad=True)
    given = {"logits": logits, "targets": targets % 50, "temperature": 0.7, "backend": "auto"}
    flat = leaves_of(given, logits)
    torch.library.opcheck(ops.selective_log_softmax.default, flat)
    found = [x.detach() for x in ops.selective_log_softmax.default(*flat)]
    constant = flat._replace(tensors=[x.detach() for x in flat.tensors])
    torch.library.opcheck(
        ops.selective_log_softmax_backward.default, (*constant, found, *d_results)
    )


# What stays eager


def a_support():
    return Support(torch.arange(3).repeat(B * T).int(), torch.arange(0, 3 * B * T + 1, 3))


@pytest.mark.parametrize(
    ("options", "why"),
    (
        ({"support": a_support()}, "support: the sizes of kept sets follow from the data"),
        ({"execution": Execution(matmul=torch.mm)}, "execution.matmul: a function is no part"),
        ({"config": GRPOLossConfig(loss_type=lambda tokens: -tokens.logps * tokens.advantages)},
         "config.loss_type: a loss of one's own"),
    ),
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_what_stays_eager_says_why(options, why):
    batch, leaves = tensors()
    targets = batch.targets.clamp(0) % 3 if "support" in options else batch.targets.clamp(0)

    def run(hidden, weight):
        if "config" in options:
            out = grpo_kernels.fused_grpo_loss(hidden, weight, targets, batch.advantages, **options)
            return out.loss * 2
        out = grpo_kernels.linear_logprobs(hidden, weight, targets, **options)
        return (out.logps * batch.advantages[:, None]).sum() * 2

    given = leaves["hidden"], leaves["weight"]
    with pytest.raises(torch._dynamo.exc.Unsupported, match=why):
        whole(run)(*given)
    torch._dynamo.reset()
    torch.manual_seed(0)
    expected = torch.autograd.grad(run(*given), given)
    torch.manual_seed(0)
    found = torch.autograd.grad(torch.compile(run, backend="aot_eager")(*given), given)
    for mine, theirs in zip(found, expected, strict=True):
        assert relative_error(mine, theirs) < 1e-5


@pytest.mark.parametrize(
    ("changes", "told"),
    (({"entries": True}, "support: expected the sets"),
     ({"entropy": 1}, "entropy: expected a bool"),
     ({"targets": torch.zeros(2, 3, dtype=torch.long)}, r"targets: expected shape \[4, 9\]")),
    ids=("entries", "entropy", "targets"),
)  # fmt: skip
def test_options_are_checked_in_a_graph(changes, told):
    batch, leaves = tensors()
    given = {"targets": batch.targets.clamp(0), **changes}
    with pytest.raises(Exception, match=told):
        whole(grpo_kernels.linear_logprobs)(leaves["hidden"], leaves["weight"], **given)


def test_errors_are_those_of_the_call():
    batch, leaves = tensors()
    run = whole(grpo_kernels.linear_logprobs)
    with pytest.raises(ValueError, match=r"targets: expected ids in \[0, 1003\)"):
        run(leaves["hidden"], leaves["weight"], batch.targets.clamp(0) + V)

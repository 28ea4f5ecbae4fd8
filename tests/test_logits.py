"""Logits as the model's head has them: rounded, banned by a bias of -inf, sure of their targets."""

import pytest
import torch

import grpo_kernels
from grpo_kernels import (
    Execution,
    GRPOLossConfig,
    LMHead,
    Reference,
    Support,
    linear_logprobs,
    reference,
)
from tests.helpers.batches import config, exact_batch, make_batch, relative_error
from tests.helpers.half_gemms import imitate
from tests.helpers.head_options import (
    BACKENDS,
    OPTIONS,
    exact_and_actual,
    expect_equal,
)
from tests.helpers.supports import csr
from tests.helpers.tiers import in_turn

ROUNDED = {"logits_dtype": "model"}


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=("bf16", "fp16"))
@pytest.mark.parametrize("option", ("old_logps", "everything"))
def test_gemms_in_half_precision_round_their_own_result(option, dtype, monkeypatch):
    imitate(monkeypatch, dtype)
    config_options, options = OPTIONS[option]
    head = {**options.get("head", {}), **ROUNDED}
    options = {**options, "head": head, "config": config(**config_options), "scale": 4.0}
    how = Execution(chunk_bytes=24 * 1003 * 5)
    expect_equal(exact_batch(dtype, B=8, T=16), options, tolerance=5e-3, execution=how)


# Fields of the head whose steps a model rounds one by one.
STEPS = {
    "none": {},
    "adapter": {"bias": True, "low_rank": True},
    "scale": {"logit_scale": 0.37},
    "softcap": {"softcap": 5.0},
    "all": {"bias": True, "low_rank": True, "logit_scale": 1.3, "softcap": 6.0},
}
OBJECTIVES = ("old_logps", "entropy", "exact_kl")


def half_logits(batch, hidden, head):
    """Logits as a model computes them, of tensors in half precision."""
    bias = batch.bias if "bias" in head else None
    logits = torch.nn.functional.linear(hidden, batch.weight, bias)
    if "low_rank" in head:
        logits = logits + torch.nn.functional.linear(*head["low_rank"])
    logits = logits * head.get("logit_scale", 1.0)
    if "softcap" in head:
        logits = torch.tanh(logits / head["softcap"]) * head["softcap"]
    assert logits.dtype == batch.weight.dtype
    return logits


@pytest.mark.parametrize(
    ("case", "backend"), [*((x, "torch") for x in (*STEPS, "all, fp16")), ("all", "triton")]
)
def test_each_step_is_rounded_as_a_model_rounds_it(case, backend):
    """Values are torch's; gradients those of unrounded steps, at the rounded sum of products."""
    dtype = torch.float16 if "fp16" in case else torch.bfloat16
    tokens = 8 if backend == "torch" else 2  # of a sequence: the interpreter is slow
    batch, head = exact_batch(dtype, B=4, T=tokens, V=211), dict(STEPS[case.split(",")[0]])
    hidden = torch.where(batch.mask[..., None], batch.hidden, 0.0)
    if "low_rank" in head:
        head["low_rank"] = hidden[..., :4] / 4, batch.weight[:, -4:] / 4
    logits, targets = half_logits(batch, hidden, head), batch.targets.clamp(min=0)
    expected = logits.float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    how = Execution(backend=backend, chunk_bytes=4 * 211 * 12)
    fields = head | ({"bias": batch.bias} if "bias" in head else {})
    gaps = {
        x: (linear_logprobs(hidden, LMHead(batch.weight, **fields, logits_dtype=x), targets,
                            execution=how).logps - expected).abs()
        for x in ("fp32", "model")
    }  # fmt: skip
    # A quotient or tanh that lies between two half-precision numbers may go the other way.
    assert gaps["model"].median() < 1e-5 and gaps["model"].mean() < 0.05 * gaps["fp32"].mean()
    other = Reference(batch.hidden.roll(1, -1), batch.weight.roll(1, 0))
    for objective in OBJECTIVES if "all" in case else OBJECTIVES[:1]:
        options = {"config": config(entropy_coef=0.1), "old_logps": True}
        if objective == "old_logps":
            options["config"] = config()
        if objective == "exact_kl":
            exact = config(beta=0.5, kl_estimator="exact", entropy_coef=0.1)
            options |= {"config": exact, "reference": other}
        options |= {"head": {**head, **ROUNDED}, "execution": how}
        expect_equal(batch, options, tolerance=5e-3)


def test_autocast_says_what_the_model_s_dtype_is():
    batch = exact_batch()
    args = batch.targets, batch.mask
    with torch.autocast("cpu", dtype=torch.bfloat16):
        head = LMHead(batch.weight.float(), **ROUNDED)
        ours = linear_logprobs(batch.hidden.float(), head, *args).logps
    half = linear_logprobs(batch.hidden, LMHead(batch.weight, **ROUNDED), *args).logps
    assert torch.equal(ours, half)


@pytest.mark.parametrize(
    ("call", "lift", "backend"),
    in_turn(
        ("loss", "entropy", "logprobs", "several", "entries"), (-124.0, 124.0, 200.0), BACKENDS
    ),
)
def test_a_softcap_keeps_the_digits_of_its_slope_where_it_is_flat(call, lift, backend):
    """Logits of 124 under a cap of 30, which models reach; the slope there is 1e-3, then 6e-6."""
    batch = exact_batch(V=211)
    ids = batch.targets.clamp(min=0)
    several = torch.stack([ids, (ids * 7 + 1) % 211, ids], -1)
    sets = Support(several[..., :2].flatten(), torch.arange(ids.numel() + 1) * 2)
    targets = {"several": several, "entries": None}.get(call, ids)
    kept = {"support": sets, "entries": True} if call == "entries" else {}

    def loss(package, hidden, weight, bias, **how):
        head = LMHead(weight, bias, softcap=30.0, temperature=0.8)
        if call in ("loss", "entropy"):
            cfg = GRPOLossConfig(entropy_coef=0.1 * (call == "entropy"))
            args = batch.targets, batch.advantages.to(hidden.dtype), batch.mask
            return package.fused_grpo_loss(hidden, head, *args, config=cfg, **how).loss
        logps = package.linear_logprobs(hidden, head, targets, **kept, **how).logps
        return (logps * (torch.arange(logps.numel()) % 5).view(logps.shape)).sum()

    tensors = batch.hidden.nan_to_num(), batch.weight, batch.bias + lift
    exact, actual = exact_and_actual(loss, *tensors, execution=Execution(backend=backend))
    for truth, x in zip(exact, actual, strict=True):
        assert truth.norm() > 0 and relative_error(x, truth) < 2e-5


@pytest.mark.parametrize("softcap", (None, 6.0), ids=("plain", "softcap"))
@pytest.mark.parametrize("call", ("one", "targets", "several", "entries"))
def test_a_banned_entry_beside_the_target(call, softcap):
    """Also in kept sets, and looked up with others, where its log-prob is -inf."""
    batch = make_batch(B=1, T=4)
    targets = {
        "several": torch.tensor([[[0, 3, 5], [0, 1, 1], [5, 5, 1], [7, 3, 9]]]),
        "entries": None,
    }.get(call, torch.tensor([[5, 6, 7, 8]]))
    sets = csr([[5, 0, 9], [6, 1], [7, 300], [8]])
    kept = {"support": sets, "entries": call == "entries"} if call in ("targets", "entries") else {}
    batch.bias[:2] = -torch.inf
    values = []

    def loss(package, hidden, weight, bias, **how):
        head = LMHead(weight, bias, softcap=softcap)
        logps, entropy, _ = package.linear_logprobs(hidden, head, targets, **kept, **how)
        values.append([logps.detach(), entropy.detach()])
        return logps[logps.isfinite()].sum() + entropy.sum()

    tensors = batch.hidden.nan_to_num(), batch.weight, batch.bias
    gradients = exact_and_actual(loss, *tensors, entropy=True)
    for truth, x in zip(*values, strict=True):
        torch.testing.assert_close(x.double(), truth, rtol=1e-5, atol=1e-6)
    assert (values[1][0] == -torch.inf).sum() == {"several": 5, "entries": 2}.get(call, 0)
    for truth, x in zip(*gradients, strict=True):
        assert truth.norm() > 0 and relative_error(x, truth) <= 1e-5


# A token's nats above all other ids together, in any block of the columns.
MARGINS = {0: 10, 2047: 5, 2048: 16, 4095: 60, 4096: 30, 5002: 20, 700: 40}
SURE_CALLS = (
    "one pass", "two sweeps", "batch_invariant", "two passes", "several targets", "kept sets",
    "selective_log_softmax",
)  # fmt: skip


def sure_tokens(dtype=torch.float32, V=5003):
    """Weights `[V, N]` with the logits of a token in each column, and the targets.

    Then, in float64 and from sums without the target: log p, 1 - p, the entropy, and the gradient
    of the logits `[V, N]` by log p / (1 - p), which is 1 at the targets.
    """
    g = torch.Generator().manual_seed(0)
    targets, tokens = torch.tensor(list(MARGINS)) % V, torch.arange(len(MARGINS))
    z = torch.randn(V, len(MARGINS), generator=g, dtype=torch.float64)
    z[targets, tokens] = -torch.inf
    z[targets, tokens] = z.logsumexp(0) + torch.tensor(list(MARGINS.values()))
    z = z.to(dtype)
    below = z.double() - z.double()[targets, tokens]
    others = below.exp().index_put((targets, tokens), torch.zeros((), dtype=torch.float64))
    odds = others.sum(0)
    logps, rest = -odds.log1p(), odds / (1 + odds)
    entropy = -(others * (below + logps)).sum(0) / (1 + odds) - logps / (1 + odds)
    grads = (-others / odds).index_put((targets, tokens), torch.ones((), dtype=torch.float64))
    return z, targets, logps, rest, entropy, grads


def score_sure(call, hidden, head, targets, d, execution=None):
    """Log-probs and entropy, after the backward of the sum of d times the first.

    Without `execution` they are those of the reference.
    """
    package, how = reference, {}
    if execution is not None:
        package, how = grpo_kernels, {"execution": execution}
    if call in ("one pass", "two sweeps", "batch_invariant"):
        cfg = GRPOLossConfig(entropy_coef=1e-30 * (call == "two sweeps"))
        out = package.fused_grpo_loss(hidden, head, targets, -d, num_items=1.0, config=cfg, **how)
        out.loss.backward()
        return out.logps, out.entropy
    if call == "selective_log_softmax":
        how = {} if execution is None else {"backend": execution.backend}
        logps, entropy = package.selective_log_softmax(hidden @ head.weight.T, targets, **how), None
    else:
        V, N = head.weight.shape
        if execution is not None:
            how["entropy"] = True
        if call == "several targets":
            targets = torch.stack([(targets - 2).abs(), targets, (targets - 7).abs()], 1)
        if call == "kept sets":
            how["support"] = Support(torch.arange(V).repeat(N), torch.arange(N + 1) * V)
        logps, entropy, _ = package.linear_logprobs(hidden, head, targets, **how)
        logps = logps[:, 1] if call == "several targets" else logps
    (d * logps).sum().backward()
    return logps, entropy


@pytest.mark.parametrize(
    ("backend", "dtype"), (
        ("reference", torch.float64), ("torch", torch.float32), ("torch", torch.bfloat16),
        ("triton", torch.float32),
        pytest.param("triton", torch.bfloat16, marks=pytest.mark.compiled),
    ),
    ids=lambda x: x if isinstance(x, str) else str(x)[6:],
)  # fmt: skip
@pytest.mark.parametrize("call", SURE_CALLS)
def test_log_p_and_1_minus_p_keep_their_digits_at_any_margin(call, backend, dtype, monkeypatch):
    V = 200 if call == "kept sets" else 5003
    z, targets, logps, rest, entropy, grads = sure_tokens(dtype, V)
    hidden, weight = torch.eye(len(targets), dtype=dtype).requires_grad_(), z.clone()
    args = call, hidden, LMHead(weight.requires_grad_()), targets, 1 / rest.to(z.dtype)
    # A GPU's approximations are off by 2e-5, and gradients in bf16 are rounded three times.
    tolerance = grad_tolerance = 5e-5
    if dtype == torch.bfloat16:
        imitate(monkeypatch, dtype)
        grad_tolerance = 1.2e-2
    if backend == "reference":
        (actual, actual_entropy), tolerance, grad_tolerance = score_sure(*args), 1e-12, 1e-12
    else:
        how = Execution(backend=backend, batch_invariant=call == "batch_invariant")
        actual, actual_entropy = score_sure(*args, how)
    assert (actual.double() / logps - 1).abs().max() <= tolerance
    if actual_entropy is not None:
        assert (actual_entropy.double() / entropy - 1).abs().max() <= tolerance
    for x, truth in ((weight.grad.T, grads.T), (hidden.grad, grads.T @ z.double())):
        errors = (x.double() - truth).norm(dim=1) / truth.norm(dim=1)
        assert errors.max() <= grad_tolerance

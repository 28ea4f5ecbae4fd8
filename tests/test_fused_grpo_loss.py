"""`fused_grpo_loss` where it is delicate: rounding, rows; options: `test_pairs.py`."""

import pickle
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import grpo_kernels
from benchmarks.workloads import make
from grpo_kernels import Execution, FusedGRPOLoss, GRPOLossConfig, fused_grpo_loss
from tests.helpers.batches import (
    NAN,
    OBJECTIVES,
    config,
    make_batch,
    packed,
    relative_error,
    run_fused,
)
from tests.helpers.half_gemms import imitate
from tests.helpers.head_options import (
    BACKENDS,
    TOLERANCE,
    expect_equal,
    objective_options,
    watch_products,
)
from tests.helpers.tiers import in_turn


def test_no_gradient_slice_is_rounded_before_summing():
    """Forty chunks of bf16 input: rounding each chunk's dW would show, one rounding does not."""
    batch = make_batch(B=8, T=40, V=300).to("cpu", torch.bfloat16)
    options = {"execution": Execution(chunk_bytes=4 * 300 * 4), "scale": 1.0}
    actual, expected = (
        run_fused(batch, exact=x, **options).gradients["weight"] for x in (False, True)
    )
    rounding = relative_error(expected.bfloat16(), expected)
    assert relative_error(actual, expected) < 1.05 * rounding


@pytest.mark.parametrize(
    ("dtype", "scale", "half_products"),
    (
        (torch.bfloat16, 1.0, False), (torch.float16, 1.0, False), (torch.float16, 65536.0, True),
    ),
)  # fmt: skip
def test_small_shares_of_the_loss_do_not_underflow(dtype, scale, half_products, monkeypatch):
    """A token's share of 1 / 131,072 is near float16's smallest number, p times it far below."""
    batch, cfg = make_batch(B=8, T=32), config(entropy_coef=1e-3)
    if half_products:  # of probabilities near 1e-3, with an entropy of weight 1 over the tokens
        imitate(monkeypatch, dtype)
        batch.hidden, cfg = 0.2 * batch.hidden, config(entropy_coef=1.0)
    batch = batch.to("cpu", dtype)
    options = {"config": cfg, "num_items": 131_072, "scale": scale}
    expected, actual = (run_fused(batch, exact=exact, **options) for exact in (True, False))
    # With a loss scaler the result fits float16; without one only its rounding may be lost.
    tolerance = TOLERANCE[dtype] if scale > 1 or dtype == torch.bfloat16 else 0.1
    for name in ("hidden", "weight"):
        error = relative_error(actual.gradients[name], expected.gradients[name])
        assert error <= tolerance, name


@pytest.mark.gpu
@pytest.mark.real_gpu
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_cuda_tile_past_2_31_elements(dtype):
    """14,208 rows of 151,936 logits in one buffer, against the same in small chunks."""
    B, T, H, V = 2, 7104, 64, 151_936
    assert B * T * V > 2**31
    g = torch.Generator(device="cuda").manual_seed(0)
    weight = torch.randn(V, H, generator=g, device="cuda").to(dtype)
    targets = torch.randint(0, V, (B, T), generator=g, device="cuda")
    noise = torch.randn(B, T, H, generator=g, device="cuda")
    hidden = (0.15 * weight[targets].float() + 0.2 * noise).to(dtype)
    advantages = torch.tensor([1.0, -1.0], device="cuda")
    results = []
    for chunk_bytes in (1 << 30, 10 << 30):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        how = Execution(chunk_bytes=chunk_bytes)
        out = fused_grpo_loss(h, w, targets, advantages, execution=how)
        out.loss.backward()
        results.append((out.logps, h.grad, w.grad))
    assert (results[0][0] - results[1][0]).abs().max() < 1e-4
    for small, large in zip(results[0][1:], results[1][1:], strict=True):
        assert small.norm() > 0 and relative_error(large, small) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.real_gpu
def test_a_call_waits_once_for_a_gpu():
    """The row counts are read."""
    w = make("dense", (1024, 5003, 64), "cuda")
    head = w.hidden.requires_grad_(), w.weight.requires_grad_()

    def step():
        out = fused_grpo_loss(*head, w.targets, w.advantages, old_logps=w.old_logps)
        out.loss.backward()

    step()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum("synchronizing" in str(x.message) for x in caught) == 1


@pytest.mark.parametrize("objective", ("kl_old_delta", "gspo", "everything"))
def test_the_module_is_the_call(objective, monkeypatch):
    """Also after a copy to another process: in one pass, in two, and on packed tokens."""
    batch, options, used = packed(make_batch()), objective_options(objective), []
    options["execution"] = Execution(chunk_bytes=4 * 1003 * 5)
    expected = run_fused(batch, exact=False, **options)

    def by_module(*args, config, execution, **tensors):
        used.append(pickle.loads(pickle.dumps(FusedGRPOLoss(config, execution))))
        return used[-1](*args, **tensors)

    monkeypatch.setattr(grpo_kernels, "fused_grpo_loss", by_module)
    actual = expect_equal(batch, options)
    assert used[0].config == options["config"] and used[0].execution == options["execution"]
    assert not used[0].state_dict() and actual.loss == expected.loss
    for name, gradient in expected.gradients.items():
        assert gradient.norm() > 0 and torch.equal(actual.gradients[name], gradient), name


def test_the_module_with_advantages_of_1_is_the_mean_cross_entropy():
    batch = make_batch()
    leaves = [[x.clone().requires_grad_() for x in (batch.hidden, batch.weight)] for _ in range(2)]
    (hidden, weight), (h, w) = leaves
    logits = torch.where(batch.mask[..., None], h, 0.0) @ w.T
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
    grpo = FusedGRPOLoss(GRPOLossConfig(loss_type="reinforce"))
    ones = torch.ones(batch.mask.shape)
    loss = grpo(hidden, weight, batch.targets, ones, batch.targets != -100).loss
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for one, other in ((hidden, h), (weight, w)):
        assert other.grad.norm() > 0 and relative_error(one.grad, other.grad) < 2e-5


def test_the_module_shows_its_options():
    changed = FusedGRPOLoss(GRPOLossConfig(beta=0.04), Execution(backend="torch"))
    assert repr(changed) == "FusedGRPOLoss(beta=0.04, backend='torch')"
    assert repr(FusedGRPOLoss()) == "FusedGRPOLoss()"


def test_advantages_per_token():
    batch = packed(make_batch())
    advantages = torch.randn(batch.mask.shape).masked_fill(~batch.mask, NAN)
    options = {"config": config(loss_type="grpo"), "old_logps": True, "advantages": advantages}
    expect_equal(batch, options)


@pytest.mark.parametrize(
    "mask_dtype", (None, torch.bool, torch.int64, torch.uint8, torch.float32), ids=str
)
def test_masks(mask_dtype):
    """In any dtype; without one every token counts."""
    batch = make_batch()
    if mask_dtype is None:
        batch.hidden, batch.targets = torch.randn_like(batch.hidden), batch.targets.clamp(min=0)
    batch.mask = batch.mask.to(mask_dtype)
    expect_equal(batch, {"config": config(loss_type="grpo"), "mask": mask_dtype is not None})


def rows_multiplied(batch, options, monkeypatch):
    """Returns the number of rows in the GEMMs of logits, and in those of gradients."""
    elements = {"logits": 0, "gradients": 0}
    V, H = batch.weight.shape

    def product(a, b):
        if a.shape[1] == H:
            elements["logits"] += len(a) * b.shape[1]
        else:
            elements["gradients"] += a.numel()
        return torch.mm(a, b)

    watch_products(monkeypatch, product)
    run_fused(batch, exact=False, **options)
    return {name: count / V for name, count in elements.items()}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_token_local_objectives_make_the_logits_once(objective, monkeypatch):
    options = objective_options(objective)
    batch, cfg = make_batch(), options["config"]
    rows = rows_multiplied(batch, options, monkeypatch)
    one_pass = cfg.why_two_passes(has_old_logps="old_logps" in options) is None
    assert one_pass == (cfg.one_pass and objective != "is_sequence_on_policy")
    tokens = int(batch.mask.sum())
    if one_pass:
        assert rows["logits"] == tokens
    else:  # the second time those that turned out to have a gradient, if they are few
        assert tokens <= rows["logits"] <= 2 * tokens


def test_a_constant_correction_of_zero_costs_no_gradient_work(monkeypatch):
    """Sequences that the sampler's mismatch masks are out of the gradient GEMMs beforehand."""
    batch = make_batch(B=6, T=11)
    batch.sampling_logps[0] -= 5.0
    options = {"config": config(is_correction="sequence_mask"), "sampling_logps": True}
    rows = rows_multiplied(batch, {**options, "old_logps": True}, monkeypatch)
    trained = batch.mask & (batch.advantages != 0)[:, None]
    assert trained[0].any() and 0 < rows["gradients"] <= int(trained[1:].sum())


@pytest.mark.parametrize(
    ("loss_type", "backend", "zero"),
    in_turn(
        ("grpo", "dr_grpo", "dapo", "luspo", "gspo", "gmpo", "vespo", "cispo"), BACKENDS,
        ("mask", "advantages", "no_sequences", "no_tokens"),
    ),
)  # fmt: skip
def test_nothing_to_learn(loss_type, backend, zero):
    """Loss 0, zero gradients, and still connected to the graph."""
    batch = make_batch(B=4 * (zero != "no_sequences"), T=9 * (zero != "no_tokens"))
    if zero in ("mask", "advantages"):
        setattr(batch, zero, torch.zeros_like(getattr(batch, zero)))
    options = {"config": config(loss_type=loss_type), "head": {"bias": True}}
    result = run_fused(batch, exact=False, **options, execution=Execution(backend=backend))
    assert result.loss.item() == 0
    for name, grad in result.gradients.items():
        assert grad is not None and (grad == 0).all(), name


def test_workspace_does_not_grow_with_tokens():
    """The largest tensor ever allocated beside the gradients is the chunk's."""

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                self.elements = max(self.elements, out.nbytes // 4)
            return out

    V, H, rows = 5003, 8, 16
    peaks = []
    for T in (100, 400):
        batch = make_batch(B=4, T=T, H=H, V=V)
        head = [x.requires_grad_() for x in (batch.hidden, batch.weight)]
        rest = (batch.targets, batch.advantages, batch.mask)
        with Largest() as seen:
            how = Execution(chunk_bytes=4 * V * rows)
            fused_grpo_loss(*head, *rest, execution=how).loss.backward()
        peaks.append(seen.elements)
    assert peaks[0] == peaks[1] <= rows * (V + 64)

"""Whole calls on the path of a GPU, value by value: what `test_pairs.py` does not run there.

They run on a GPU, or with `make sanitize` on CUDA tensors that are not on one, with the kernels
from their PTX. Budgets are those of the compiled path: log-probs to 1e-4, gradients to 3e-3 of half
precision's operands.
"""

import pytest
import torch

from grpo_kernels import Execution, fused_grpo_loss, linear_logprobs, reference
from tests.helpers.batches import make_batch, relative_error, run_fused
from tests.helpers.head_options import expect_equal, objective_options

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# On few tokens the rounding of X and then of dH to bf16 scatters around 2.4e-3.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6e-3, torch.float16: 3e-3}
V = 1003  # odd: rows of logits are padded


def options_of(chunk_bytes=None):
    return {"execution": Execution(chunk_bytes=chunk_bytes), **objective_options("old_logps")}


CASES = {
    "one_row_chunks": options_of(chunk_bytes=4 * V),
    "small_chunks": options_of(chunk_bytes=6 * V * 16),
    "strips": options_of(chunk_bytes=6 * V * 64),
    "models_logits": {**options_of(), "head": {"logits_dtype": "model"}},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_values(case, dtype):
    batch = make_batch(B=6, T=11, V=V).to("cuda", dtype)
    options = {"scale": 64.0, **CASES[case]}
    if case == "models_logits" and dtype != torch.float32:
        # Rounded as the model's own head does, on purpose: near, not equal.
        near = run_fused(batch, exact=False, **options)
        expected = run_fused(batch, exact=True, **{**options, "head": {}})
        assert 1e-4 < (near.logps - expected.logps).abs().max() < 0.2
        return
    expect_equal(batch, options, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_of_log_probs_are_the_same_bits(dtype):
    """Batch-invariant log-probs with a gradient, without, and of one token alone."""
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(6000, 16, generator=g).to(dtype)
    hidden = (3 * torch.randn(9, 16, generator=g)).to(dtype)
    targets = torch.randint(6000, (9,), generator=g).cuda()
    hidden, weight = hidden.cuda().requires_grad_(), weight.cuda()
    how = {"execution": Execution(batch_invariant=True)}
    scored = linear_logprobs(hidden, weight, targets, entropy=True, **how)
    out = fused_grpo_loss(hidden, weight, targets, torch.ones(9).cuda(), **how)
    assert torch.equal(out.logps, scored.logps) and torch.equal(out.entropy, scored.entropy)
    alone = linear_logprobs(hidden[4:5], weight, targets[4:5], **how)
    assert torch.equal(alone.logps, scored.logps[4:5])
    true = reference.linear_logprobs(hidden.detach().double(), weight.double(), targets)
    assert (scored.logps - true.logps).abs().max() <= 1e-4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_of_a_frozen_head(dtype):
    """Two passes over any loss, with logits in strips."""
    batch = make_batch(B=6, T=64, V=V).to("cuda", dtype)
    results, strips = [], Execution(chunk_bytes=V * (2 * 384 + 4 * 128))
    for call, to, how in (
        (reference.linear_logprobs, torch.float64, {}),
        (linear_logprobs, dtype, {"execution": strips}),
    ):
        hidden = batch.hidden.detach().to(to).requires_grad_()
        out = call(hidden, batch.weight.to(to), batch.targets, batch.mask, **how)
        loss = 64 * torch.where(batch.mask, out.logps, 0.0).square().mean()
        results.append(torch.autograd.grad(loss, hidden)[0])
    true, actual = results
    assert true.norm() > 0 and relative_error(actual, true) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_values_under_autocast(dtype):
    """Operands in float32, GEMMs in autocast's dtype."""
    batch = make_batch(B=6, T=11, V=V).to("cuda", torch.float32)
    enabled, before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)  # which `torch.autocast` does where there is a GPU
    torch.set_autocast_dtype("cuda", dtype)
    try:
        ours = run_fused(batch, exact=False, old_logps=True, scale=64.0)
    finally:
        torch.set_autocast_enabled("cuda", enabled)
        torch.set_autocast_dtype("cuda", before)
    rounded = [x.detach().to(dtype).float() for x in (batch.hidden, batch.weight)]
    hidden, weight = (x.double() for x in rounded)
    true = reference.linear_logprobs(hidden, weight, batch.targets, mask=batch.mask)
    assert (ours.logps - true.logps)[batch.mask].abs().max() <= 1e-4
    exact = run_fused(batch, exact=True, old_logps=True, scale=64.0)
    for name, expected in exact.gradients.items():
        if expected is not None:
            assert 1e-5 < relative_error(ours.gradients[name], expected) <= 2e-2, name


@pytest.mark.usefixtures("real_memory")
def test_values_of_an_attached_model():
    """A model of transformers whose head is fused: its log-probs, and gradients of all weights."""
    pytest.importorskip("transformers")
    from grpo_kernels.integrations.transformers import attach_fused_head
    from tests.helpers.tiny_models import make_model

    torch.manual_seed(0)
    plain = make_model("llama")
    ids = torch.randint(plain.config.vocab_size, (2, 9))
    exact = make_model("llama").double()
    exact.load_state_dict(plain.double().state_dict())
    true = exact(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    true.sum().backward()
    model = plain.float()
    for module in model.modules():  # `Module.to` moves what a tensor is made of, under its feet
        for name, x in module._parameters.items():
            module._parameters[name] = None if x is None else torch.nn.Parameter(x.detach().cuda())
        for name, x in module._buffers.items():
            module._buffers[name] = None if x is None else x.cuda()
    model.tie_weights()
    attach_fused_head(model)
    labels = ids.cuda()
    logps = model(labels, labels=labels, fused_head=True).logps
    actual = logps if logps.shape == true.shape else logps[:, 1:]
    assert (actual.cpu() - true).abs().max() <= 1e-4
    actual.sum().backward()
    exact_weights = dict(exact.named_parameters())
    for name, weight in model.named_parameters():
        assert relative_error(weight.grad.cpu(), exact_weights[name].grad) <= 1e-4, name

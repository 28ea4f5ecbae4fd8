"""`capturable=True`: every row takes part, nothing is read back, and the results are the same."""

import pytest
import torch

from tests.helpers.batches import assert_matches, config, make_batch, relative_error, run_fused
from tests.helpers.flat_calls import fused_grpo_loss, linear_logprobs
from tests.helpers.head_options import BACKENDS, OPTIONS


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("loss_type", ("dapo", "gspo"))
def test_capturable(loss_type, option, backend):
    """Every row takes part; masked ones, which hold NaN and ids out of range, change nothing."""
    config_options, options = OPTIONS[option]
    if loss_type == "gspo" and "delta" in config_options:
        config_options = {k: v for k, v in config_options.items() if k != "delta"}
    options = {**options, "config": config(loss_type=loss_type, **config_options)}
    batch = make_batch()
    assert not batch.mask.all() and batch.hidden[~batch.mask].isnan().any()
    expected = run_fused(batch, exact=True, **options)
    actual = run_fused(batch, exact=False, backend=backend, capturable=True, **options)
    assert_matches(actual, expected, 2e-5, logps=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_masked_row_of_large_logits(backend):
    """A masked row's logits are the bias alone; e to one of them is infinite, and times 0 NaN."""
    batch = make_batch()
    gradients = []
    for options in ({}, {"capturable": True}):
        head = [x.clone().requires_grad_() for x in (batch.hidden, batch.weight)]
        bias = torch.zeros(len(batch.weight)).index_fill_(0, torch.tensor(3), 3.0).requires_grad_()
        logps = linear_logprobs(
            *head, batch.targets, bias=bias, mask=batch.mask, temperature=0.03, backend=backend,
            **options,
        ).logps  # fmt: skip
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
        given = [getattr(batch, name).clone() for name in names]
        if not masked:
            given[0], given[2] = given[0].nan_to_num(), given[2].clamp(0, 5002)
            given[4] = torch.ones_like(given[4])
        return given

    def step(given, **options):
        head = [x.detach().requires_grad_() for x in given[:2]]
        fused_grpo_loss(*head, *given[2:], **options).loss.backward()
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
        given = inputs_of(batch)
        for place, value in zip(static, given, strict=True):
            place.copy_(value)
        graph.replay()
        for mine, plain in zip(captured, step(given), strict=True):
            assert plain.norm() > 0 and relative_error(mine, plain) <= 3e-3

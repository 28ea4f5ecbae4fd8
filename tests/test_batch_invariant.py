"""The bits of a token do not depend on what else is in the call, its order or its chunks."""

import pytest
import torch

from grpo_kernels import Execution, GRPOLossConfig, LMHead, fused_grpo_loss, linear_logprobs
from grpo_kernels.head.products import INVARIANT_ROWS
from tests.helpers.half_gemms import imitate
from tests.helpers.head_options import BACKENDS, watch_products

V, H = 307, 48
ROWS = INVARIANT_ROWS
N = 2 * ROWS + 22  # three products, the last one short


def tokens(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(V, H, generator=g).to(dtype)
    targets = torch.randint(V, (N,), generator=g)
    hidden = 0.2 * weight[targets].float() + torch.randn(N, H, generator=g)
    fields = {
        "advantages": torch.randn(N, generator=g), "old_logps": torch.randn(N, generator=g) - 5,
        "temperature": 0.7 + torch.rand(N, generator=g),
        "a_out": torch.randn(N, 4, generator=g), "d": torch.randn(3, N, generator=g),
    }  # fmt: skip
    lora_b, bias = 0.3 * torch.randn(V, 4, generator=g), torch.randn(V, generator=g)
    return hidden.to(dtype), weight, targets, fields, lora_b, bias


def some_of(rows, call, dtype=torch.float32, adapter=True, head=(), **execution):
    """The results of a call over `rows` of the tokens, with their gradients."""
    rows = torch.as_tensor(rows)
    hidden, weight, targets, fields, lora_b, bias = tokens(dtype)
    hidden = hidden[rows].clone().requires_grad_()
    a_out = fields["a_out"][rows].clone().requires_grad_()
    low_rank = (a_out, lora_b) if adapter else None
    lm_head = LMHead(weight, bias, low_rank, temperature=fields["temperature"][rows], **dict(head))
    args = hidden, lm_head, targets[rows]
    how = {"execution": Execution(batch_invariant=True, **execution)}
    if call == "loss":
        out = fused_grpo_loss(
            *args, fields["advantages"][rows], old_logps=fields["old_logps"][rows], num_items=N,
            config=GRPOLossConfig(loss_type="dapo"), **how,
        )  # fmt: skip
        out.loss.backward()
        results = [out.logps, out.entropy]
    else:
        out = linear_logprobs(*args, entropy=True, **how)
        sum((d * x).sum() for d, x in zip(fields["d"][:, rows], out, strict=False)).backward()
        results = [*out]
    return [*results, hidden.grad, *([a_out.grad] if adapter else [])]


def assert_same_bits(rows, call, of=N, chunk_bytes=None, **options):
    """Compares rows computed with all tokens and rows computed alone, in chunks of a size."""
    all_of = some_of(range(of), call, **options)
    alone = some_of(rows, call, chunk_bytes=chunk_bytes, **options)
    for place, (part, expected) in enumerate(zip(alone, all_of, strict=True)):
        expected = expected[torch.as_tensor(rows)]
        assert torch.equal(part, expected), (place, (part - expected).abs().max())


PARTS = {
    "one": [77], "one more": [*range(80, 81 + ROWS)], "twice": [5, 5, 9, 5] * 30,
    "backwards": [*range(N)][::-1],
}  # fmt: skip
CHUNK = 4 * V * 70


both_calls = pytest.mark.parametrize("call", ("loss", "logprobs"))


@pytest.mark.parametrize("backend", ("torch", pytest.param("triton", marks=pytest.mark.compiled)))
@both_calls
@pytest.mark.parametrize("part", PARTS)
def test_any_part_in_any_order(part, call, backend):
    assert_same_bits(PARTS[part], call, backend=backend)


@both_calls
@pytest.mark.parametrize("threads", (1, 2))
def test_chunks_and_threads(call, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for seed in range(3):
            order = torch.randperm(N, generator=torch.Generator().manual_seed(seed))
            assert_same_bits(order.tolist(), call, chunk_bytes=CHUNK)
        assert_same_bits([11], call)
    finally:
        torch.set_num_threads(before)


@both_calls
@pytest.mark.parametrize(
    "options", ({"head": {"logits_dtype": "model"}}, {"adapter": False, "chunk_bytes": CHUNK})
)
def test_half_precision(options, call, monkeypatch):
    if "chunk_bytes" in options:  # the products of a GPU
        imitate(monkeypatch, torch.bfloat16)
    for rows in ([77], [*range(N)][::-1]):
        assert_same_bits(rows, call, dtype=torch.bfloat16, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
def test_scored_and_trained_log_probs_are_equal(dtype, backend, monkeypatch):
    """Over several blocks of columns, whatever the sweep leaves behind, rounded or not."""
    if dtype == torch.bfloat16:
        imitate(monkeypatch, dtype)
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(6000, 16, generator=g).to(dtype)
    hidden, targets = 3 * torch.randn(9, 16, generator=g), torch.randint(6000, (9,), generator=g)
    hidden = hidden.to(dtype).requires_grad_()
    for logits_dtype in ("fp32", "model"):
        args = hidden, LMHead(weight, logits_dtype=logits_dtype), targets
        how = Execution(batch_invariant=True, backend=backend)
        scored = linear_logprobs(*args, entropy=True, execution=how)
        out = fused_grpo_loss(*args, torch.ones(9), execution=how)
        assert torch.equal(out.logps, scored.logps) and torch.equal(out.entropy, scored.entropy)


@both_calls
def test_products_have_one_shape(call, monkeypatch):
    """Products of logits and of the states' gradient; `test_pairs.py` checks their values."""
    shapes = []

    def product(a, b):
        shapes.append((len(a), b.shape[1]))
        return a @ b

    watch_products(monkeypatch, product)
    some_of(range(N), call)
    assert {rows for rows, _ in shapes} == {ROWS} and {columns for _, columns in shapes} > {H}


@pytest.mark.usefixtures("real_memory")
def test_the_trainers_first_ratios_are_exactly_1(tiny_model, tmp_path):
    """Weights stand still, old log-probs are taken before: every ratio of both updates is 1."""
    # Here, as a second of `make smoke` is this import.
    from tests.helpers.trainer_runs import config_of, rows_of, trainer_of

    options = {"minibatches": 2, "micro_batch_size": 16, "learning_rate": 1e-30}
    config = config_of(tiny_model, tmp_path, **options)
    trainer_of(config).train()
    rows = rows_of(tmp_path / "t")
    assert len(rows) == 2 and all(row["grad_norm"] > 0 for row in rows)
    assert all(row["ratio_mean"] == row["ratio_max"] == 1.0 for row in rows)

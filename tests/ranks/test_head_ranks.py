"""Two processes around a fused head against one: DDP, FSDP2, and TRL's trainer."""

import pytest
import torch

from grpo_kernels.integrations.transformers import Objective
from tests.helpers.batches import relative_error
from tests.ranks.head_jobs import HeadAlone, case, scored, tokens_of, train

pytestmark = pytest.mark.usefixtures("real_memory")


KINDS = (
    "ddp", "ddp, lora, checkpointed", "fsdp2", "fsdp2, checkpointed", "fsdp2, head apart",
    "fsdp2, lora", "fsdp2, lora, head apart", "fsdp2, mixed", "fsdp2, mixed, head apart, in parts",
    "fsdp2, lora, mixed, head apart, in parts", "head alone", "lora, head alone",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind, ranks):
    both = ranks("tests.ranks.head_jobs:gradients_of_half", kind)
    model, inputs, labels, kwargs = case(kind)
    objective = Objective(**kwargs, num_items=scored(labels))
    model(**inputs, labels=labels, fused_head=objective).loss.backward()
    assert scored(labels[:2]) != scored(labels[2:])
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert any("lm_head" in name for name in expected)
    for grads in both:
        assert grads.keys() == expected.keys()
        for name, gradient in expected.items():
            if gradient.norm() > 1e-6:
                tolerance = 0.2 if "mixed" in kind else 2e-5
                assert relative_error(grads[name], gradient) < tolerance, name


@pytest.mark.parametrize("kind", ("", "head apart", "frozen", "frozen, head apart"))
def test_states_of_a_sharded_model_are_of_the_model_as_it_was(kind, ranks):
    for kl, expected in ranks("tests.ranks.head_jobs:kl_to_its_own_states", kind):
        assert expected > 1e-3 and kl == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("kind", ("ddp", "fsdp2"))
def test_the_head_alone(kind, ranks):
    """FSDP2 moves it once, in bf16 before, dW in float32 after, however many chunks there are."""
    dtype = torch.float32 if kind == "ddp" else torch.bfloat16
    head = HeadAlone()
    head.weight.data = head.weight.data.to(dtype)
    for rank in range(2):
        (head(*tokens_of(rank, dtype)) / 2).backward()
    V, H = head.weight.shape
    both = ranks("tests.ranks.head_jobs:gradient_of_head", kind, dtype)
    assert torch.equal(both[0][1], both[1][1])
    for seen, gradient in both:
        if kind == "fsdp2":
            assert seen == [("allgatherbase", 2 * V * H), ("reducescatterbase", 4 * V * H)]
        assert gradient.dtype == torch.float32
        error = relative_error(gradient, head.weight.grad.double())
        assert error < (1e-5 if kind == "ddp" else 5e-3)


@pytest.mark.parametrize(
    "options", ({"loss_type": "dapo", "num_iterations": 2}, {"loss_type": "grpo", "beta": 0.1})
)
def test_trl(options, ranks, tmp_path):
    from tests.helpers.trl_runs import folder_of

    model, one, two = folder_of("qwen2"), tmp_path / "one", tmp_path / "two"
    log, weights = train(model, str(one), options | {"per_device_train_batch_size": 8})
    both = ranks(
        "tests.ranks.head_jobs:train", model, str(two),
        options | {"per_device_train_batch_size": 4}, environment={"ACCELERATE_USE_CPU": "true"},
    )  # fmt: skip
    names = ("loss", "grad_norm", "entropy", "reward", *(["kl"] if "beta" in options else []))
    for row, expected in zip(both[0][0][:-1], log[:-1], strict=True):
        for name in names:
            if name in expected:
                assert row[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
    for _, trained in both:
        for name, weight in weights.items():
            torch.testing.assert_close(trained[name], weight, rtol=1e-4, atol=1e-5, msg=name)

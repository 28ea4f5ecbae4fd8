"""Two processes around a fused head against one: DDP, FSDP2, and a sharded head alone."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from grpo_kernels import GRPOLossConfig, fused_grpo_loss
from grpo_kernels.head.execution import Execution
from grpo_kernels.integrations.transformers import Objective, attach_fused_head, detach_fused_head
from tests.helpers.batches import relative_error
from tests.helpers.model_families import LORAS, family_model, with_lora
from tests.helpers.ranks import WORLD
from tests.ranks.traffic import Traffic

pytestmark = pytest.mark.usefixtures("real_memory")


def case(kind: str):
    """A model with a fused head, and four sequences of unequal lengths."""
    model = family_model("qwen2")
    if "lora" in kind:
        model = with_lora(model, **LORAS["head"])
    if "checkpointed" in kind:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    attach_fused_head(model)
    g = torch.Generator().manual_seed(4)
    ids = torch.randint(5, 257, (4, 10), generator=g)
    attention = (torch.arange(10) < torch.tensor([[10], [9], [5], [7]])).long()
    labels = ids.masked_fill(attention == 0, -100)
    labels[:, :4] = -100
    kwargs = {"advantages": torch.tensor([1.0, -0.5, 0.8, -1.2])}
    if "mixed" not in kind:
        kwargs["old_logps"] = torch.full((4, 9), -5.0)
    return model, {"input_ids": ids, "attention_mask": attention}, labels, kwargs


def scored(labels: torch.Tensor) -> torch.Tensor:
    return (labels[:, 1:] != -100).sum()


def sharded(model, inner, *, apart: bool, **options):
    """The model as FSDP2 shards it, with the head in its own group or in the root's."""
    options["mesh"] = dist.init_device_mesh("cpu", (WORLD,))
    for part in [*inner.model.layers, *([inner.lm_head] if apart else [])]:
        fully_shard(part, **options)
    return fully_shard(model, **options)


def shard_head_alone(head) -> None:
    """Makes DTensors of a head in no wrapped module, as in tensor parallelism."""
    mesh = dist.init_device_mesh("cpu", (WORLD,))
    for name, full in list(head.named_parameters()):
        owner = head.get_submodule(name.rpartition(".")[0])
        shard = distribute_tensor(full.detach(), mesh, [Shard(0)])
        owner.weight = torch.nn.Parameter(shard, requires_grad=full.requires_grad)


def gradients_of_half(kind: str) -> dict[str, torch.Tensor]:
    """Gradients of a loss over this rank's half of a batch, for each wrapper of the model."""
    model, inputs, labels, kwargs = case(kind)
    inner, wrapper = model.get_base_model() if "lora" in kind else model, model
    if "ddp" in kind:
        wrapper = torch.nn.parallel.DistributedDataParallel(model)
    elif "fsdp2" in kind:
        mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.bfloat16)
        options = {"mp_policy": mixed} if "mixed" in kind else {}  # as accelerate makes it
        wrapper = sharded(model, inner, apart="apart" in kind, **options)
    else:
        shard_head_alone(inner.lm_head)
    half = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    inputs, kwargs = ({k: x[half] for k, x in some.items()} for some in (inputs, kwargs))
    inputs["labels"] = labels[half]
    if "mixed" in kind:
        before = Objective()
        rounded = wrapper(**inputs, fused_head=before).logps
        kwargs["old_logps"] = before.output.logps.detach()
        assert rounded.dtype == torch.bfloat16 and kwargs["old_logps"].dtype == torch.float32
    # The ranks hold unequal numbers of tokens; the denominator is the step's, by the ranks.
    objective = Objective(**kwargs, num_items=scored(labels) / WORLD)
    parts = 2 if "in parts" in kind else 1
    for part in range(parts):
        # As accelerate accumulates: only the last part reduces gradients.
        if "fsdp2" in kind:
            wrapper.set_requires_gradient_sync(part == parts - 1)
        wrapper(**inputs, fused_head=objective)
        (objective.output.loss / parts).backward()
    if "mixed" in kind:
        assert abs(objective.output.metrics["ratio_max"] - 1) < 1e-5
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for name, grad in gradients.items():
        if hasattr(grad, "full_tensor"):
            gradients[name] = grad.full_tensor()
        elif "alone" in kind:
            dist.all_reduce(grad.div_(WORLD))
    if "apart" in kind:
        with torch.no_grad():
            wrapper(**inputs, fused_head=True)
        assert hasattr(inner.get_output_embeddings().weight, "full_tensor"), "still gathered"
    if "fsdp2" in kind:
        detach_fused_head(model)
        assert "logits" in wrapper(**inputs, fused_head=True)
        attach_fused_head(model)
        assert "logps" in wrapper(**inputs, fused_head=True)
    return gradients


KINDS = (
    "ddp, lora, checkpointed", "fsdp2, checkpointed", "fsdp2, head apart",
    "fsdp2, lora", "fsdp2, mixed", "fsdp2, mixed, head apart, in parts",
    "fsdp2, lora, mixed, head apart, in parts", "lora, head alone",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind, ranks):
    model, inputs, labels, kwargs = case(kind)
    objective = Objective(**kwargs, num_items=scored(labels))
    model(**inputs, labels=labels, fused_head=objective).loss.backward()
    assert scored(labels[:2]) != scored(labels[2:])
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert any("lm_head" in name for name in expected)
    for grads in ranks(gradients_of_half, kind):
        assert grads.keys() == expected.keys()
        for name, gradient in expected.items():
            if gradient.norm() > 1e-6:
                tolerance = 0.2 if "mixed" in kind else 2e-5
                assert relative_error(grads[name], gradient) < tolerance, name


def kl_to_its_own_states(kind: str) -> tuple[float, float]:
    """The KL of a model that FSDP2 shards to itself before a step, and that by whole models."""
    model, inputs, labels, _ = case(kind)
    model.lm_head.weight.requires_grad_("frozen" not in kind)
    before, after, mask = copy.deepcopy(model), copy.deepcopy(model), labels[:, 1:] != -100
    wrapper = sharded(model, model, apart="apart" in kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    first = Objective(states=True)
    with torch.no_grad():
        wrapper(**inputs, labels=labels, fused_head=first)
    assert torch.equal(first.reference.head.weight, before.lm_head.weight)
    wrapper(**inputs, labels=labels, fused_head=True).logps.sum().backward()
    optimizer.step()
    config = GRPOLossConfig(beta=0.1, kl_estimator="exact")
    objective = Objective(torch.ones(len(labels)), config=config, reference=first.reference)
    wrapper(**inputs, labels=labels, fused_head=objective).loss.backward()  # which shards it again
    with torch.no_grad():
        parameters = dict(model.named_parameters())
        for name, full in after.named_parameters():
            full.copy_(parameters[name].full_tensor())
        old, new = (
            x(**inputs).logits[:, :-1].double().log_softmax(-1)[mask] for x in (before, after)
        )
    return objective.output.metrics["kl"].item(), (new.exp() * (new - old)).sum(-1).mean().item()


@pytest.mark.parametrize("kind", ("", "head apart", "frozen, head apart"))
def test_states_of_a_sharded_model_are_of_the_model_as_it_was(kind, ranks):
    for kl, expected in ranks(kl_to_its_own_states, kind):
        assert expected > 1e-3 and kl == pytest.approx(expected, rel=1e-3)


class HeadAlone(torch.nn.Module):
    """A head whose loss is taken inside the forward that is wrapped."""

    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(400, 64, generator=g) / 8)

    def forward(self, rank):
        g = torch.Generator().manual_seed(1 + rank)
        hidden, advantages = (torch.randn(x, generator=g).bfloat16() for x in ((50, 64), 50))
        targets = torch.randint(400, (50,), generator=g)
        execution = Execution(chunk_bytes=4 * 400 * 10)  # five chunks
        return fused_grpo_loss(
            hidden, self.weight, targets, advantages, num_items=50, execution=execution
        ).loss


def gradient_of_head() -> tuple[list[tuple[str, int]], torch.Tensor]:
    """Returns the collectives of a call, by name and bytes, and the full gradient."""
    head = HeadAlone()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    wrapper = fully_shard(head, mesh=dist.init_device_mesh("cpu", (WORLD,)), mp_policy=policy)
    with Traffic() as traffic:
        wrapper(dist.get_rank()).backward()
    return traffic.seen, head.weight.grad.full_tensor()


def test_fsdp2_moves_a_head_once_however_many_chunks_there_are(ranks):
    """In bf16 before, dW in float32 after."""
    head = HeadAlone().bfloat16()
    (sum(head(rank) for rank in range(WORLD)) / WORLD).backward()
    V, H = head.weight.shape
    (seen, gradient), other = ranks(gradient_of_head)
    assert seen == [("allgatherbase", 2 * V * H), ("reducescatterbase", 4 * V * H)] == other[0]
    assert torch.equal(gradient, other[1]) and gradient.dtype == torch.float32
    assert relative_error(gradient, head.weight.grad.double()) < 5e-3

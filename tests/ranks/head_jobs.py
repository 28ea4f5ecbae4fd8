"""Jobs of the ranks: gradients of a fused head, and TRL's trainer with one."""

import copy
import random

import torch

from grpo_kernels import GRPOLossConfig, fused_grpo_loss
from grpo_kernels.head.execution import Execution
from grpo_kernels.integrations.transformers import Objective, attach_fused_head
from tests.helpers.model_families import LORAS, family_model, with_lora
from tests.helpers.ranks import WORLD
from tests.ranks.shard_jobs import Traffic


def gradients_of_half(kind: str) -> dict[str, torch.Tensor]:
    """Gradients of a loss over this rank's half of a batch, for each wrapper of the model."""
    import torch.distributed as dist

    rank = dist.get_rank()
    model, inputs, labels, kwargs = case(kind)
    half = slice(2 * rank, 2 * rank + 2)
    inner = model.get_base_model() if "lora" in kind else model
    if kind.startswith("ddp"):
        wrapper = torch.nn.parallel.DistributedDataParallel(model)
    elif "alone" in kind:  # of no wrapped module, as in tensor parallelism
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh, wrapper, head = dist.init_device_mesh("cpu", (WORLD,)), model, inner.lm_head
        for name, full in list(head.named_parameters()):
            shard = distribute_tensor(full.detach(), mesh, [Shard(0)])
            owner = head.get_submodule(name.rpartition(".")[0])
            owner.weight = torch.nn.Parameter(shard, requires_grad=full.requires_grad)
    else:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        options = {"mesh": dist.init_device_mesh("cpu", (WORLD,))}
        if "mixed" in kind:  # as accelerate makes it
            options["mp_policy"] = MixedPrecisionPolicy(
                torch.bfloat16, torch.float32, output_dtype=torch.bfloat16
            )
        for part in [*inner.model.layers, *([inner.lm_head] if "apart" in kind else [])]:
            fully_shard(part, **options)
        wrapper = fully_shard(model, **options)
    inputs, kwargs = ({k: x[half] for k, x in some.items()} for some in (inputs, kwargs))
    inputs["labels"] = labels[half]
    if "mixed" in kind:
        before = Objective()
        rounded = wrapper(**inputs, fused_head=before).logps
        kwargs["old_logps"] = before.output.logps.detach()
        assert rounded.dtype == torch.bfloat16 and kwargs["old_logps"].dtype == torch.float32
    # The ranks hold unequal numbers of tokens; the denominator is the step's, by the ranks.
    objective = Objective(**kwargs, num_items=scored(labels) / WORLD)
    for last in (False, True) if "in parts" in kind else (True,):
        # As accelerate accumulates: only the last part reduces gradients.
        if kind.startswith("fsdp2"):
            wrapper.set_requires_gradient_sync(last)
        wrapper(**inputs, fused_head=objective)
        (objective.output.loss / (2 if "in parts" in kind else 1)).backward()
    if "mixed" in kind:
        assert abs(objective.output.metrics["ratio_max"] - 1) < 1e-5
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            if "alone" in kind and not hasattr(grad, "full_tensor"):
                dist.all_reduce(grad.div_(WORLD))
            gradients[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    if "apart" in kind:
        with torch.no_grad():
            wrapper(**inputs, fused_head=True)
        assert hasattr(inner.get_output_embeddings().weight, "full_tensor"), "still gathered"
    return gradients


def kl_to_its_own_states(kind: str) -> tuple[float, float]:
    """The KL of a model that FSDP2 shards to itself before a step, and that by whole models."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    model, inputs, labels, _ = case(kind)
    model.lm_head.weight.requires_grad_("frozen" not in kind)
    before, after, mask = copy.deepcopy(model), copy.deepcopy(model), labels[:, 1:] != -100
    options = {"mesh": dist.init_device_mesh("cpu", (WORLD,))}
    for part in [*model.model.layers, *([model.lm_head] if "apart" in kind else [])]:
        fully_shard(part, **options)
    wrapper = fully_shard(model, **options)
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
        sharded = dict(model.named_parameters())
        for name, full in after.named_parameters():
            full.copy_(sharded[name].full_tensor())
        old, new = (
            x(**inputs).logits[:, :-1].double().log_softmax(-1)[mask] for x in (before, after)
        )
    return objective.output.metrics["kl"].item(), (new.exp() * (new - old)).sum(-1).mean().item()


class HeadAlone(torch.nn.Module):
    """A head whose loss is taken inside the forward that is wrapped."""

    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(400, 64, generator=g) / 8)

    def forward(self, hidden, targets, advantages):
        execution = Execution(chunk_bytes=4 * 400 * 10)
        return fused_grpo_loss(
            hidden, self.weight, targets, advantages, num_items=50, execution=execution
        ).loss


def tokens_of(rank: int, dtype: torch.dtype):
    g = torch.Generator().manual_seed(1 + rank)
    hidden, advantages = (torch.randn(x, generator=g).to(dtype) for x in ((50, 64), 50))
    return hidden, torch.randint(400, (50,), generator=g), advantages


def gradient_of_head(kind: str, dtype: torch.dtype) -> tuple[list[tuple[str, int]], torch.Tensor]:
    """Returns collectives of a call in five chunks, by name and bytes, and the full gradient."""
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    head, tokens = HeadAlone(), tokens_of(dist.get_rank(), dtype)
    if kind == "ddp":
        wrapper = torch.nn.parallel.DistributedDataParallel(head)
    else:
        mesh = dist.init_device_mesh("cpu", (WORLD,))
        policy = MixedPrecisionPolicy(dtype, torch.float32)
        wrapper = fully_shard(head, mesh=mesh, mp_policy=policy)
    with Traffic() as traffic:
        wrapper(*tokens).backward()
    seen = [(name, max(x.nbytes for x in tensors)) for name, tensors in traffic.seen]
    grad = head.weight.grad
    return seen, grad.full_tensor() if kind == "fsdp2" else grad


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


def train(model: str, output: str, options: dict) -> tuple[list, dict[str, torch.Tensor]]:
    """The rows that TRL's trainer logs, and its weights, on any number of ranks.

    Completions depend on their prompt alone, so that any number sees the same.
    """
    from grpo_kernels.integrations.trl import FusedGRPOTrainer
    from tests.helpers.tiny_models import make_tokenizer
    from tests.helpers.trl_runs import arguments_of, noise, prompts

    class SameForAnyRanks(FusedGRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *_):
            seen: dict[str, int] = {}
            completions = []
            for ids in prompt_ids:
                seen[str(ids)] = seen.get(str(ids), 0) + 1
                draw = random.Random(f"{ids} {seen[str(ids)]}")
                completions.append([draw.randrange(33, 90) for _ in range(draw.randrange(1, 7))])
            return completions, None

    trainer = SameForAnyRanks(
        model, reward_funcs=noise, args=arguments_of(output, **options), train_dataset=prompts(),
        processing_class=make_tokenizer(),
    )  # fmt: skip
    trainer.train()
    weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    return trainer.state.log_history, weights

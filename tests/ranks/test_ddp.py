"""Two processes under DistributedDataParallel: the gradient of the head is synchronised, too."""

import torch
from torch import nn

from grpo_kernels import fused_grpo_loss
from tests.helpers.batches import config, make_batch, relative_error
from tests.helpers.ranks import WORLD


class Policy(nn.Module):
    """A body and a head whose loss is taken inside the forward that DDP wraps."""

    def __init__(self, batch):
        super().__init__()
        self.body = nn.Linear(48, 48)
        self.head = nn.Parameter(batch.weight.clone())

    def forward(self, batch, part, num_items):
        hidden = self.body(batch.hidden[part].nan_to_num())
        return fused_grpo_loss(
            hidden, self.head, batch.targets[part], batch.advantages[part], batch.mask[part],
            old_logps=batch.old_logps[part], config=config(loss_type="dapo"), num_items=num_items,
        ).loss  # fmt: skip


def policy_and_batch():
    torch.manual_seed(0)
    batch = make_batch(B=4)
    return Policy(batch), batch


def gradients_of_half():
    """The job of a rank."""
    rank = torch.distributed.get_rank()
    policy, batch = policy_and_batch()
    wrapped = nn.parallel.DistributedDataParallel(policy)
    # The ranks hold unequal numbers of tokens; the denominator is the step's, over the ranks.
    wrapped(batch, slice(2 * rank, 2 * rank + 2), batch.mask.sum() / WORLD).backward()
    return [p.grad for p in policy.parameters()]


def test_ranks_agree_with_one_process(ranks):
    both = ranks("tests.ranks.test_ddp:gradients_of_half")
    policy, batch = policy_and_batch()
    policy(batch, slice(None), batch.mask.sum()).backward()
    assert batch.mask[:2].sum() != batch.mask[2:].sum()
    for (name, p), *grads in zip(policy.named_parameters(), *both, strict=True):
        assert torch.equal(*grads), name
        assert p.grad.norm() > 0 and relative_error(grads[0], p.grad) < 1e-5, name

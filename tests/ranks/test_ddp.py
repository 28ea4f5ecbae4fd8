"""Two processes under DistributedDataParallel: the gradient of the head is synchronised, too."""

import tempfile
from pathlib import Path

import torch
from torch import nn

from grpo_kernels import fused_grpo_loss
from tests.support.batches import config, make_batch, relative_error

WORLD = 2


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


def rank_main(rank: int, folder: str) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD
    )
    policy, batch = policy_and_batch()
    wrapped = nn.parallel.DistributedDataParallel(policy)
    part = slice(2 * rank, 2 * rank + 2)
    # The ranks hold unequal numbers of tokens; the denominator is the step's, over the ranks.
    num_items = batch.mask.sum() / WORLD
    wrapped(batch, part, num_items).backward()
    torch.save([p.grad for p in policy.parameters()], Path(folder) / f"{rank}.pt")
    # Before the group that it uses: the other way round its end may wait for a thread that waits
    # for Python.
    del wrapped
    dist.destroy_process_group()


def test_ranks_agree_with_one_process():
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, args=(folder,), nprocs=WORLD)
        ranks = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(WORLD)]
    policy, batch = policy_and_batch()
    policy(batch, slice(None), batch.mask.sum()).backward()
    assert batch.mask[:2].sum() != batch.mask[2:].sum()
    for (name, p), *grads in zip(policy.named_parameters(), *ranks, strict=True):
        assert torch.equal(*grads), name
        assert p.grad.norm() > 0 and relative_error(grads[0], p.grad) < 1e-5, name

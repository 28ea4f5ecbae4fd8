"""Jobs that the ranks of `test_others.py` run."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from tests.frameworks.test_others import V, file_of, run_example, run_file


class Decoder(torch.nn.Module):
    """Without its head, as in torchtitan's trainer where a loss has it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = torch.nn.Linear(32, 32), torch.nn.RMSNorm(32)
        self.lm_head = torch.nn.Linear(32, V, bias=False)

    def forward(self, x):
        return self.norm(self.layer(x))


def losses_of_torchtitan():
    """Returns torchtitan's DAPO loss in its wrapper, and the example's."""
    from torchtitan.components.loss import ChunkedLossWrapper

    path = file_of("torchtitan", "experiments/rl/losses/dapo.py")
    loss = run_file(path, "dapo_of_torchtitan").DAPOLoss.Config()
    FusedDAPOLoss = run_example("torchtitan_loss")["FusedDAPOLoss"]
    assert issubclass(FusedDAPOLoss, ChunkedLossWrapper)
    return (
        ChunkedLossWrapper(ChunkedLossWrapper.Config(num_chunks=2, loss_fn=loss)),
        FusedDAPOLoss(FusedDAPOLoss.Config()),
    )


def batch_of_torchtitan(rank):
    """Hidden states or what a decoder takes, and the arguments of a loss."""
    g = torch.Generator().manual_seed(1 + rank)
    ids = torch.randint(V, (4, 8), generator=g)
    mask = torch.rand(4, 8, generator=g) > 0.3
    logprobs = -5 + 0.3 * torch.randn(4, 8, generator=g)
    logprobs[0, :2] = float("nan")
    advantages = torch.randn(4, 1, generator=g).expand(4, 8) * mask
    options = {"generator_logprobs": logprobs, "advantages": advantages, "loss_mask": mask}
    return torch.randn(4, 8, 32, generator=g), ids, options


def torchtitan_under_fsdp2():
    """Values and whole gradients of either loss, of ranks with tokens of their own."""
    results = []
    x, ids, options = batch_of_torchtitan(dist.get_rank())
    for loss in losses_of_torchtitan():
        model, mesh = Decoder(), dist.init_device_mesh("cpu", (dist.get_world_size(),))
        for unit in (model.layer, [model.norm, model.lm_head], model):
            wrapped = fully_shard(unit, mesh=mesh)
            for module in wrapped if isinstance(unit, list) else [wrapped]:
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other
        loss.set_lm_head(model.lm_head)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            value, _ = loss(model(x), ids, 23.0, **options)
            value.backward()
            with torch.no_grad():  # leaves no weights behind that the update would miss
                loss(model(x), ids, 23.0, **options)
            optimizer.step()
        results.append([value.detach(), *(p.grad.full_tensor() for p in model.parameters())])
    return results

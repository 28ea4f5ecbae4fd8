"""What the ranks of `test_verl.py` run."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.models.transformers import monkey_patch
from verl.utils import fsdp_utils
from verl.utils.experimental.torch_functional import FusedLinearForPPO

V, TOKENS = 301, (7, 12)
SIZES = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip


def model_of(tied=False, dtype=torch.float32):
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=V, tie_word_embeddings=tied, initializer_range=0.3, **SIZES)
    return Qwen2ForCausalLM(config).to(dtype)


def sharded(model, strategy, mesh, dtype):
    """The model as verl's engine wraps it."""
    if strategy == "fsdp2":
        policy = fsdp_utils.MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=True)
        options = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": True}
        fsdp_utils.apply_fsdp2(model, options, {})
        return model
    return FullyShardedDataParallel(
        model, auto_wrap_policy=fsdp_utils.get_fsdp_wrap_policy(model, {}), device_mesh=mesh,
        device_id=torch.device("cpu"), mixed_precision=MixedPrecision(dtype, torch.float32),
        use_orig_params=True,
    )  # fmt: skip


def under_fsdp(strategy, backend, tied, dtype=torch.float32, shape=(2,)):
    """Log-probs and entropies of this rank's tokens, and the gradients that all have then.

    `strategy` None is every rank with the whole model, and the mean of their gradients.
    """
    rank, world, model = dist.get_rank(), dist.get_world_size(), model_of(tied)
    own = Qwen2ForCausalLM.forward
    try:
        monkey_patch.patch_forward_with_backends(model, True, backend)
        if strategy is None:
            wrapped, whole = model.to(dtype), nullcontext()
        else:
            names = ("ddp", "fsdp")[-len(shape) :]
            mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
            wrapped, whole = sharded(model, strategy, mesh, dtype), nullcontext()
        ids = torch.randint(V, (1, TOKENS[rank % 2]), generator=torch.Generator().manual_seed(rank))
        out = wrapped(input_ids=ids, use_cache=False, return_dict=True, temperature=0.7)
    finally:
        Qwen2ForCausalLM.forward = own
    weights = torch.randn(2, *ids.shape, generator=torch.Generator().manual_seed(9 + rank))
    ((out.log_probs * weights[0]).sum() + (out.entropy.float() * weights[1]).sum()).backward()
    if strategy == "fsdp":
        whole = FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True)
    gradients = {}
    with whole:
        for name, parameter in wrapped.named_parameters():
            grad = parameter.grad
            if isinstance(grad, DTensor):
                grad = grad.full_tensor()
            grad = grad.double()
            if strategy is None:
                dist.all_reduce(grad)
                grad /= world
            gradients[name.replace("_fsdp_wrapped_module.", "")] = grad
    return out.log_probs.detach(), out.entropy.detach(), gradients


def gathered(requires_grad):
    """A weight as verl's forward of Qwen3-VL hands it on, and how far a gradient of it is off."""
    mesh = dist.init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    weight = distribute_tensor(torch.randn(V, 8), mesh, (Shard(0),)).requires_grad_(requires_grad)
    whole, rank = weight.full_tensor(), dist.get_rank()
    head = FusedLinearForPPO(impl_backend="grpo_kernels")
    logps, _ = head(torch.ones(1, 5, 8), whole.detach(), torch.full((1, 5), 7), 1.0)
    if requires_grad:
        (whole.sum() * (rank + 1)).backward()
        assert weight.grad is not None
        assert (weight.grad.to_local() == rank + 1).all()  # the mean is 1.5
    head(torch.ones(1, 5, 8), whole, torch.full((1, 5), 7), 1.0)
    return logps

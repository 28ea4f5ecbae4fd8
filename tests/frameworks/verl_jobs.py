"""Jobs that the ranks of `test_verl.py` run."""

from contextlib import nullcontext
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.tensor import DTensor
from transformers import Qwen2ForCausalLM
from verl.models.transformers import monkey_patch
from verl.utils import fsdp_utils

from grpo_kernels.integrations.verl import _check_engine
from tests.helpers.model_families import family_model
from tests.helpers.tiny_models import V

TOKENS = 7, 12


def model_of(tied=False):
    return family_model("qwen2", tie_word_embeddings=tied)


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


def under_fsdp(strategy, backend, kind, dtype=torch.float32, shape=(2,)):
    """Log-probs and entropies of this rank's tokens, and the gradients that all have then.

    Of the second of two updates by two micro-batches each, of which FSDP2 reduces the last alone,
    as verl's engine has it. `strategy` None is every rank with the whole model, and the mean of
    their gradients.
    """
    rank, world, full_params = dist.get_rank(), dist.get_world_size(), nullcontext()
    model = model_of(kind == "tied")
    patched, original = type(model), type(model).forward
    monkey_patch.patch_forward_with_backends(model, True, backend)
    try:
        if strategy is not None:
            mesh = dist.init_device_mesh(
                "cpu", shape, mesh_dim_names=("ddp", "fsdp")[-len(shape) :]
            )
            model = sharded(model, strategy, mesh, dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(2):
            optimizer.zero_grad()
            for part in range(2):
                if strategy == "fsdp2":
                    model.set_requires_gradient_sync(part == 1)
                g = torch.Generator().manual_seed(100 * step + 10 * part + rank)
                ids = torch.randint(V, (1, TOKENS[rank] + part), generator=g)
                weights = torch.randn(2, *ids.shape, generator=g)
                kwargs = {"input_ids": ids, "use_cache": False, "temperature": 0.7}
                out = model(**kwargs, return_dict=True)
                loss = (out.log_probs * weights[0]).sum() + (out.entropy.float() * weights[1]).sum()
                (loss / 10).backward()
            if strategy is None:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= world
            if step == 0:
                if strategy == "fsdp2":  # leaves no weights behind that the update would miss
                    with torch.no_grad():
                        model(**kwargs, return_dict=True)
                optimizer.step()
    finally:
        patched.forward = original
    if strategy == "fsdp":
        full_params = FullyShardedDataParallel.summon_full_params(model, with_grads=True)
    with full_params:
        gradients = {
            name.replace("_fsdp_wrapped_module.", ""): whole_gradient(parameter).double()
            for name, parameter in model.named_parameters()
        }
    return out.log_probs.detach(), out.entropy.detach(), gradients


def whole_gradient(parameter):
    grad = parameter.grad
    return grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()


def offloaded(tied):
    """The check of a model whose activations are to be offloaded."""
    model, original = model_of(tied), Qwen2ForCausalLM.forward
    try:
        monkey_patch.patch_forward_with_backends(model, True, "grpo_kernels")
    finally:
        Qwen2ForCausalLM.forward = original
    sharded(model, "fsdp2", dist.init_device_mesh("cpu", (2,)), torch.float32)
    for on in (False, True):
        _check_engine(model, SimpleNamespace(enable_activation_offload=on))

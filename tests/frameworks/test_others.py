"""Examples for frameworks without a place for plug-ins, run against these frameworks' own files.

What they import besides, and what no CPU has, is a stand-in without contents.
"""

import importlib.util
import inspect
import runpy
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import pytest
import torch

from tests.helpers.batches import relative_error
from tests.helpers.model_families import family_model
from tests.helpers.ranks import ROOT, Ranks
from tests.helpers.tiny_models import V

T = 7
FRAMEWORKS = ("openrlhf", "skyrl", "torchtitan")


def run_example(name):
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name=name)


@pytest.fixture
def modules(monkeypatch):
    """Puts stand-ins in the place of modules, until the test ends."""

    def put(*names):
        for name in names:
            stand_in = MagicMock()
            stand_in.__spec__, stand_in.__path__ = None, []
            monkeypatch.setitem(sys.modules, name, stand_in)

    before = set(sys.modules)
    yield put
    for name in set(sys.modules) - before:
        if name.split(".")[0] in FRAMEWORKS:
            del sys.modules[name]


def file_of(package, path):
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.skip(f"`make test-with FRAMEWORK=others` has {package}")
    return Path(spec.submodule_search_locations[0]) / path


def run_file(path, name):
    """A module of a file, without those of the packages around it."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def assert_close(results):
    """Compares values and gradients: theirs and ours."""
    for theirs, ours in zip(*results, strict=True):
        assert relative_error(ours, theirs) < 1e-5


def test_openrlhf(modules):
    """Log-probs, entropies and gradients of its actor."""
    path = file_of("openrlhf", "models/actor.py")
    models = [family_model("qwen2"), family_model("qwen2")]  # transformers looks for deepspeed
    modules(
        "flash_attn", "flash_attn.bert_padding", "flash_attn.utils", "flash_attn.utils.distributed"
    )
    modules("deepspeed", "openrlhf", "openrlhf.trainer", "openrlhf.trainer.ray")
    for name in ("openrlhf.models.ring_attn_utils", "openrlhf.trainer.ray.ppo_actor"):
        sys.modules[name] = ModuleType(name)
    for name in ("gather_and_pad_tensor", "unpad_and_slice_tensor"):
        setattr(sys.modules["openrlhf.models.ring_attn_utils"], name, None)
    ppo_actor = sys.modules["openrlhf.trainer.ray.ppo_actor"]
    sys.modules["openrlhf.trainer.ray"].ppo_actor = ppo_actor
    package = sys.modules["openrlhf.models"] = ModuleType("openrlhf.models")
    package.__path__ = [str(path.parent)]
    assert run_file(path.parent / "utils.py", "openrlhf.models.utils").compute_entropy
    package.Actor = Actor = run_file(path, "openrlhf.models.actor").Actor
    run_example("openrlhf_actor")
    assert "actor = Actor(" in (path.parents[1] / "trainer/ray/ppo_actor.py").read_text()
    assert issubclass(ppo_actor.Actor, Actor) and ppo_actor.Actor is not Actor

    g = torch.Generator().manual_seed(1)
    ids = torch.randint(V, (4, 5 + T), generator=g)
    mask = torch.arange(T) < torch.tensor([7, 3, 5, 1])[:, None]
    attention = torch.cat([torch.ones(4, 5), mask], 1).long()
    attention[2, :2] = 0
    weights = torch.randn(2, 4, T, generator=g)
    results = []
    for kind, model in zip((Actor, ppo_actor.Actor), models, strict=True):
        kind.packing_samples = kind.is_vlm = False  # not set if constructed with a model
        actor = kind(model, temperature=0.7)
        kwargs = {"attention_mask": attention, "return_output": True, "return_entropy": True}
        logps, out = actor(ids, mask, **kwargs)
        entropy = out.entropy[:, -T:] * mask
        ((logps * weights[0]).sum() + (entropy * weights[1]).sum()).backward()
        grads = torch.cat([p.grad.flatten() for p in actor.parameters()])
        results.append((logps.detach(), entropy.detach(), grads))
    assert_close(results)


def test_skyrl(modules, one_rank):
    """SkyRL's function and ours agree on one rank."""
    path = file_of("skyrl", "backends/skyrl_train/distributed/megatron/model_utils.py")
    above = "skyrl.backends.skyrl_train.distributed.megatron"
    modules("megatron", "megatron.core", "megatron.core.parallel_state")
    parts = above.split(".")
    modules(*(".".join(parts[: i + 1]) for i in range(len(parts))))
    module = run_file(path, f"{above}.model_utils")
    sys.modules[above].model_utils = module
    original = module._fused_lm_head_logprob_apply
    run_example("skyrl_logprobs")
    fused = module._fused_lm_head_logprob_apply
    assert fused is not original
    names = list(inspect.signature(original).parameters)
    assert [x.replace("vocab_", "").replace("_index", "") for x in names] == list(
        inspect.signature(fused).parameters
    )
    results = []
    for call in (original, fused):
        g = torch.Generator().manual_seed(1)
        hidden = torch.randn(2, 9, 32, generator=g, requires_grad=True)
        weight = torch.randn(V, 32, generator=g, requires_grad=True)
        target = torch.randint(V, (2, 9), generator=g)
        logps = call("torch", hidden, weight, target, 0, V, 4, one_rank, False)
        (logps * torch.randn(2, 9, generator=g)).sum().backward()
        results.append((logps.detach(), hidden.grad, weight.grad))
    assert not fused("torch", hidden, weight, target, 0, V, 4, one_rank, True).requires_grad
    assert_close(results)


def test_torchtitan(modules):
    pytest.importorskip("spmd_types")
    from tests.frameworks.others_jobs import batch_of_torchtitan, losses_of_torchtitan

    results = []
    states, ids, options = batch_of_torchtitan(rank=0)
    for loss in losses_of_torchtitan():
        torch.manual_seed(0)
        head = torch.nn.Linear(32, V, bias=False)
        hidden = states.clone().requires_grad_()
        loss.set_lm_head(head)
        value, metrics = loss(hidden, ids, 23.0, **options)
        value.backward()
        results.append((value.detach(), metrics["loss/mean"], hidden.grad, head.weight.grad))
    assert_close(results)


def test_torchtitan_under_fsdp2(tmp_path):
    """Gradients are sums over the ranks, as its trainer has FSDP divide by 1."""
    pytest.importorskip("spmd_types")
    file_of("torchtitan", "experiments/rl/losses/dapo.py")
    ranks = Ranks(tmp_path)
    for results in ranks("tests.frameworks.others_jobs:torchtitan_under_fsdp2"):
        assert_close(results)
    ranks.close()

"""The lines for frameworks without a place for plug-ins, run against these frameworks' own files.

What they import besides, and what no CPU has, is a stand-in without contents.
"""

import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.helpers.batches import relative_error
from tests.helpers.ranks import Ranks

PAGE = (Path(__file__).parents[2] / "docs/integrations.md").read_text()
V, T = 301, 7


def lines_for(name):
    """The block of the page that begins with the framework's name."""
    (code,) = re.findall(rf"```py\n# {name}\n(.*?)```", PAGE, re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 32
    return code


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
        if name.split(".")[0] in ("openrlhf", "skyrl", "torchtitan"):
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


def tiny_model():
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3,
        )
    )  # fmt: skip


def test_openrlhf(modules):
    """Log-probs, entropies and gradients of its actor."""
    path = file_of("openrlhf", "models/actor.py")
    modules(
        "flash_attn", "flash_attn.bert_padding", "flash_attn.utils", "flash_attn.utils.distributed"
    )
    modules("deepspeed", "openrlhf", "openrlhf.trainer", "openrlhf.trainer.ray")
    for name in ("openrlhf.models.ring_attn_utils", "openrlhf.trainer.ray.ppo_actor"):
        sys.modules[name] = ModuleType(name)
    for name in ("gather_and_pad_tensor", "unpad_and_slice_tensor"):
        setattr(sys.modules["openrlhf.models.ring_attn_utils"], name, None)
    ppo_actor = sys.modules["openrlhf.trainer.ray"].ppo_actor = sys.modules[
        "openrlhf.trainer.ray.ppo_actor"
    ]
    package = sys.modules["openrlhf.models"] = ModuleType("openrlhf.models")
    package.__path__ = [str(path.parent)]
    utils = run_file(path.parent / "utils.py", "openrlhf.models.utils")
    assert utils.compute_entropy
    package.Actor = Actor = run_file(path, "openrlhf.models.actor").Actor
    exec(lines_for("openrlhf"), {})
    assert "actor = Actor(" in (path.parents[1] / "trainer/ray/ppo_actor.py").read_text()
    assert issubclass(ppo_actor.Actor, Actor) and ppo_actor.Actor is not Actor

    g = torch.Generator().manual_seed(1)
    ids = torch.randint(V, (4, 5 + T), generator=g)
    mask = torch.arange(T) < torch.tensor([7, 3, 5, 1])[:, None]
    attention = torch.cat([torch.ones(4, 5), mask], 1).long()
    attention[2, :2] = 0
    weights = torch.randn(2, 4, T, generator=g)
    results = []
    for kind in (Actor, ppo_actor.Actor):
        kind.packing_samples = kind.is_vlm = False  # not set where it is given a model
        actor = kind(tiny_model(), temperature=0.7)
        kwargs = {"attention_mask": attention, "return_output": True, "return_entropy": True}
        logps, out = actor(ids, mask, **kwargs)
        entropy = out.entropy[:, -T:] * mask
        ((logps * weights[0]).sum() + (entropy * weights[1]).sum()).backward()
        grads = torch.cat([p.grad.flatten() for p in actor.parameters()])
        results.append((logps, entropy, grads))
    for theirs, ours in zip(*results, strict=True):
        assert relative_error(ours, theirs) < 1e-5


def test_skyrl(modules, tmp_path):
    """SkyRL's function and ours agree on one rank."""
    path = file_of("skyrl", "backends/skyrl_train/distributed/megatron/model_utils.py")
    above = "skyrl.backends.skyrl_train.distributed.megatron"
    modules("megatron", "megatron.core", "megatron.core.parallel_state")
    parts = above.split(".")
    for i in range(1, len(parts) + 1):
        modules(".".join(parts[:i]))
    module = run_file(path, f"{above}.model_utils")
    sys.modules[above].model_utils = module
    original = module._fused_lm_head_logprob_apply
    exec(lines_for("skyrl"), {})
    fused = module._fused_lm_head_logprob_apply
    assert fused is not original
    names = list(inspect.signature(original).parameters)
    assert [x.replace("vocab_", "").replace("_index", "") for x in names] == list(
        inspect.signature(fused).parameters
    )
    results = []
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    group = torch.distributed.group.WORLD
    try:
        for call in (original, fused):
            g = torch.Generator().manual_seed(1)
            hidden = torch.randn(2, 9, 32, generator=g, requires_grad=True)
            weight = torch.randn(V, 32, generator=g, requires_grad=True)
            target = torch.randint(V, (2, 9), generator=g)
            logps = call("torch", hidden, weight, target, 0, V, 4, group, False)
            (logps * torch.randn(2, 9, generator=g)).sum().backward()
            results.append((logps.detach(), hidden.grad, weight.grad))
        assert not fused("torch", hidden, weight, target, 0, V, 4, group, True).requires_grad
    finally:
        torch.distributed.destroy_process_group()
    for theirs, ours in zip(*results, strict=True):
        assert relative_error(ours, theirs) < 1e-5


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
    for theirs, ours in zip(*results, strict=True):
        assert relative_error(ours, theirs) < 1e-5


def test_torchtitan_under_fsdp2(tmp_path):
    """Gradients are sums over the ranks, as its trainer has FSDP divide by 1."""
    pytest.importorskip("spmd_types")
    file_of("torchtitan", "experiments/rl/losses/dapo.py")
    ranks = Ranks(tmp_path)
    every = ranks("tests.frameworks.others_jobs:torchtitan_under_fsdp2")
    ranks.close()
    for results in every:
        for theirs, ours in zip(*results, strict=True):
            assert relative_error(ours, theirs) < 1e-5

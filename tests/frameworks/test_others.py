"""Frameworks whose releases may break this library: theirs and ours agree, at their heads.

Each test needs its own framework, which `make test-with FRAMEWORK=` installs: axolotl, ms-swift,
kernels, others. Of the last, files are run; imports that no CPU has are stand-ins without contents.
"""

import importlib.util
import inspect
import json
import os
import re
import runpy
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from tests.helpers.batches import relative_error
from tests.helpers.model_families import family_model
from tests.helpers.ranks import ROOT
from tests.helpers.tiny_models import V, make_tokenizer

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("real_memory")]
T = 7
EXAMPLES = ROOT / "examples"


def needs(package):
    return pytest.importorskip(package, reason="`make test-with FRAMEWORK=` has it")


def assert_close(theirs, ours):
    """Compares values and gradients."""
    for x, y in zip(theirs, ours, strict=True):
        assert relative_error(y, x) < 1e-5


# axolotl: the page's trainer, built by its own builder from its config


def trained_by_axolotl(folder, **config):
    """The class of the trainer; losses, log and weights of its run, of LoRA."""
    os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"
    from axolotl.core.builders import HFRLTrainerBuilder
    from axolotl.utils.config import validate_config
    from axolotl.utils.dict import DictDefault
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from tests.helpers import trl_runs

    stored = trl_runs.folder_of("qwen2")
    reward = "tests.helpers.trl_runs.noise"
    trl = {
        "num_generations": 4, "max_completion_length": 6, "temperature": 0.9, "loss_type": "grpo",
        "num_iterations": 2, "beta": 0.0, "entropy_coef": 0.05, "reward_funcs": [reward],
    }  # fmt: skip
    config = {
        "rl": "grpo", "learning_rate": 0.05, "optimizer": "sgd", "lr_scheduler": "constant",
        "micro_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": trl_runs.STEPS,
        "logging_steps": 1, "bf16": False, "fp16": False, "datasets": [{"path": "none"}],
        "base_model": stored, "output_dir": str(folder), "trl": trl, **config,
    }  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(stored, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    config = validate_config(DictDefault(config))
    builder = HFRLTrainerBuilder(config, model, make_tokenizer(), None)
    builder.train_dataset = trl_runs.prompts()
    trainer = builder.build(trl_runs.STEPS)
    trainer.train()
    log = trainer.state.log_history
    weights = {k: p.detach().clone() for k, p in trainer.model.named_parameters()}
    return type(trainer), ([row["loss"] for row in log if "loss" in row], log, weights)


def test_axolotl(tmp_path, monkeypatch):
    needs("axolotl")
    import yaml
    from trl.trainer import grpo_trainer

    from tests.helpers.trl_runs import assert_same_run

    page = (ROOT / "docs/integrations.md").read_text().split("## axolotl\n")[1]
    ((name, code),) = re.findall(r'```python title="(\w+)\.py"\n(.*?)```', page, re.S)
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    lines = yaml.safe_load(re.search(r"```yaml\n(.*?)```", page, re.S)[1])
    kind, plain = trained_by_axolotl(tmp_path / "plain")
    assert kind.__name__ == "AxolotlGRPOTrainer"
    # What TRL's own method calls on logits is not called any more.
    monkeypatch.delattr(grpo_trainer, "selective_log_softmax")
    kind, fused = trained_by_axolotl(tmp_path / "fused", **lines)
    sys.modules.pop(name)
    assert f"{kind.__module__}.{kind.__name__}" == lines["trainer_cls"]
    assert_same_run(fused, plain)


# ms-swift: the plug-in file in its own trainer, whose loss is Liger's


def swift_trainer():
    """ms-swift's trainer with what its loss looks at, made as its constructor makes it."""
    from swift.rlhf_trainers.grpo_trainer import GRPOTrainer

    trainer = object.__new__(GRPOTrainer)
    vars(trainer).update(
        args=SimpleNamespace(use_liger_kernel=True, report_to=[]), beta=0.04, loss_type="dapo",
        temperature=0.7, epsilon_low=0.2, epsilon_high=0.28, max_completion_length=T,
        importance_sampling_level="token", tau_pos=1.0, tau_neg=1.05, advantage_estimator="grpo",
        template=SimpleNamespace(padding_free=False, sequence_parallel_size=1),
        control=SimpleNamespace(should_evaluate=False), _metrics={"train": defaultdict(list)},
        accelerator=SimpleNamespace(gather_for_metrics=lambda x: x, is_main_process=False),
        is_multimodal=False, model_kwarg_keys=(),
    )  # fmt: skip
    trainer._prepare_liger_loss()
    trainer.model = family_model("qwen2")
    return trainer


def swift_step(trainer):
    """Loss, gradients and metrics of ms-swift's step."""
    from swift.rl_core.data import GRPOBatch

    g = torch.Generator().manual_seed(1)
    ids = torch.randint(V, (4, 5 + T), generator=g)
    mask = torch.arange(T) < torch.tensor([7, 3, 5, 1])[:, None]
    old, ref = -5 + 0.3 * torch.randn(2, 4, T, generator=g)
    batch = GRPOBatch(
        completion_mask=mask, truncated_mask=torch.zeros(4, dtype=torch.bool),
        seq_lengths=torch.full((4,), 5 + T), old_per_token_logps=old,
        ref_per_token_logps=ref,
        advantages=torch.randn(4, 1, generator=g).expand(4, T), logits_to_keep=T,
    )  # fmt: skip
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    loss = trainer.compute_liger_loss(trainer.model, inputs, batch)
    loss.backward()
    grads = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    metrics = {name: values[0] for name, values in trainer._metrics["train"].items()}
    return loss.detach(), grads, metrics


def test_ms_swift():
    needs("swift")
    from liger_kernel import chunked_loss
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss as Liger
    from swift.utils import import_external_file

    from grpo_kernels.integrations.liger import FusedLinearGRPOLoss

    module = import_external_file(str(EXAMPLES / "ms_swift_plugin.py"))
    try:
        ours = swift_trainer()
        assert isinstance(ours.liger_grpo_loss, FusedLinearGRPOLoss)
        theirs = swift_trainer()
    finally:
        module.patch.undo()
        del sys.modules[module.__name__]
    assert chunked_loss.LigerFusedLinearGRPOLoss is Liger
    theirs.liger_grpo_loss = Liger(
        beta=0.04, compiled=False, epsilon_low=0.2, epsilon_high=0.28, temperature=0.7,
        loss_type="dapo", max_completion_length=T,
    )  # fmt: skip
    (*values, metrics), (*expected, their_metrics) = swift_step(ours), swift_step(theirs)
    assert_close(expected, values)
    assert metrics == pytest.approx(their_metrics, rel=1e-5) and "kl" in metrics


# kernels: the folder of `packaging/kernel_package.py`, loaded as Hugging Face's package loads it

LOADED = """
import re, sys
from pathlib import Path
import kernels, torch
from kernels._rust import Build, Digest, Metadata
sys.modules["grpo_kernels"] = None  # an installed one does not help
folder = Path(sys.argv[1])
Build.open(folder)  # tells on stderr of an old edition
for variant in (folder / "build").iterdir():
    digest = Metadata.read_from_file(variant / "metadata.json").digest
    digest.validate(Digest.hash_variant(digest.algorithm, variant))
kernel = kernels.get_local_kernel(folder)
assert kernel.__file__ == str(folder / "build/torch-cpu/__init__.py")
h, w = torch.randn(2, 3, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
ids, ones = torch.zeros(2, 3, dtype=torch.long), torch.ones(2)
call = lambda h, w: kernel.fused_grpo_loss(h, kernel.LMHead(w), ids, ones).loss
call(h, w).backward()
compiled = torch.compile(call, backend="aot_eager")
assert w.grad.norm() > 0 and compiled(h, w) == call(h, w) and kernel.topk_kl
kernels.get_kernel = lambda repo_id, version: {"a/b": kernel}[repo_id]
card = (folder / "CARD.md").read_text().replace("{{ repo_id }}", "a/b")
exec(re.search(r"```python\\n(.*?)```", card.replace("{{ version }}", "0"), re.S)[1])
assert abs(out.loss.item()) < 10 and weight.grad.norm() > 0
"""


def test_kernels(tmp_path):
    folder = tmp_path / "kernel"
    subprocess.run([sys.executable, ROOT / "packaging/kernel_package.py", folder], check=True)
    for backend in ("cpu", "cuda", "rocm"):
        variant = folder / f"build/torch-{backend}"
        metadata = json.loads((variant / "metadata.json").read_text())
        assert metadata["backend"] == {"type": backend} and backend in metadata["id"]
        for path in variant.rglob("*.py"):
            # Under another name nothing else would be found.
            assert not re.search(r"^\s*(from|import) grpo_kernels", path.read_text(), re.M), path
    needs("kernels")
    done = subprocess.run(
        [sys.executable, "-c", LOADED, folder], text=True, capture_output=True, cwd="/",
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0 and "build.toml" not in done.stderr, done.stderr


# others: examples for frameworks without a place for plug-ins, run against the frameworks' files


def run_example(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name=name)


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


@pytest.fixture
def stand_ins(monkeypatch):
    """Puts stand-ins in the place of modules, until the test ends."""

    def put(*names):
        for name in names:
            monkeypatch.setitem(sys.modules, name, MagicMock(__spec__=None, __path__=[]))

    before = set(sys.modules)
    yield put
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("openrlhf", "skyrl"):
            del sys.modules[name]


def test_openrlhf(stand_ins):
    """Log-probs, entropies and gradients of its actor."""
    path = file_of("openrlhf", "models/actor.py")
    models = [family_model("qwen2"), family_model("qwen2")]  # transformers looks for deepspeed
    stand_ins(
        "flash_attn", "flash_attn.bert_padding", "flash_attn.utils", "flash_attn.utils.distributed",
        "deepspeed", "openrlhf", "openrlhf.trainer", "openrlhf.trainer.ray",
    )  # fmt: skip
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
    assert_close(*results)


def test_skyrl(stand_ins, one_rank):
    path = file_of("skyrl", "backends/skyrl_train/distributed/megatron/model_utils.py")
    above = "skyrl.backends.skyrl_train.distributed.megatron"
    parts = above.split(".")
    stand_ins("megatron", "megatron.core", "megatron.core.parallel_state")
    stand_ins(*(".".join(parts[: i + 1]) for i in range(len(parts))))
    module = run_file(path, f"{above}.model_utils")
    sys.modules[above].model_utils = module
    original = module._fused_lm_head_logprob_apply
    run_example("skyrl_logprobs")
    fused = module._fused_lm_head_logprob_apply
    assert fused is not original
    names = [*inspect.signature(original).parameters]
    assert [x.replace("vocab_", "").replace("_index", "") for x in names] == [
        *inspect.signature(fused).parameters
    ]
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
    assert_close(*results)


class Decoder(torch.nn.Module):
    """Without its head, as in torchtitan's trainer where a loss has it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.norm = torch.nn.Linear(32, 32), torch.nn.RMSNorm(32)
        self.lm_head = torch.nn.Linear(32, V, bias=False)

    def forward(self, x):
        return self.norm(self.layer(x))


def test_torchtitan():
    """Values and gradients of its DAPO loss in its wrapper, and of the example's."""
    needs("torchtitan")
    needs("spmd_types")
    from torchtitan.components.loss import ChunkedLossWrapper

    path = file_of("torchtitan", "experiments/rl/losses/dapo.py")
    dapo = run_file(path, "dapo_of_torchtitan").DAPOLoss.Config()
    FusedDAPOLoss = run_example("torchtitan_loss")["FusedDAPOLoss"]
    assert issubclass(FusedDAPOLoss, ChunkedLossWrapper)
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(V, (4, 8), generator=g)
    mask = torch.rand(4, 8, generator=g) > 0.3
    logprobs = -5 + 0.3 * torch.randn(4, 8, generator=g)
    logprobs[0, :2] = float("nan")
    advantages = torch.randn(4, 1, generator=g).expand(4, 8) * mask
    options = {"generator_logprobs": logprobs, "advantages": advantages, "loss_mask": mask}
    x, results = torch.randn(4, 8, 32, generator=g), []
    for loss in (
        ChunkedLossWrapper(ChunkedLossWrapper.Config(num_chunks=2, loss_fn=dapo)),
        FusedDAPOLoss(FusedDAPOLoss.Config()),
    ):
        model = Decoder()
        loss.set_lm_head(model.lm_head)
        value, metrics = loss(model(x), ids, 23.0, **options)
        value.backward()
        results.append(
            [value.detach(), metrics["loss/mean"], *(p.grad for p in model.parameters())]
        )
    assert_close(*results)

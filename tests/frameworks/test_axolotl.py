"""The page's trainer, built by axolotl's own builder from its config, trains as axolotl's does."""

import os
import re
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("axolotl", reason="`make test-with FRAMEWORK=axolotl` has it")
os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"
import yaml
from axolotl.core.builders import HFRLTrainerBuilder
from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer
from axolotl.utils.config import validate_config
from axolotl.utils.dict import DictDefault
from peft import LoraConfig, get_peft_model
from trl.trainer import grpo_trainer

from tests.helpers import trl_runs
from tests.helpers.ranks import ROOT
from tests.helpers.tiny_models import make_tokenizer

PAGE = (ROOT / "docs/integrations.md").read_text().split("## axolotl\n")[1]
((MODULE, CODE),) = re.findall(r'```python title="(\w+)\.py"\n(.*?)```', PAGE, re.S)
LINES = yaml.safe_load(re.search(r"```yaml\n(.*?)```", PAGE, re.S)[1])
CONFIG = {
    "rl": "grpo", "learning_rate": 0.05, "optimizer": "sgd", "lr_scheduler": "constant",
    "micro_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": trl_runs.STEPS,
    "logging_steps": 1, "bf16": False, "fp16": False, "datasets": [{"path": "none"}],
}  # fmt: skip
TRL = {
    "num_generations": 4, "max_completion_length": 6, "temperature": 0.9, "beta": 0.1,
    "reward_funcs": ["tests.helpers.trl_runs.noise"],
}  # fmt: skip


@pytest.fixture
def page(tmp_path, monkeypatch):
    """Puts the page's file on the path."""
    (tmp_path / f"{MODULE}.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop(MODULE, None)


def trained(folder, lora, trl, **config):
    """A run of the trainer that axolotl's builder constructs: losses, log and weights."""
    stored = trl_runs.folder_of("qwen2")
    config = {**CONFIG, "base_model": stored, "output_dir": str(folder), **config}
    config = validate_config(DictDefault({**config, "trl": {**TRL, **trl}}))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(stored, dtype=torch.float32)
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    builder = HFRLTrainerBuilder(config, model, make_tokenizer(), None)
    builder.train_dataset = trl_runs.prompts()
    trainer = builder.build(trl_runs.STEPS)
    trainer.train()
    log = trainer.state.log_history
    weights = {k: p.detach().clone() for k, p in trainer.model.named_parameters()}
    return type(trainer), ([row["loss"] for row in log if "loss" in row], log, weights)


@pytest.mark.parametrize("lora", (False, True), ids=("all weights", "LoRA"))
@pytest.mark.parametrize(
    ("trl", "config"),
    (
        ({}, {}),
        ({"loss_type": "grpo", "num_iterations": 2, "beta": 0.0, "entropy_coef": 0.05},
         {"gradient_accumulation_steps": 2, "micro_batch_size": 2}),
    ),
    ids=("dapo, beta", "grpo, old log-probs, entropy bonus"),
)  # fmt: skip
def test_trains_as_axolotls_own(trl, config, lora, page, tmp_path, monkeypatch):
    kind, plain = trained(tmp_path / "plain", lora, trl, **config)
    assert kind is AxolotlGRPOTrainer
    # What TRL's own method calls on logits is not called any more.
    monkeypatch.delattr(grpo_trainer, "selective_log_softmax")
    kind, fused = trained(tmp_path / "fused", lora, trl, **config, **LINES)
    assert f"{kind.__module__}.{kind.__name__}" == LINES["trainer_cls"]
    trl_runs.assert_same_run(fused, plain)
    before = AutoModelForCausalLM.from_pretrained(trl_runs.folder_of("qwen2")).state_dict()
    moved = [k for k, x in plain[2].items() if k not in before or not torch.equal(x, before[k])]
    assert any("q_proj" in name for name in moved)

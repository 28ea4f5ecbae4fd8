"""The plug-in by axolotl's own manager and config, and its GRPO trainer with and without it."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("axolotl", reason="`make test-with FRAMEWORK=axolotl` has it")
from axolotl.core.trainers.grpo import GRPOStrategy
from axolotl.integrations.base import PluginManager
from axolotl.utils.config import prepare_plugins, validate_config
from axolotl.utils.dict import DictDefault
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl.trainer.grpo_trainer import GRPOTrainer

PLUGIN = "grpo_kernels.integrations.axolotl.GRPOKernelsPlugin"
CONFIG = {
    "plugins": [PLUGIN], "base_model": "none", "rl": "grpo", "learning_rate": 1e-3,
    "micro_batch_size": 4, "gradient_accumulation_steps": 1, "datasets": [{"path": "none"}],
    "trl": {"num_generations": 4, "max_completion_length": 5}, "max_steps": 1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def fresh_manager():
    manager = PluginManager.get_instance()
    manager.plugins.clear()
    originals = {name: vars(GRPOTrainer)[name] for name in ("__init__", "_compute_loss")}
    yield manager
    for plugin in manager.plugins.values():
        plugin.post_train_unload(None)
    assert originals == {name: vars(GRPOTrainer)[name] for name in originals}


def validated(**changes):
    """Returns axolotl's validated config."""
    config = DictDefault({**CONFIG, **changes})
    prepare_plugins(config)
    return validate_config(config)


def trained(manager, config, folder):
    """The rows and weights of two steps of axolotl's trainer."""
    for _ in range(2):  # as for a reference model
        manager.pre_model_load(config)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=80, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3,
        )
    )  # fmt: skip
    model.generation_config.pad_token_id = 1
    model.save_pretrained(folder / "model")
    model = Qwen2ForCausalLM.from_pretrained(folder / "model")  # a reference is loaded from there
    arguments = GRPOStrategy.get_training_args_class()(
        output_dir=str(folder), per_device_train_batch_size=8, num_generations=4,
        max_completion_length=6, max_steps=2, learning_rate=1e-2, report_to=[], use_cpu=True,
        beta=0.1, logging_steps=1, save_strategy="no", seed=3, temperature=0.9, bf16=False,
    )  # fmt: skip
    trainer = GRPOStrategy.get_trainer_class()(
        model=model, args=arguments, processing_class=tokenizer(),
        reward_funcs=lambda completions, **_: [float(len(set(x))) for x in completions],
        train_dataset=Dataset.from_dict({"prompt": ["abc", "de", "fgh", "ij"]}),
    )  # fmt: skip
    trainer.train()
    rows = [
        {k: v for k, v in row.items() if not k.startswith(("step_time", "train_"))}
        for row in trainer.state.log_history
    ]
    return rows, torch.cat([p.flatten() for p in model.parameters()]).detach()


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = {"<eos>": 0, "<pad>": 1, **{chr(45 + i): i for i in range(2, 80)}}
    made = Tokenizer(models.WordLevel(letters, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<eos>", pad_token="<pad>", padding_side="left"
    )


def test_trains_as_without_it(fresh_manager, tmp_path):
    plain = trained(fresh_manager, validated(), tmp_path)
    assert GRPOTrainer._compute_loss.__module__.startswith("trl")
    fused = trained(fresh_manager, validated(grpo_kernels=True), tmp_path)
    assert GRPOTrainer._compute_loss.__module__.startswith("grpo_kernels")
    assert len(fused[0]) == len(plain[0]) >= 2
    for row, expected in zip(fused[0], plain[0], strict=True):
        assert row.keys() == expected.keys()
        for name in row:
            assert row[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
    assert (fused[1] - plain[1]).norm() < 1e-3 * plain[1].norm()
    assert not torch.equal(fused[1], plain[1])


def test_options_reach_the_patch(fresh_manager, monkeypatch):
    from grpo_kernels.integrations import trl

    seen = {}
    monkeypatch.setattr(
        trl, "patch_trl", lambda **kwargs: seen.update(kwargs) or SimpleNamespace(undo=lambda: None)
    )
    options = {"logits_dtype": "model", "chunk_bytes": 1 << 20, "batch_invariant": True}
    config = validated(grpo_kernels=True, grpo_kernels_options=options)
    fresh_manager.pre_model_load(config)
    assert seen["logits_dtype"] == "model" and not seen["replay_support"]
    assert seen["execution"].chunk_bytes == 1 << 20 and seen["execution"].batch_invariant


@pytest.mark.parametrize(
    ("changes", "message"),
    (
        ({"rl": "dpo"}, "rl: expected grpo with grpo_kernels; got 'dpo'"),
        ({"trl": {**CONFIG["trl"], "use_liger_loss": True}}, "trl.use_liger_loss: expected false"),
        ({"trl": {**CONFIG["trl"], "async_prefetch": True}}, "trl.async_prefetch: True does"),
        ({"context_parallel_size": 2}, "context_parallel_size: 2 does not work"),
        ({"grpo_kernels": False, "grpo_kernels_options": {}}, None),
        ({"grpo_kernels": False, "grpo_kernels_options": {"backend": "torch"}}, "has no effect"),
        ({"grpo_kernels_options": {"chunks": 3}}, "grpo_kernels_options.chunks"),
        ({"grpo_kernels_options": {"chunk_bytes": -3}}, "greater than 0"),
    ),
    ids=lambda x: None if isinstance(x, str) else ", ".join(x or ["fine"]),
)  # fmt: skip
def test_what_it_cannot_honour_is_refused(changes, message):
    if message is None:
        assert not validated(**changes).grpo_kernels
        return
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        validated(**{"grpo_kernels": True, **changes})

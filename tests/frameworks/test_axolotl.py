"""The plug-in by axolotl's own manager and config, and its GRPO trainer with and without it."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("axolotl", reason="`make test-with FRAMEWORK=axolotl` has it")
from axolotl.core.trainers.grpo import GRPOStrategy
from axolotl.integrations.base import PluginManager
from axolotl.utils.config import prepare_plugins, validate_config
from axolotl.utils.dict import DictDefault
from trl.trainer.grpo_trainer import GRPOTrainer

from tests.helpers import trl_runs

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
    """A run of axolotl's trainer."""
    for _ in range(2):  # as for a reference model
        manager.pre_model_load(config)
    return trl_runs.trained(
        GRPOStrategy.get_trainer_class(), folder, config=GRPOStrategy.get_training_args_class(),
        beta=0.1, temperature=0.9,
    )  # fmt: skip


def test_trains_as_without_it(fresh_manager, tmp_path):
    plain = trained(fresh_manager, validated(), tmp_path)
    assert GRPOTrainer._compute_loss.__module__.startswith("trl")
    fused = trained(fresh_manager, validated(grpo_kernels=True), tmp_path)
    assert GRPOTrainer._compute_loss.__module__.startswith("grpo_kernels")
    trl_runs.assert_same_run(fused, plain)
    assert any(not torch.equal(fused[2][name], weight) for name, weight in plain[2].items())


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
        ({"trl": {**CONFIG["trl"], "use_liger_loss": True}}, "trl.use_liger_loss: True does"),
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

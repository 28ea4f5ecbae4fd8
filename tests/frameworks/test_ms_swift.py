"""The plug-in file in ms-swift's own trainer: loss, gradients and metrics are Liger's."""

import subprocess
import sys
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("swift", reason="`make test-with FRAMEWORK=ms-swift` has it")
from liger_kernel import chunked_loss
from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss
from swift.rl_core.data import GRPOBatch
from swift.rlhf_trainers.grpo_trainer import GRPOTrainer
from swift.utils import import_external_file

from grpo_kernels.integrations.liger import FusedLinearGRPOLoss
from tests.helpers.batches import relative_error
from tests.helpers.model_families import family_model
from tests.helpers.ranks import ROOT
from tests.helpers.tiny_models import V

PLUGIN = ROOT / "examples/ms_swift_plugin.py"
T = 7


@pytest.fixture
def plugin():
    """Imports the plugin as `--external_plugins` does, and a second time, as a worker does."""
    for _ in range(2):
        module = import_external_file(str(PLUGIN))
    assert issubclass(chunked_loss.LigerFusedLinearGRPOLoss, FusedLinearGRPOLoss)
    yield
    module.patch.undo()
    del sys.modules[module.__name__]
    assert chunked_loss.LigerFusedLinearGRPOLoss is LigerFusedLinearGRPOLoss


def trainer_of(loss_type, beta):
    """ms-swift's trainer with what its loss looks at, made as its constructor makes it."""
    trainer = object.__new__(GRPOTrainer)
    vars(trainer).update(
        args=SimpleNamespace(use_liger_kernel=True, report_to=[]), beta=beta, loss_type=loss_type,
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


def step(trainer):
    """Loss, metrics and gradients of ms-swift's step."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(V, (4, 5 + T), generator=g)
    mask = torch.arange(T) < torch.tensor([7, 3, 5, 1])[:, None]
    old, ref = -5 + 0.3 * torch.randn(2, 4, T, generator=g)
    batch = GRPOBatch(
        completion_mask=mask, truncated_mask=torch.zeros(4, dtype=torch.bool),
        seq_lengths=torch.full((4,), 5 + T), old_per_token_logps=old,
        ref_per_token_logps=ref if trainer.beta else None,
        advantages=torch.randn(4, 1, generator=g).expand(4, T), logits_to_keep=T,
    )  # fmt: skip
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    loss = trainer.compute_liger_loss(trainer.model, inputs, batch)
    loss.backward()
    grads = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    return loss.detach(), dict(trainer._metrics["train"]), grads


@pytest.mark.parametrize("beta", (0.0, 0.04))
@pytest.mark.parametrize("loss_type", ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"))
def test_the_loss_of_its_trainer(loss_type, beta, plugin):
    trainer = trainer_of(loss_type, beta)
    assert isinstance(trainer.liger_grpo_loss, FusedLinearGRPOLoss)
    actual = step(trainer)
    theirs = trainer_of(loss_type, beta)
    theirs.liger_grpo_loss = LigerFusedLinearGRPOLoss(
        beta=beta, compiled=False, epsilon_low=0.2, epsilon_high=0.28, temperature=0.7,
        use_ref_model=beta != 0.0, loss_type=loss_type, max_completion_length=T,
        importance_sampling_level="token", sapo_temperature_pos=1.0, sapo_temperature_neg=1.05,
    )  # fmt: skip
    expected = step(theirs)
    assert relative_error(actual[0], expected[0]) < 1e-5
    assert actual[1].keys() == expected[1].keys() and ("kl" in actual[1]) == bool(beta)
    for name in actual[1]:
        assert actual[1][name] == pytest.approx(expected[1][name], rel=1e-5), name
    assert relative_error(actual[2], expected[2]) < 1e-5


def test_a_loss_that_is_not_known_is_named(plugin):
    with pytest.raises(ValueError, match="loss_type: expected one of"):
        trainer_of("fipo", 0.0)


def test_a_data_loaders_worker_has_the_plugin_again():
    """In a process that inherits nothing."""
    code = (
        "from swift.utils import import_external_file as f\n"
        "from liger_kernel import chunked_loss\n"
        f"f({str(PLUGIN)!r}); f({str(PLUGIN)!r})\n"
        "assert chunked_loss.LigerFusedLinearGRPOLoss.__module__[:12] == 'grpo_kernels'"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr

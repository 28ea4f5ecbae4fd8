"""TRL's trainer and the drop-in from the same seed: the same losses, norms, metrics, weights."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.model_families import LORAS

pytest.importorskip("trl", reason="needs the extra 'test'")
from peft import LoraConfig, PromptTuningConfig
from trl import GRPOTrainer

from grpo_kernels.execution import Execution
from grpo_kernels.experimental import Sampled, column_draw
from grpo_kernels.integrations import trl as integration
from grpo_kernels.integrations.trl import FusedGRPOTrainer, patch_trl
from grpo_kernels.integrations.trl_versions import ASKS_FOR_LOGITS, DIVIDES_BY_BATCH, check_version
from tests.helpers.trl_runs import TWICE, assert_same_run, trained

pytestmark = pytest.mark.usefixtures("real_memory")
# id: (options of GRPOConfig, whether the gradient is made in one pass)
CASES = {
    **{
        name: ({"loss_type": name, **TWICE}, name != "vespo")
        for name in ("grpo", "bnpo", "dr_grpo", "dapo", "sapo", "luspo", "vespo")
    },
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.5, **TWICE}, True),
    "on_policy": ({}, True),
    "kl": ({"beta": 0.1, **TWICE}, True),
    "kl_uncorrected": ({"beta": 0.1, "use_bias_correction_kl": False, **TWICE}, True),
    "delta": ({"delta": 1.1, "epsilon": 0.3, "epsilon_high": 0.4, **TWICE}, True),
    "sequence": ({"importance_sampling_level": "sequence", "loss_type": "grpo", **TWICE}, False),
    "temperature": ({"temperature": 0.7, **TWICE}, True),
    "top_entropy": ({"top_entropy_quantile": 0.4, **TWICE}, False),
    "entropy_bonus": ({"entropy_coef": 0.1, **TWICE}, True),
    "entropy_bonus_grpo": ({"entropy_coef": 0.1, "loss_type": "grpo", **TWICE}, True),
    "adaptive_entropy": (
        {"use_adaptive_entropy": True, "entropy_target": 3.0, "entropy_coef": 0.02, **TWICE},
        True,
    ),
    "off_policy": ({"off_policy_mask_threshold": 1e-3, **TWICE}, False),
    "truncated": ({"mask_truncated_completions": True, **TWICE}, True),
    "accumulation": ({"gradient_accumulation_steps": 4, "loss_type": "bnpo"}, True),
    "several_steps_a_generation": ({"steps_per_generation": 4, **TWICE}, True),
    "float32_head": ({"cast_lm_head_to_fp32": True, **TWICE}, True),
    "checkpointed": ({"gradient_checkpointing": True}, True),
}


@pytest.fixture
def one_pass(monkeypatch):
    """The calls whose gradient was made in one pass."""
    made = []
    original = integration._objective

    def counted(*args):
        objective, scale = original(*args)
        made.append(objective)
        return objective, scale

    monkeypatch.setattr(integration, "_objective", counted)
    return made


def compare(tmp_path, **options):
    theirs = trained(GRPOTrainer, tmp_path / "theirs", **options)
    mine = trained(FusedGRPOTrainer, tmp_path / "mine", **options)
    assert_same_run(mine, theirs)
    if "family" not in options:
        lengths = (row.get("completions/min_length", 6) for row in mine[1])
        assert min(lengths) < 6, "nothing was padded"
    return mine


@pytest.mark.parametrize("case", CASES)
def test_the_same_run(case, tmp_path, one_pass):
    if DIVIDES_BY_BATCH and case == "luspo":
        pytest.skip("refused")
    options, expected = CASES[case]
    if options.get("cast_lm_head_to_fp32"):
        options = {**options, "family": "llama"}  # tied
    losses, log, _ = compare(tmp_path, **options)
    if DIVIDES_BY_BATCH and case in ("entropy_bonus", "adaptive_entropy"):
        expected = False
    assert len(one_pass) == (len(losses) if expected else 0)
    if case in ("grpo", "delta"):  # else clipping was not looked at
        assert any(row.get("clip_ratio/region_mean", 0) > 0 for row in log)


@pytest.mark.parametrize("size", (2, 4))
def test_ratios_of_equal_weights_are_exactly_1(size, tmp_path, one_pass):
    """Old log-probs by TRL, over another batch than the loss; the weights stand still."""
    options = {"learning_rate": 0.0, "per_device_train_batch_size": size, **TWICE}
    execution = Execution(batch_invariant=True)
    trained(FusedGRPOTrainer, tmp_path, execution=execution, **options)
    metrics = [objective.output.metrics for objective in one_pass]
    assert len(metrics) >= 6
    assert all(of["ratio_max"] == of["ratio_mean"] == 1.0 for of in metrics)


@pytest.mark.parametrize("family", ("gemma2", "cohere", "granite", "gpt2"))
def test_models_that_scale_or_cap(family, tmp_path):
    compare(tmp_path, family=family)


@pytest.mark.parametrize("loss_type", ("grpo", "vespo"))
def test_experts(loss_type, tmp_path):
    """Their load-balancing loss and its gradient are TRL's."""
    _, log, _ = compare(
        tmp_path, family="qwen3_moe", loss_type=loss_type, gradient_accumulation_steps=2
    )
    assert log[0]["aux_loss"] > 0


def test_evaluation(tmp_path):
    _, log, _ = compare(tmp_path, evaluate=True)
    assert any("eval_loss" in row for row in log)


def test_lora(tmp_path):
    lora = LoraConfig(r=4, task_type="CAUSAL_LM", **LORAS["body"])
    compare(tmp_path, peft_config=lora, beta=0.1, **TWICE)


def sampler_s_mismatch(level):
    def inject(trainer, inputs):
        trainer.use_vllm = True
        g = torch.Generator().manual_seed(1)
        ratio = torch.rand(inputs["completion_mask"].shape, generator=g) * 2
        ratio = ratio[:, :1] if level == "sequence" else ratio
        ratio[:1] = 0.0
        return {"importance_sampling_ratio": ratio}

    return inject


@pytest.mark.parametrize("level", ("token", "sequence"))
@pytest.mark.parametrize("loss_type", ("dapo", "cispo", "sapo", "vespo"))
def test_the_sampler_s_correction(loss_type, level, tmp_path):
    compare(tmp_path, loss_type=loss_type, injected=sampler_s_mismatch(level), beta=0.1, **TWICE)


def a_tool_s_words(trainer, inputs):
    spoken = torch.ones_like(inputs["completion_mask"])
    spoken[:, 2:4] = 0
    return {"tool_mask": spoken}


def advantages_of_tokens(trainer, inputs):
    g = torch.Generator().manual_seed(1)
    return {"advantages": torch.randn(inputs["completion_mask"].shape, generator=g)}


def pixels(trainer, inputs):
    """Pixels of one image per prompt, in four patches."""
    g = torch.Generator().manual_seed(1)
    prompts = inputs["prompt_ids"].clone()
    prompts[:, -4:] = 3
    count = len(prompts)
    return {
        "prompt_ids": prompts, "num_images": [1] * count,
        "pixel_values": torch.randn(count, 3, 8, 8, generator=g),
    }  # fmt: skip


@pytest.mark.parametrize("loss_type", ("grpo", "vespo"))
def test_pixels(loss_type, tmp_path):
    compare(tmp_path, family="llava", injected=pixels, loss_type=loss_type)


@pytest.mark.parametrize("injected", (a_tool_s_words, advantages_of_tokens))
@pytest.mark.parametrize("loss_type", ("grpo", "vespo"))
def test_what_else_is_passed_on(loss_type, injected, tmp_path):
    compare(tmp_path, loss_type=loss_type, injected=injected, **TWICE)


def test_patched(tmp_path, monkeypatch):
    # The small model's softmax is too flat for columns to be left out.
    monkeypatch.setattr(column_draw, "_FLAT_SHARE", 2.0)
    theirs = trained(GRPOTrainer, tmp_path / "a")
    own = GRPOTrainer._compute_loss
    with patch_trl():
        assert GRPOTrainer._compute_loss is not own
        assert_same_run(trained(GRPOTrainer, tmp_path / "b"), theirs)
    assert GRPOTrainer._compute_loss is own
    patched = patch_trl(execution=Execution(backward=Sampled(0.5)))
    losses, log, _ = trained(GRPOTrainer, tmp_path / "c")
    assert losses[0] == pytest.approx(theirs[0][0], abs=1e-5)
    assert log[0]["grad_norm"] != pytest.approx(theirs[1][0]["grad_norm"], rel=1e-4)
    patched.undo()
    patched.undo()
    assert GRPOTrainer._compute_loss is own
    assert_same_run(trained(GRPOTrainer, tmp_path / "d"), theirs)


def test_lora_on_the_head_is_trained(tmp_path):
    """TRL's own head reads the layer's weight alone and leaves the adapter out."""
    lora = LoraConfig(r=4, task_type="CAUSAL_LM", **LORAS["head"])
    *_, weights = trained(FusedGRPOTrainer, tmp_path, peft_config=lora)
    outer = [w for name, w in weights.items() if "lm_head.lora_B" in name]
    assert len(outer) == 1 and outer[0].abs().max() > 0


def test_a_trainer_made_before_the_patch_is_not_touched(tmp_path):
    theirs = trained(GRPOTrainer, tmp_path / "a")

    class Patched(GRPOTrainer):
        def train(self):
            with patch_trl():
                super().train()

    assert_same_run(trained(Patched, tmp_path / "b"), theirs)


def test_patched_twice():
    with patch_trl(), pytest.raises(RuntimeError, match="it is patched: undo"):
        patch_trl()
    with pytest.raises(TypeError, match="execution: expected an Execution"):
        patch_trl(execution="sampled")
    assert "_patched_by_grpo_kernels" not in vars(GRPOTrainer)


def few_tokens(trainer, inputs):
    """All completions but one have been cut and are masked."""
    return {"num_items_in_batch": torch.tensor(1.0)}


@pytest.mark.parametrize("options", ({}, {"entropy_coef": 0.1}))
def test_fewer_tokens_than_steps(options, tmp_path):
    compare(tmp_path, injected=few_tokens, steps_per_generation=4, **options, **TWICE)


def test_rewards_that_are_not_scaled(tmp_path):
    """Advantages are large then, and so may be what rounding leaves of a loss."""
    compare(tmp_path, scale_rewards="none", loss_type="grpo" if DIVIDES_BY_BATCH else "luspo")


def test_a_loss_that_is_not_known_is_refused(tmp_path):
    class Other(FusedGRPOTrainer):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs)

    own = GRPOTrainer._compute_loss
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GRPOTrainer, "_compute_loss", lambda *args: 2 * own(*args) + 0.1)
        with pytest.raises(RuntimeError, match="loss: expected TRL's"):
            trained(Other, tmp_path)


def test_losses_are_compared_at_first_and_then_now_and_then():
    """Each time the CPU waits for the GPU."""
    trainer = SimpleNamespace()
    due = [i for i in range(320) if integration._check_is_due(trainer)]
    assert due == [*range(20), 100, 200, 300]


def test_virtual_tokens_are_refused(tmp_path):
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(ValueError, match="peft_config: expected adapters inside the layers"):
        trained(FusedGRPOTrainer, tmp_path, peft_config=config)


def test_a_cast_of_an_adapted_head_is_refused(tmp_path):
    lora = LoraConfig(r=4, task_type="CAUSAL_LM", **LORAS["head"])
    with pytest.raises(ValueError, match="cast_lm_head_to_fp32: expected False"):
        trained(FusedGRPOTrainer, tmp_path, peft_config=lora, cast_lm_head_to_fp32=True)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    (
        ({"execution": "sampled"}, TypeError, "execution: expected an Execution; got 'sampled'"),
        ({"logits_dtype": "bf16"}, ValueError, "logits_dtype: expected 'fp32' or 'model'"),
        (
            {"execution": Execution(backward=Sampled(seed=3))},
            ValueError,
            r"seed: expected a torch\.Generator",
        ),
    ),
)
def test_options_of_the_head(options, error, message, tmp_path):
    with pytest.raises(error, match=message):
        trained(FusedGRPOTrainer, tmp_path, **options)
    with pytest.raises(error, match=message):
        patch_trl(**options)


def test_options_of_the_loss_are_looked_at_first(tmp_path):
    with pytest.raises(ValueError, match="delta: expected a number > 1"):
        trained(FusedGRPOTrainer, tmp_path, delta=0.9)


def test_other_versions():
    for old in ("1.7.1", "0.29.0"):
        with pytest.raises(ImportError, match=f"got {old}: pip install 'trl>=1.8'"):
            check_version(old)
    for new in ("1.17.0", "1.17rc1", "2.0.0.dev0"):
        with pytest.warns(UserWarning, match=f"expected TRL 1.8 to 1.16, .* got {new}. Its loss"):
            check_version(new)
    for tested in ("1.8.0", "1.14.2", "1.16.3"):
        check_version(tested)


@pytest.mark.skipif(not DIVIDES_BY_BATCH, reason="newer versions of TRL leave padding out")
def test_padding_that_is_trained_is_refused(tmp_path):
    with pytest.raises(ValueError, match="whose luspo trains padding; got 'luspo'"):
        trained(FusedGRPOTrainer, tmp_path, loss_type="luspo")


@pytest.mark.skipif(not ASKS_FOR_LOGITS, reason="newer versions of TRL deprecate it")
def test_the_other_head_is_refused(tmp_path):
    with pytest.raises(ValueError, match="use_liger_kernel: expected False"):
        trained(FusedGRPOTrainer, tmp_path, use_liger_kernel=True)


@pytest.mark.parametrize("absent", ("trl", "peft"))
def test_without(absent, tmp_path):
    code = """
import sys
from types import SimpleNamespace
from importlib import metadata
absent, version = sys.argv[1], metadata.version
def told(name):
    if name == absent:
        raise metadata.PackageNotFoundError(name)
    return version(name)
metadata.version = told
sys.modules[absent] = None
if absent == "trl":
    try:
        import grpo_kernels.integrations.trl
    except ImportError as error:
        assert "pip install 'trl>=1.8'" in str(error), error
        print("refused")
else:
    import grpo_kernels.integrations.trl as integration
    from trl.trainer import grpo_trainer
    assert not hasattr(grpo_trainer, "BaseTunerLayer")
    with integration._replace_lm_head(integration.attach_fused_head):
        assert not hasattr(grpo_trainer, "BaseTunerLayer")
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", code, absent], capture_output=True, text=True)
    assert done.stdout.strip() == "refused", done.stderr

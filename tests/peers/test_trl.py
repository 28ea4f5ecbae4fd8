"""TRL's trainer and the drop-in from the same seed: the same losses, norms, metrics, weights."""

import inspect
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from types import FunctionType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from tests.helpers.model_families import LORAS

pytest.importorskip("trl", reason="needs the extra 'test'")
from peft import LoraConfig, PromptTuningConfig
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

from grpo_kernels.head.execution import Execution
from grpo_kernels.head.products import INVARIANT_ROWS
from grpo_kernels.integrations.patching import is_ours
from grpo_kernels.integrations.transformers import attach_fused_head
from grpo_kernels.integrations.trl import FusedGRPOTrainer, exact_kl, micro_batch, patch_trl
from grpo_kernels.integrations.trl.explain import ExplainCallback
from grpo_kernels.integrations.trl.loss import OF_TRLS_LOSS, check_is_due, check_own, value_of
from grpo_kernels.integrations.trl.state import Options, State
from grpo_kernels.integrations.trl.versions import NEWEST, OLDEST, check_version
from grpo_kernels.loss.losses import LOSSES, Clip, flat_fields
from tests.helpers.head_options import watch_products
from tests.helpers.tiny_models import make_tokenizer
from tests.helpers.trl_runs import (
    TWICE,
    arguments_of,
    assert_same_run,
    assert_same_training,
    decided_model,
    noise,
    prompts,
    trained,
)

pytestmark = pytest.mark.usefixtures("real_memory", "own_precision")
TOP_K = {"top_k": 12, "temperature": 0.7}
LORA = {kind: LoraConfig(r=4, task_type="CAUSAL_LM", **LORAS[kind]) for kind in ("body", "head")}


def mismatch(inputs, level):
    """Weights of a sampler's correction, per token or per sequence."""
    g = torch.Generator().manual_seed(1)
    ratio = torch.rand(inputs["completion_mask"].shape, generator=g) * 2
    ratio = ratio[:, :1] if level == "sequence" else ratio
    ratio[:1] = 0.0
    return {"importance_sampling_ratio": ratio}


def a_tool_s_words(inputs):
    """Masks out a tool's tokens, and gives the other tokens an advantage each."""
    spoken = torch.ones_like(inputs["completion_mask"])
    spoken[:, 2:4] = 0
    g = torch.Generator().manual_seed(1)
    return {"tool_mask": spoken, "advantages": torch.randn(spoken.shape, generator=g)}


def pixels(inputs):
    """Pixels of one image per prompt, in four patches."""
    g = torch.Generator().manual_seed(1)
    prompts = inputs["prompt_ids"].clone()
    prompts[:, -4:] = 3
    count = len(prompts)
    images = torch.randn(count, 3, 8, 8, generator=g)
    return {"prompt_ids": prompts, "num_images": [1] * count, "pixel_values": images}


# Every option that the integration reads, once; `test_peers.py` and `test_transformers.py` have
# the losses and the models one by one.
CASES = {
    "on_policy, evaluation": {"evaluate": True},
    "grpo": {"loss_type": "grpo", **TWICE},
    "bnpo, accumulated": {"loss_type": "bnpo", "gradient_accumulation_steps": 4},
    "dr_grpo, temperature": {"loss_type": "dr_grpo", "temperature": 0.7, **TWICE},
    "several_steps_a_generation": {"steps_per_generation": 4, **TWICE},
    "sapo": {"loss_type": "sapo", "sapo_temperature_pos": 0.5, **TWICE},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.5, **TWICE},
    # Advantages are large then, and so may be what rounding leaves of a loss.
    "luspo, not scaled": {"loss_type": "luspo", "scale_rewards": "none", **TWICE},
    "vespo, truncated": {"loss_type": "vespo", "mask_truncated_completions": True, **TWICE},
    "kl": {"beta": 0.1, **TWICE},
    "kl_uncorrected": {"beta": 0.1, "use_bias_correction_kl": False, **TWICE},
    "delta": {"delta": 1.1, "epsilon": 0.3, "epsilon_high": 0.4, **TWICE},
    "sequence": {"importance_sampling_level": "sequence", "loss_type": "grpo", **TWICE},
    # No threshold of these runs lies among tokens of equal context, which rounding would cut.
    "top_entropy": {"top_entropy_quantile": 0.6, **TWICE},
    "off_policy": {"off_policy_mask_threshold": 1e-3, **TWICE},
    "entropy_bonus, grpo": {"entropy_coef": 0.1, "loss_type": "grpo", **TWICE},
    "adaptive_entropy": {
        "use_adaptive_entropy": True, "entropy_target": 3.0, "entropy_coef": 0.02, **TWICE
    },
    # Tied.
    "float32_head": {"cast_lm_head_to_fp32": True, "family": "llama", **TWICE},
    "checkpointed, softcap": {"gradient_checkpointing": True, "family": "gemma2"},
    "lora": {"peft_config": LORA["body"], "beta": 0.1, **TWICE},
    # Their load-balancing loss and its gradient are TRL's.
    **{
        f"experts, {name}": {
            "family": "qwen3_moe", "loss_type": name, "gradient_accumulation_steps": 2
        } for name in ("grpo", "vespo")
    },
    **{
        f"sampler's correction, {level}": {
            "loss_type": name, "injected": partial(mismatch, level=level), "beta": 0.1, **TWICE
        } for level, name in (("token", "cispo"), ("sequence", "dapo"))
    },
    "tool": {"injected": a_tool_s_words, "loss_type": "grpo", **TWICE},
    "pixels": {"injected": pixels, "family": "llava"},
    "fewer tokens than steps, entropy bonus": {
        # All completions but one have been cut and are masked.
        "injected": lambda _: {"num_items_in_batch": torch.tensor(1.0)},
        "steps_per_generation": 4, "entropy_coef": 0.1, **TWICE,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_same_run(case, tmp_path):
    options = CASES[case]
    theirs = trained(GRPOTrainer, tmp_path / "theirs", **options)
    actual = trained(FusedGRPOTrainer, tmp_path / "mine", **options)
    assert_same_run(actual, theirs)
    log = actual[1]
    if "family" not in options:
        lengths = (row.get("completions/min_length", 6) for row in log)
        assert min(lengths) < 6, "nothing was padded"
    if case in ("grpo", "delta"):  # else clipping was not looked at
        assert any(row.get("clip_ratio/region_mean", 0) > 0 for row in log)
    assert any("eval_loss" in row for row in log) == ("evaluate" in options)
    assert ("aux_loss" in log[0] and log[0]["aux_loss"] > 0) == case.startswith("experts")


@pytest.mark.parametrize(
    ("options", "products"),
    (
        ({}, 2),
        ({"loss_type": "grpo", "entropy_coef": 0.1}, 2),
        ({"loss_type": "vespo"}, 3),
        ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, 3),
        ({"off_policy_mask_threshold": 1e-3}, 3),
        ({"top_entropy_quantile": 0.4}, 3),
    ),
)
def test_logits_are_made_once_where_the_loss_is_of_tokens(options, products, tmp_path, monkeypatch):
    """The head's products: logits, again where need be, and the gradient of the states."""
    watch_products(monkeypatch, product := MagicMock(wraps=torch.mm))
    losses, *_ = trained(FusedGRPOTrainer, tmp_path, max_steps=1, **options)
    assert product.call_count == products * len(losses)


# id: (loss, options of both trainers, TRL's options that stand for the loss)
OWN_LOSSES = {
    "grpo": (Clip(aggregation="grpo"), {}, {"loss_type": "grpo"}),
    "dr_grpo": (Clip(aggregation="dr_grpo"), {}, {"loss_type": "dr_grpo"}),
    "with a KL and a bonus": (Clip(), {"beta": 0.1, "entropy_coef": 0.1}, {"loss_type": "dapo"}),
    # Takes two passes; TRL then logs ratios of tokens.
    "sequence": (
        Clip(aggregation="grpo", ratio_level="sequence"), {},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN_LOSSES)
def test_a_loss_of_one_s_own_that_is_trls(name, tmp_path):
    """Losses, weights, and all that TRL logs."""
    loss, both, theirs = OWN_LOSSES[name]
    actual = trained(FusedGRPOTrainer, tmp_path / "mine", loss=loss, **both, **TWICE)
    expected = trained(GRPOTrainer, tmp_path / "theirs", **both, **theirs, **TWICE)
    compare = assert_same_training if name == "sequence" else assert_same_run
    compare(actual, expected)
    assert [row.keys() for row in actual[1]] == [row.keys() for row in expected[1]]


class OfLogits(GRPOTrainer):
    """TRL's trainer, with the KL of all logits in the place of its estimate."""

    def _compute_loss(self, model, inputs):
        beta, self.beta = self.beta, 0.0
        loss, self.beta = super()._compute_loss(model, inputs), beta
        ids, masks = (
            torch.cat([inputs[f"{x}_{name}"] for x in ("prompt", "completion")], 1)
            for name in ("ids", "mask")
        )
        mask, T = inputs["completion_mask"], inputs["completion_ids"].shape[1]

        def log_p(any_model):
            logits = any_model(ids, attention_mask=masks).logits[:, -T - 1 : -1]
            return (logits / self.temperature).log_softmax(-1)

        if self.ref_model is not None:
            with torch.no_grad():
                t = log_p(self.ref_model)
        else:
            with torch.no_grad(), self.accelerator.unwrap_model(model).disable_adapter():
                t = log_p(model)
        s = log_p(model)
        kl = (s.exp() * (s - t)).sum(-1) * mask
        sequence_kl = kl.sum(1) / mask.sum(1).clamp(min=1)
        return loss + beta * sequence_kl.mean() / self.current_gradient_accumulation_steps


@pytest.mark.parametrize("lora", (False, True))
def test_the_exact_kl(lora, tmp_path):
    options = {"loss_type": "grpo", "beta": 2.0, **TWICE}
    if lora:
        options["peft_config"] = LoraConfig(r=2, lora_alpha=8, init_lora_weights=False)
    actual = trained(FusedGRPOTrainer, tmp_path / "mine", exact_kl=True, **options)
    assert_same_training(actual, trained(OfLogits, tmp_path / "theirs", **options), 1e-4)
    kls = [row["kl_exact"] for row in actual[1] if "kl" in row]
    assert len(kls) == 3 and min(kls[1:]) > 1e-3  # with adapters that begin somewhere
    assert lora or kls[0] == pytest.approx(0, abs=1e-6)
    estimated = trained(FusedGRPOTrainer, tmp_path / "estimate", **options)
    with pytest.raises(AssertionError, match="not close"):
        assert_same_training(actual, estimated, 1e-4)


@pytest.mark.parametrize("kind", ("is_fsdp_enabled", "is_deepspeed_enabled"))
def test_an_exact_kl_is_refused_where_heads_are_sharded(kind):
    trainer = SimpleNamespace(
        beta=0.1, loss_type="dapo", is_fsdp_enabled=False, is_deepspeed_enabled=False
    )
    setattr(trainer, kind, True)
    with pytest.raises(ValueError, match="exact_kl=True does not work with FSDP or DeepSpeed"):
        exact_kl.check(trainer, True, False)


def test_a_compiled_model_has_its_calls_between_graphs(tmp_path):
    """The body is one graph, as TRL asks for."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    actual = trained(FusedGRPOTrainer, tmp_path / "mine", **options, **TWICE)
    assert counters["graph_break"] and all(
        "`fused_grpo_loss`" in x for x in counters["graph_break"]
    )
    assert counters["frames"]["total"] == counters["frames"]["ok"]
    assert_same_run(actual, trained(GRPOTrainer, tmp_path / "theirs", **TWICE))


@pytest.mark.parametrize("size", (2, 4))
def test_ratios_of_equal_weights_are_exactly_1(size, tmp_path):
    """Old log-probs by TRL, over another batch than the loss; the weights stand still.

    TRL counts what lies outside of an interval that is the number 1.
    """
    options = {"learning_rate": 0.0, "per_device_train_batch_size": size, **TWICE, "epsilon": 0.0}
    execution = Execution(batch_invariant=True)
    _, log, _ = trained(FusedGRPOTrainer, tmp_path, execution=execution, **options)
    outside = [row["clip_ratio/region_mean"] for row in log if "loss" in row]
    assert len(outside) >= 3 and not any(outside)


def test_patched(tmp_path, monkeypatch):
    theirs = trained(GRPOTrainer, tmp_path / "a")
    original = GRPOTrainer._compute_loss
    with patch_trl():
        assert GRPOTrainer._compute_loss is not original
        assert_same_run(trained(GRPOTrainer, tmp_path / "b"), theirs)
        with pytest.raises(RuntimeError, match=r"is patched already: call undo\(\)"):
            patch_trl()
    assert GRPOTrainer._compute_loss is original and not is_ours(GRPOTrainer.__init__)
    patched = patch_trl(execution=Execution(batch_invariant=True))
    watch_products(monkeypatch, product := MagicMock(wraps=torch.mm))
    assert_same_run(trained(GRPOTrainer, tmp_path / "c"), theirs)
    assert {len(call.args[0]) for call in product.mock_calls} == {INVARIANT_ROWS}
    patched.undo()
    patched.undo()
    assert GRPOTrainer._compute_loss is original


def test_lora_on_the_head_is_trained(tmp_path):
    """TRL's own head reads the layer's weight alone and leaves the adapter out."""
    *_, weights = trained(FusedGRPOTrainer, tmp_path, peft_config=LORA["head"])
    outer = [w for name, w in weights.items() if "lm_head.lora_B" in name]
    assert len(outer) == 1 and outer[0].abs().max() > 0


def test_a_patch_that_ends_before_the_training(tmp_path):
    """The run is TRL's without an option, and refused where one would be lost."""

    def unpatched(patch):
        class Unpatched(GRPOTrainer):
            def train(self, *args, **kwargs):
                patch.undo()
                return super().train(*args, **kwargs)

        return Unpatched

    theirs = trained(GRPOTrainer, tmp_path / "a")
    assert_same_run(trained(unpatched(patch_trl()), tmp_path / "b"), theirs)
    for options, more in (
        ({"loss": Clip()}, {}), ({"skip_untrained": True}, {}), ({"replay_support": True}, TOP_K)
    ):  # fmt: skip
        patch = patch_trl(**options)
        message = f"{next(iter(options))}: no effect without patch_trl, which has ended"
        with pytest.raises(ValueError, match=message):
            trained(unpatched(patch), tmp_path / "c", **more)


def test_ours_under_a_patch_of_others(tmp_path):
    """A trainer of our class, made before the patch, keeps its options."""

    class Patched(FusedGRPOTrainer):
        def train(self, *args, **kwargs):
            with patch_trl():
                return super().train(*args, **kwargs)

    options = {"replay_support": True, **TOP_K, **TWICE}
    expected = trained(FusedGRPOTrainer, tmp_path / "a", **options)
    assert_same_run(trained(Patched, tmp_path / "b", **options), expected)


def test_a_trainer_made_before_the_patch_is_not_touched(tmp_path):
    theirs = trained(GRPOTrainer, tmp_path / "a")

    class Patched(GRPOTrainer):
        def train(self, *args, **kwargs):
            with patch_trl():
                super().train(*args, **kwargs)

    assert_same_run(trained(Patched, tmp_path / "b"), theirs)


def test_a_loss_that_is_not_known_is_refused(tmp_path):
    class Other(FusedGRPOTrainer):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs)

    original = GRPOTrainer._compute_loss
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GRPOTrainer, "_compute_loss", lambda *args: 2 * original(*args) + 0.1)
        with pytest.raises(RuntimeError, match="loss: expected TRL's"):
            trained(Other, tmp_path)


@pytest.mark.parametrize("entry", ("subclass", "patch"))
def test_a_trl_that_calls_no_name_of_ours_is_refused(entry, tmp_path):
    """Otherwise TRL's loss and head would train silently."""

    def construct():
        with patch_trl() if entry == "patch" else nullcontext():
            trained((GRPOTrainer if entry == "patch" else FusedGRPOTrainer), tmp_path)

    for name in ("_compute_loss", "_get_per_token_logps_and_entropies"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GRPOTrainer, name + "_of_1_17", getattr(GRPOTrainer, name), False)
            patch.delattr(GRPOTrainer, name)
            message = f"trl: expected .* have GRPOTrainer.{name}; got"
            with pytest.raises(RuntimeError, match=message):
                construct()
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(grpo_trainer, "add_fused_lm_head")
        with pytest.raises(RuntimeError, match=r"trl: expected .*\.add_fused_lm_head; got"):
            construct()
    with pytest.MonkeyPatch.context() as patch:  # a constructor that has it from elsewhere
        init = GRPOTrainer.__init__
        moved = FunctionType(init.__code__, {**vars(grpo_trainer)}, closure=init.__closure__)
        moved.__defaults__, moved.__kwdefaults__ = init.__defaults__, init.__kwdefaults__
        patch.setattr(GRPOTrainer, "__init__", moved)
        with pytest.raises(RuntimeError, match="whose GRPOTrainer calls add_fused_lm_head; got"):
            construct()


def test_losses_are_compared_at_first_and_then_now_and_then():
    """Each time the CPU waits for the GPU."""
    state = State(Options())
    due = [i for i in range(320) if check_is_due(state)]
    assert due == [*range(20), 100, 200, 300]


REFUSED = {
    "virtual tokens": (
        {"peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)},
        "peft_config: expected adapters inside the layers",
    ),
    "cast of an adapted head": (
        {"peft_config": LORA["head"], "cast_lm_head_to_fp32": True},
        "cast_lm_head_to_fp32=True does not work",
    ),
    # Options of the loss are looked at first.
    "delta": ({"delta": 0.9}, "delta: expected a number > 1"),
    "no KL": ({"exact_kl": True}, r"exact_kl=True has no effect with beta=0\.0"),
    "exact KL": (
        {"exact_kl": True, "beta": 0.1, "loss_type": "vespo"},
        "exact_kl=True does not work with loss_type='vespo'",
    ),
    "exact KL of supports": (
        {"exact_kl": True, "beta": 0.1, "replay_support": True, "top_k": 5},
        "exact_kl=True does not work with replay_support",
    ),
    "own loss with options of TRL's": (
        {"loss": Clip(), "delta": 1.5},
        "delta=1.5 has no effect with your own loss",
    ),
    "a name": ({"loss": "dapo"}, "loss: expected a loss or a callable"),
    # Also by `patch_trl`.
    "execution": ({"execution": "torch"}, "execution: expected an Execution; got 'torch'"),
    "logits_dtype": ({"logits_dtype": "bf16"}, "logits_dtype: expected 'fp32' or 'model'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case, tmp_path):
    options, message = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=message):
        trained(FusedGRPOTrainer, tmp_path, **options)
    if case in ("execution", "logits_dtype"):
        with pytest.raises((TypeError, ValueError), match=message):
            patch_trl(**options)


# Options that `_compute_loss` reads and that are none of a loss; TRL acts on all but the first.
NO_LOSS_OPTIONS = {
    "beta", "use_bias_correction_kl", "max_completion_length", "entropy_coef", "entropy_coef_delta",
    "entropy_coef_max", "entropy_coef_min", "entropy_target", "use_adaptive_entropy",
    "router_aux_loss_coef", "steps_per_generation", "use_vllm",
    "vllm_importance_sampling_correction",
}  # fmt: skip


def test_options_that_a_loss_of_one_s_own_leaves_out_are_refused():
    defaults = {option.name: option.default for option in fields(GRPOConfig)}
    source = inspect.getsource(GRPOTrainer._compute_loss)
    read = {name for name in defaults if re.search(rf"self\.(args\.)?{name}\b", source)}
    assert read - NO_LOSS_OPTIONS <= OF_TRLS_LOSS.keys()
    assert {"epsilon", "delta", "loss_type", "sapo_temperature_neg"} <= OF_TRLS_LOSS.keys()
    for name in OF_TRLS_LOSS:
        args = SimpleNamespace(**{x: defaults[x] for x in OF_TRLS_LOSS})
        trainer = SimpleNamespace(args=args, use_vllm=False)
        check_own(trainer)
        setattr(args, name, 0.5)
        with pytest.raises(ValueError, match=f"{name}=0.5 has no effect with your own"):
            check_own(trainer)


def test_other_versions():
    for old in ("1.14.2", "0.29.0"):
        with pytest.raises(ImportError, match=f"got {old}: pip install 'trl>=1.15'"):
            check_version(old)
    major, minor = NEWEST.split(".")
    for new in (f"{major}.{int(minor) + 1}.0", f"{major}.{int(minor) + 1}rc1", "2.0.0.dev0"):
        with pytest.warns(UserWarning, match=f"TRL {OLDEST} to {NEWEST}, .* got {new}. Its loss"):
            check_version(new)
    for tested in (f"{OLDEST}.0", f"{NEWEST}.3"):
        check_version(tested)


# With TRL alone, PEFT's name for an adapter is absent.
WITHOUT = {
    "trl": ("import grpo_kernels.integrations.trl", "ImportError: .*pip install 'trl>=1.15'"),
    "peft": (
        """
from grpo_kernels.integrations.trl import patch_trl
from trl.trainer import grpo_trainer
with patch_trl():
    assert not hasattr(grpo_trainer, "BaseTunerLayer")
""",
        None,
    ),
}


@pytest.mark.parametrize("absent", WITHOUT)
def test_without(absent):
    code, error = WITHOUT[absent]
    code = f"""
import sys
from importlib import metadata
version = metadata.version
def version_of(name):
    if name == {absent!r}:
        raise metadata.PackageNotFoundError(name)
    return version(name)
metadata.version = version_of
sys.modules[{absent!r}] = None
{code}"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert bool(done.returncode) == (error is not None), done.stderr
    assert error is None or re.search(error, done.stderr)


# Trainers that share a model, options that change, and losses of subclasses


def stages(tmp_path, *kinds, bf16=False, **options):
    """Trains one model by one trainer after another, each at half of the temperature before."""
    # Weights that stand still: where losses are rounded, later samples would be others.
    more = {"bf16": True, "learning_rate": 0.0} if bf16 else {}
    rows, temperature = [], 1.0
    model = decided_model("qwen2").float()
    for i, kind in enumerate(kinds):
        torch.manual_seed(0)
        args = arguments_of(tmp_path / f"{i}", temperature=temperature, max_steps=1, **more)
        trainer = kind(
            model, reward_funcs=noise, args=args, train_dataset=prompts(),
            processing_class=make_tokenizer(), **options,
        )  # fmt: skip
        trainer.train()
        rows += [row for row in trainer.state.log_history if "loss" in row]
        temperature, model = temperature / 2, trainer.model
        options = {}  # the adapters are there
    return [(row["loss"], row["entropy"], row["grad_norm"]) for row in rows]


SHARED = {"lora": {"peft_config": LORA["body"]}, "wrapped by accelerate": {"bf16": True}, "": {}}


@pytest.mark.parametrize("case", SHARED)
def test_trainers_of_one_model(case, tmp_path):
    """A curriculum: each has a head of its own temperature, whoever came before."""
    options = SHARED[case]
    expected = stages(tmp_path / "a", GRPOTrainer, GRPOTrainer, GRPOTrainer, **options)
    for i, kinds in enumerate((
        (FusedGRPOTrainer, FusedGRPOTrainer, FusedGRPOTrainer),
        (GRPOTrainer, FusedGRPOTrainer, GRPOTrainer),
    )):  # fmt: skip
        actual = stages(tmp_path / f"b{i}", *kinds, **options)
        for row, expected_row in zip(actual, expected, strict=True):
            close = {"rel": 2e-2, "abs": 2e-2} if "bf16" in options else {"rel": 1e-4, "abs": 1e-5}
            assert row == pytest.approx(expected_row, **close), kinds
    with pytest.raises(ValueError, match="model: its forward was replaced after this trainer"):
        stages(tmp_path / "c", FusedGRPOTrainer, GRPOTrainer, FusedGRPOTrainer, **options)


def test_a_users_own_head_is_not_replaced(tmp_path):
    model = decided_model("qwen2")
    attach_fused_head(model)
    args, tokenizer = arguments_of(tmp_path), make_tokenizer()
    with pytest.raises(ValueError, match="has a fused head already, with keyword='fused_head'"):
        FusedGRPOTrainer(model, noise, args, prompts(), processing_class=tokenizer)


# Options of TRL's loss that a callback may change, with other values.
CHANGED = {
    "epsilon_low": {"epsilon_low": 0.0}, "epsilon_high": {"epsilon_high": 0.0},
    "importance_sampling_level": {"importance_sampling_level": "sequence"},
    "top_entropy_quantile": {"top_entropy_quantile": 0.6}, "loss_type": {"loss_type": "dr_grpo"},
    "args": {"delta": 1.001},
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_options_are_those_of_the_step(name, tmp_path):
    """Reads the trainer where TRL does, else its arguments; losses are not compared here."""

    def changed(kind):
        class Changed(kind):
            def _compute_loss(self, model, inputs):
                owner = self.args if name == "args" else self
                vars(owner).update(CHANGED[name])
                return super()._compute_loss(model, inputs)

        return Changed

    options = {"loss_type": "grpo", "epsilon": 0.5, **TWICE}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(micro_batch, "check_is_due", lambda state: False)
        actual = trained(changed(FusedGRPOTrainer), tmp_path / "mine", **options)
    expected = trained(changed(GRPOTrainer), tmp_path / "theirs", **options)
    assert_same_training(actual, expected)
    unchanged = trained(GRPOTrainer, tmp_path / "unchanged", **options)
    with pytest.raises(AssertionError):
        assert_same_training(unchanged, expected)


def test_every_option_is_read_where_trl_reads_it():
    source = inspect.getsource(GRPOTrainer._compute_loss)
    for option in set(OF_TRLS_LOSS) & set().union(*map(flat_fields, LOSSES)):
        name = "epsilon_low" if option == "epsilon" else option
        on_trainer = re.search(rf"self\.{name}\b", source) is not None
        trainer = SimpleNamespace(args=SimpleNamespace(**{option: "args"}))
        if on_trainer:
            setattr(trainer, name, "trainer")
        else:
            assert re.search(rf"self\.args\.{name}\b", source) or option not in source, option
        assert value_of(trainer, option) == ("trainer" if on_trainer else "args")


class OwnLoss(GRPOTrainer):
    """A trainer whose loss is not TRL's, as GMPO's is in TRL."""

    def _compute_loss(self, model, inputs):
        masks = (inputs["prompt_mask"], inputs["completion_mask"])
        ids = (inputs["prompt_ids"], inputs["completion_ids"])
        logps, _, _ = self._get_per_token_logps_and_entropies(
            model, torch.cat(ids, 1), torch.cat(masks, 1), ids[1].shape[1]
        )
        return -(inputs["advantages"][:, None] * logps * masks[1]).mean()


class OwnStep(OwnLoss):
    def compute_loss(self, model, inputs, **kwargs):
        return self._compute_loss(model, inputs)


@pytest.mark.parametrize("kind", (OwnLoss, OwnStep))
def test_options_of_the_loss_on_a_trainer_with_its_own(kind, tmp_path):
    """The head is ours; an option that would do nothing is an error before a weight moves."""
    expected = trained(kind, tmp_path / "theirs")
    with patch_trl():
        assert_same_training(trained(kind, tmp_path / "mine"), expected)

    class Explained(kind):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.add_callback(ExplainCallback(self, every=1))

    for trainer_class, options, message in (
        (kind, {"loss": Clip()}, "loss: no effect on .*, whose _compute_loss does not call"),
        (kind, {"exact_kl": True, "loss": Clip()}, "loss, exact_kl: no effect on"),
        (kind, {"skip_untrained": True}, "skip_untrained: no effect on"),
        (kind, {"sort_by_length": True}, "sort_by_length: no effect on"),
        (Explained, {}, "ExplainCallback: no effect on"),
    ):
        trainer_class.gradient_needs_advantage = True
        beta = {"beta": 0.1} if "exact_kl" in options else {}
        with patch_trl(**options), pytest.raises(ValueError, match=message):
            trained(trainer_class, tmp_path / "refused", **beta)

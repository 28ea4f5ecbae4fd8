"""TRL's trainer under `patch_trl`, in other versions, as a subclass, and beside another trainer."""

import inspect
import re
from contextlib import nullcontext
from dataclasses import fields
from types import FunctionType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

pytest.importorskip("trl", reason="needs the extra 'test'")
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

from grpo_kernels.explain import logs
from grpo_kernels.explain.rules import verdicts
from grpo_kernels.head.execution import Execution
from grpo_kernels.head.products import INVARIANT_ROWS
from grpo_kernels.integrations.patching import is_ours
from grpo_kernels.integrations.trl import FusedGRPOTrainer, patch_trl
from grpo_kernels.integrations.trl.explain import ExplainCallback
from grpo_kernels.integrations.trl.loss import OF_TRLS_LOSS, check_is_due, value_of
from grpo_kernels.integrations.trl.state import Options, State
from grpo_kernels.integrations.trl.versions import NEWEST, OLDEST, check_version
from grpo_kernels.loss.losses import LOSSES, Clip, flat_fields
from tests.helpers.head_options import watch_products
from tests.helpers.model_families import LORAS
from tests.helpers.tiny_models import make_tokenizer
from tests.helpers.trl_runs import (
    STEPS,
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


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A run of TRL's own trainer."""
    return trained(GRPOTrainer, tmp_path_factory.mktemp("theirs"), **TWICE)


@pytest.mark.parametrize(
    ("options", "products"),
    (
        ({}, 2),
        ({"loss_type": "grpo", "entropy_coef": 0.1}, 2),
        ({"loss_type": "vespo"}, 3),
        ({"off_policy_mask_threshold": 1e-3}, 3),
        ({"top_entropy_quantile": 0.4}, 3),
    ),
)
def test_logits_are_made_once_where_the_loss_is_of_tokens(options, products, tmp_path, monkeypatch):
    """The head's products: logits, again where need be, and the gradient of the states."""
    watch_products(monkeypatch, product := MagicMock(wraps=torch.mm))
    losses, *_ = trained(FusedGRPOTrainer, tmp_path, max_steps=1, **options)
    assert product.call_count == products * len(losses)


def test_a_compiled_model_has_its_calls_between_graphs(theirs, tmp_path):
    """The body is one graph, as TRL asks for."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    options = {"torch_compile": True, "torch_compile_backend": "eager"}
    actual = trained(FusedGRPOTrainer, tmp_path, **options, **TWICE)
    assert counters["graph_break"] and all(
        "`fused_grpo_loss`" in x for x in counters["graph_break"]
    )
    assert counters["frames"]["total"] == counters["frames"]["ok"]
    assert_same_run(actual, theirs)


def test_ratios_of_equal_weights_are_exactly_1(tmp_path):
    """Old log-probs by TRL, over another batch than the loss; the weights stand still.

    TRL counts what lies outside of an interval that is the number 1.
    """
    options = {"learning_rate": 0.0, "per_device_train_batch_size": 2, **TWICE, "epsilon": 0.0}
    execution = Execution(batch_invariant=True)
    _, log, _ = trained(FusedGRPOTrainer, tmp_path, execution=execution, **options)
    outside = [row["clip_ratio/region_mean"] for row in log if "loss" in row]
    assert len(outside) >= 3 and not any(outside)


def test_lora_on_the_head_is_trained(tmp_path):
    """TRL's own head reads the layer's weight alone and leaves the adapter out."""
    *_, weights = trained(FusedGRPOTrainer, tmp_path, peft_config=LORA["head"])
    outer = [w for name, w in weights.items() if "lm_head.lora_B" in name]
    assert len(outer) == 1 and outer[0].abs().max() > 0


# The patch


def test_patched(theirs, tmp_path, monkeypatch):
    original = GRPOTrainer._compute_loss
    with patch_trl():
        assert GRPOTrainer._compute_loss is not original
        assert_same_run(trained(GRPOTrainer, tmp_path / "b", **TWICE), theirs)
    assert GRPOTrainer._compute_loss is original and not is_ours(GRPOTrainer.__init__)
    patched = patch_trl(execution=Execution(batch_invariant=True))
    watch_products(monkeypatch, product := MagicMock(wraps=torch.mm))
    assert_same_run(trained(GRPOTrainer, tmp_path / "c", **TWICE), theirs)
    assert {len(call.args[0]) for call in product.mock_calls} == {INVARIANT_ROWS}
    patched.undo()
    patched.undo()
    assert GRPOTrainer._compute_loss is original


def training(trainer_class, before=lambda: None, around=nullcontext):
    """A trainer class that does something before its training, and trains within a context."""

    class Training(trainer_class):
        def train(self, *args, **kwargs):
            before()
            with around():
                return super().train(*args, **kwargs)

    return Training


def test_a_patch_that_ends_before_the_training(theirs, tmp_path):
    """The run is TRL's without an option; with one it is refused."""
    patch = patch_trl()
    assert_same_run(trained(training(GRPOTrainer, patch.undo), tmp_path / "b", **TWICE), theirs)
    for options, more in (
        ({"loss": Clip()}, {}), ({"skip_untrained": True}, {}), ({"replay_support": True}, TOP_K)
    ):  # fmt: skip
        patch = patch_trl(**options)
        message = f"{next(iter(options))}: no effect without patch_trl, which has ended"
        with pytest.raises(ValueError, match=message):
            trained(training(GRPOTrainer, patch.undo), tmp_path / "c", **more)


def test_a_trainer_made_before_the_patch(theirs, tmp_path):
    """TRL's is not touched, and ours keeps its options."""
    kind = training(GRPOTrainer, around=patch_trl)
    assert_same_run(trained(kind, tmp_path / "a", **TWICE), theirs)
    options = {"replay_support": True, **TOP_K, **TWICE}
    expected = trained(FusedGRPOTrainer, tmp_path / "b", **options)
    kind = training(FusedGRPOTrainer, around=patch_trl)
    assert_same_run(trained(kind, tmp_path / "c", **options), expected)


# Other versions


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

    def refused(message):
        patched = patch_trl if entry == "patch" else nullcontext
        kind = GRPOTrainer if entry == "patch" else FusedGRPOTrainer
        with pytest.raises(RuntimeError, match=message), patched():
            trained(kind, tmp_path)

    for name in ("_compute_loss", "_get_per_token_logps_and_entropies"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GRPOTrainer, name + "_of_1_17", getattr(GRPOTrainer, name), False)
            patch.delattr(GRPOTrainer, name)
            refused(f"trl: expected .* have GRPOTrainer.{name}; got")
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(grpo_trainer, "add_fused_lm_head")
        refused(r"trl: expected .*\.add_fused_lm_head; got")
    with pytest.MonkeyPatch.context() as patch:  # a constructor that has it from elsewhere
        init = GRPOTrainer.__init__
        moved = FunctionType(init.__code__, {**vars(grpo_trainer)}, closure=init.__closure__)
        moved.__defaults__, moved.__kwdefaults__ = init.__defaults__, init.__kwdefaults__
        patch.setattr(GRPOTrainer, "__init__", moved)
        refused("whose GRPOTrainer calls add_fused_lm_head; got")


def test_losses_are_compared_at_first_and_then_now_and_then():
    """Each time the CPU waits for the GPU."""
    state = State(Options())
    due = [i for i in range(320) if check_is_due(state)]
    assert due == [*range(20), 100, 200, 300]


def test_newer_versions_are_warned_of():
    major, minor = NEWEST.split(".")
    new = f"{major}.{int(minor) + 1}rc1"
    with pytest.warns(UserWarning, match=f"TRL {OLDEST} to {NEWEST}, .* got {new}. Its loss"):
        check_version(new)
    for tested in (f"{OLDEST}.0", f"{NEWEST}.3"):
        check_version(tested)


def test_without_peft(monkeypatch):
    """TRL does not have the name of an adapter's class then."""
    monkeypatch.delattr(grpo_trainer, "BaseTunerLayer")
    with patch_trl():
        assert not hasattr(grpo_trainer, "BaseTunerLayer")


# Options that `_compute_loss` reads and that are none of a loss; TRL acts on all but the first.
NO_LOSS_OPTIONS = {
    "beta", "use_bias_correction_kl", "max_completion_length", "entropy_coef", "entropy_coef_delta",
    "entropy_coef_max", "entropy_coef_min", "entropy_target", "use_adaptive_entropy",
    "router_aux_loss_coef", "steps_per_generation", "use_vllm",
    "vllm_importance_sampling_correction",
}  # fmt: skip


def test_every_option_of_the_loss_is_read_where_trl_reads_it():
    source = inspect.getsource(GRPOTrainer._compute_loss)
    names = [option.name for option in fields(GRPOConfig)]
    read = {name for name in names if re.search(rf"self\.(args\.)?{name}\b", source)}
    assert read - NO_LOSS_OPTIONS <= OF_TRLS_LOSS.keys()
    assert {"epsilon", "delta", "loss_type", "sapo_temperature_neg"} <= OF_TRLS_LOSS.keys()
    for option in set(OF_TRLS_LOSS) & set().union(*map(flat_fields, LOSSES)):
        name = "epsilon_low" if option == "epsilon" else option
        on_trainer = re.search(rf"self\.{name}\b", source) is not None
        trainer = SimpleNamespace(args=SimpleNamespace(**{option: "args"}))
        if on_trainer:
            setattr(trainer, name, "trainer")
        else:
            assert re.search(rf"self\.args\.{name}\b", source) or option not in source, option
        assert value_of(trainer, option) == ("trainer" if on_trainer else "args")


# Trainers that share a model, and losses of subclasses


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


SHARED = {"lora": {"peft_config": LORA["body"]}, "wrapped by accelerate": {"bf16": True}}


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
def test_a_trainer_with_its_own_loss(kind, tmp_path):
    """The head is ours; options of the loss are refused."""
    expected = trained(kind, tmp_path / "theirs")
    with patch_trl():
        assert_same_training(trained(kind, tmp_path / "mine"), expected)


# Explanations and logs


class Jumping(FusedGRPOTrainer):
    """A trainer whose first step comes after seven calm ones."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.explainer = ExplainCallback(self)
        self.add_callback(self.explainer)

    def log(self, logs, *args, **kwargs):
        if "grad_norm" in logs and self.state.global_step == 1:
            self.explainer.steps.open([{"step": i, "grad_norm": 1e-9} for i in range(7)])
        super().log(logs, *args, **kwargs)


def test_a_spike_is_a_warning(theirs, tmp_path, capsys):
    """The page of a step leaves no trace in the weights."""
    assert_same_run(trained(Jumping, tmp_path, **TWICE), theirs)
    assert "warning: step 1 explained (grad_norm is " in capsys.readouterr().out


def test_what_trl_logs_and_prints_is_read(tmp_path, capsys):
    """The same rows from its file and from its lines, and the signs that they have."""
    options = {"save_strategy": "steps", "save_steps": STEPS, "learning_rate": 1e-4}
    model, tokenizer = decided_model("llama"), make_tokenizer()
    trainer = GRPOTrainer(
        model=model, reward_funcs=noise, args=arguments_of(tmp_path, **options),
        train_dataset=prompts(), processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    (printed := tmp_path / "run.log").write_text(capsys.readouterr().out)
    rows, *_ = logs.read(tmp_path / f"checkpoint-{STEPS}" / "trainer_state.json")
    assert [row["step"] for row in rows] == [1, 2, 3] and rows[0].keys() >= {
        "loss", "grad_norm", "learning_rate", "reward", "reward_std", "groups_equal", "entropy",
        "completion_length", "truncated", "clip_ratio/region_mean",
    }  # fmt: skip
    lines, *_ = logs.read(printed)
    assert [row.keys() for row in lines] == [row.keys() for row in rows]
    assert [row["reward"] for row in lines] == pytest.approx([row["reward"] for row in rows], 1e-3)
    found = [x.rule.name for x in verdicts(rows)]
    assert found == ["truncated", "loss_zero", "kl_absent", "clip_zero"]

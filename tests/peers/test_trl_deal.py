"""TRL's updates with completions left out: states, what is logged, and groups of equal rewards.

The updates themselves are in `test_trl.py`, beside TRL's.
"""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("trl", reason="needs the extra 'test'")
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig
from trl import GRPOTrainer

from grpo_kernels.integrations.trl import FusedGRPOTrainer, deal
from grpo_kernels.integrations.trl.explain import ExplainCallback
from tests.helpers.trl_runs import FOUR, assert_same_updates, rewards_of, run, steps_of

pytestmark = pytest.mark.usefixtures("real_memory", "own_precision")
SKIP = {"skip_untrained": True}


def test_steps_without_anything_to_learn(tmp_path):
    """Momentum and weight decay still move weights, as in TRL."""
    options = {
        "optim": "adamw_torch", "weight_decay": 0.1, "learning_rate": 1e-3, "max_steps": 6,
        "share": 0.6, "gradient_accumulation_steps": 1, "loss_type": "grpo",
    }  # fmt: skip
    expected = run(FusedGRPOTrainer, tmp_path / "all", **options)
    actual = run(FusedGRPOTrainer, tmp_path / "skipped", **SKIP, **options)
    norms = steps_of(expected[1], "grad_norm")
    assert 0 in norms and max(norms) > 0.01
    assert_same_updates(actual, expected, tolerance=1e-5)


def test_fp16_with_a_scaled_loss(tmp_path, monkeypatch):
    """Adapters in float32, as on a GPU without bf16; some steps have nothing to learn.

    accelerate has neither autocast nor a scaled loss for fp16 on a CPU, so this adds them.
    """
    options = {
        "peft_config": LoraConfig(r=4, task_type="CAUSAL_LM", target_modules="all-linear"),
        "share": 0.6, "gradient_accumulation_steps": 1, "max_steps": 6,
        "gradient_checkpointing": True, **SKIP,
    }  # fmt: skip
    expected = run(FusedGRPOTrainer, tmp_path / "fp32", **options)
    init, scalers = Accelerator.__init__, []

    def on_a_gpu(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.native_amp, self.scaler = True, torch.amp.GradScaler("cpu", 2.0**8)
        scalers.append(self.scaler)

    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setattr(Accelerator, "__init__", on_a_gpu)
    actual = run(FusedGRPOTrainer, tmp_path / "fp16", fp16=True, **options)
    assert scalers[0].get_scale() == 2**8  # no step was skipped
    norms, expected_norms = (steps_of(x[1], "grad_norm") for x in (actual, expected))
    assert 0 in expected_norms and max(expected_norms) > 0.01
    # fp16 rounds, so some digits differ.
    assert norms != expected_norms == pytest.approx(norms, rel=3e-2)
    for name, weight in expected[2].items():
        assert weight.dtype == actual[2][name].dtype == torch.float32
        torch.testing.assert_close(actual[2][name], weight, msg=name, rtol=0, atol=1e-4)


def test_kept_sets_are_dealt_with_their_completions(tmp_path):
    options = {"replay_support": True, "top_k": 5, "num_iterations": 2, **FOUR}
    options |= {"completions": None, "mask_truncated_completions": True, "loss_type": "vespo"}
    expected = run(FusedGRPOTrainer, tmp_path / "all", **options)
    assert_same_updates(run(FusedGRPOTrainer, tmp_path / "skipped", **SKIP, **options), expected)


def test_clip_ratios_are_those_of_computed_tokens(tmp_path):
    """A clipped token has an advantage."""
    options = {"loss_type": "grpo", "epsilon": 0.01, "num_iterations": 2, **FOUR}
    _, theirs, _ = run(GRPOTrainer, tmp_path / "theirs", **options)
    _, log, _ = run(FusedGRPOTrainer, tmp_path / "mine", **SKIP, **options)
    ratios, expected = (steps_of(x, "clip_ratio/region_mean") for x in (log, theirs))
    assert max(expected) > 0
    assert all(1 >= x >= y for x, y in zip(ratios, expected, strict=True))


def test_entropy_is_that_of_computed_tokens(tmp_path):
    """A micro-batch that no process computes does not count, and neither do masked rows."""
    seen = []

    class Seen(FusedGRPOTrainer):
        gradient_needs_advantage = True

        def _get_per_token_logps_and_entropies(self, model, ids, mask, T, *args, **kwargs):
            out = super()._get_per_token_logps_and_entropies(model, ids, mask, T, *args, **kwargs)
            seen.append((out[1] * mask[:, -T:]).sum() / mask[:, -T:].sum())
            return out

    _, log, _ = run(Seen, tmp_path, **SKIP, **FOUR)
    entropies = torch.stack(seen).view(-1, 4)
    assert entropies.isnan().any(1).all() and not entropies.isnan().all(1).any()
    assert steps_of(log, "entropy") == pytest.approx(entropies.nanmean(1).tolist(), rel=1e-5)


def test_a_run_that_is_resumed(tmp_path):
    """The first update after it begins within a generation batch of the run before."""
    options = {
        "gradient_accumulation_steps": 2, "steps_per_generation": 6, "num_iterations": 2,
        "save_strategy": "steps", "save_steps": 2,
    }  # fmt: skip
    runs = []
    for name, kind, ours in (
        ("theirs", GRPOTrainer, {}), ("mine", FusedGRPOTrainer, SKIP)
    ):  # fmt: skip
        run(kind, tmp_path / name, max_steps=2, **options, **ours)
        checkpoint = str(tmp_path / name / "checkpoint-2")
        runs.append(run(kind, tmp_path / name, max_steps=8, resume=checkpoint, **options, **ours))
    assert_same_updates(*reversed(runs))


def test_explanations_are_of_the_computed_completions(tmp_path):
    class Explained(FusedGRPOTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.add_callback(ExplainCallback(self, every=1))

    run(Explained, tmp_path, **SKIP, loss_type="vespo", num_iterations=2, **FOUR)
    assert len([*tmp_path.rglob("*.html")]) == 3


# Groups of equal rewards

ROUNDING = {"optim": "adamw_torch", "learning_rate": 1e-3, "rewards": rewards_of(1.0, 0.3)}


def test_equal_rewards_move_nothing(tmp_path):
    """The mean of six rewards of 0.3 is not 0.3 in float32, and AdamW takes full steps by it."""
    start = run(GRPOTrainer, tmp_path / "start", learning_rate=0.0)[2]
    six = {"num_generations": 6, "per_device_train_batch_size": 6}

    def moved(trainer_class, name, **options):
        _, log, weights = run(trainer_class, tmp_path / name, **ROUNDING, **six, **options)
        return max(float((weights[k] - x).abs().max()) for k, x in start.items()), log

    (theirs, log), (mine, _) = moved(GRPOTrainer, "theirs"), moved(FusedGRPOTrainer, "mine")
    assert theirs > 2e-3 and max(steps_of(log, "frac_reward_zero_std")) == 0
    assert mine == 0
    assert moved(FusedGRPOTrainer, "as TRL", zero_equal_groups=False)[0] == pytest.approx(theirs)


# rewards of a group by function, whether they are equal, whatever their mean rounds to
NONE = float("nan")
GROUPS = (
    ([[0.3]] * 5 + [[NONE]], True),
    ([[NONE]] * 6, True),
    ([[1e5]] * 5 + [[1e5 + 2**-7]], False),  # one bit: advantages are one number and zeros
    ([[0.25, 0.5]] * 3 + [[0.5, 0.25]] * 3, "the sum"),
    ([[0.3, 0.9]] * 5 + [[0.3, NONE]], "each"),
    ([[0.3, 0.9]] * 5 + [[NONE, NONE]], True),
)


@pytest.mark.parametrize("how", ("sum_then_normalize", "normalize_then_sum"))
@pytest.mark.parametrize("training", (True, False))
def test_groups_of_equal_rewards(how, training):
    """On each of two processes, which have half of a group of each other."""
    other = [[float(i), 0.0] for i in range(6)]
    for rewards, equal in GROUPS:
        rewards = torch.tensor(rewards)
        every = torch.cat([rewards, torch.tensor(other)[:, : rewards.shape[1]]])
        found = []
        for process in range(2):
            sizes = {"num_generations": 6, "num_generations_eval": 99}
            trainer = SimpleNamespace(
                model=SimpleNamespace(training=training), multi_objective_aggregation=how,
                accelerator=SimpleNamespace(process_index=process),
                reward_weights=torch.ones(rewards.shape[1]),
                **(sizes if training else dict(zip(sizes, (99, 6), strict=True))),
            )  # fmt: skip
            batch = {"advantages": torch.full((6,), 2.0)}
            found.append(deal.zero_equal_groups(trainer, every, batch)["advantages"])
        by_sum = how == "sum_then_normalize"
        expected = {"the sum": by_sum, "each": not by_sum}.get(equal, equal)
        assert found[0].tolist() == [0.0 if expected else 2.0] * 6, rewards
        assert found[1].tolist() == [2.0] * 6


class Raw(GRPOTrainer):
    """Advantages without a baseline, as the user's own class makes them."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        return batch | {"advantages": torch.ones_like(batch["advantages"])}


def test_advantages_of_one_s_own_stay(tmp_path):
    expected = run(Raw, tmp_path / "theirs", share=1.0, **FOUR)
    for bases in ((FusedGRPOTrainer, Raw), (Raw, FusedGRPOTrainer)):
        assert_same_updates(run(type("Mixed", bases, {}), tmp_path, share=1.0, **FOUR), expected)

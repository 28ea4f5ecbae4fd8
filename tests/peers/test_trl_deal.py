"""TRL's updates with completions left out, or moved: TRL's own weights and gradient norms."""

import random

import pytest
import torch

pytest.importorskip("trl", reason="needs the extra 'test'")
from peft import LoraConfig
from trl import GRPOTrainer

from grpo_kernels.integrations.trl import FusedGRPOTrainer, deal, micro_batch, patch_trl
from grpo_kernels.integrations.trl.explain import ExplainCallback
from grpo_kernels.loss.losses import Clip, Vespo
from tests.helpers.trl_runs import trained

pytestmark = pytest.mark.usefixtures("real_memory")
LENGTH = 16
FOUR = {"gradient_accumulation_steps": 4}


def completions_of(prompt_ids):
    """Completions of 1 to `LENGTH` tokens, by the prompt and its turn; a third of them end."""
    turns, done = {}, []
    for prompt in map(str, prompt_ids):
        turn = turns[prompt] = turns.get(prompt, -1) + 1
        draw = random.Random(f"{prompt} {turn}")
        ids = [draw.randrange(33, 90) for _ in range(draw.randrange(1, LENGTH + 1))]
        done.append([*ids[:-1], 0] if turn % 3 else ids)
    return done


def rewards_of(share, equal=1.0):
    """Equal rewards for `share` of the prompts; of others' two are the mean of the group."""

    def reward(prompts, **_):
        turns, rewards = {}, []
        for prompt in prompts:
            turn = turns[prompt] = turns.get(prompt, -1) + 1
            same = random.Random(f"of {prompt}").random() < share
            rewards.append(equal if same else (0.0, 1.0, 2.0, 1.0)[turn % 4])
        return rewards

    return reward


def run(trainer_class, folder, share=0.5, **options):
    return trained(trainer_class, folder, **{
        "completions": completions_of, "rewards": rewards_of(share), "num_generations": 4,
        "per_device_train_batch_size": 6 if options.get("gradient_accumulation_steps") == 4 else 4,
        "max_completion_length": LENGTH, **options,
    })  # fmt: skip


def steps_of(log, name):
    return [row[name] for row in log if "loss" in row and name in row]


def assert_same_updates(actual, expected, tolerance=1e-6):
    """Compares losses and gradient norms of the steps, what TRL logs of tokens, and weights."""
    for name in ("grad_norm", "loss", "num_tokens", "completions/mean_length", "reward"):
        values, theirs = (steps_of(log, name) for _, log, _ in (actual, expected))
        assert values == pytest.approx(theirs, rel=2e-5, abs=1e-6), name
    assert max(steps_of(expected[1], "grad_norm")) > 0.01
    for name, weight in expected[2].items():
        torch.testing.assert_close(actual[2][name], weight, msg=name, rtol=0, atol=tolerance)


def weights_of_vllm(batch):
    weights = (batch["completion_ids"] % 7 + 1) / 5
    return {"importance_sampling_ratio": weights.masked_fill(batch["completion_mask"] == 0, 1.0)}


def a_tool_s_words(batch):
    """Masks out a tool's tokens, and gives the other tokens an advantage each."""
    ids, rows = batch["completion_ids"], batch["advantages"][:, None]
    return {"tool_mask": (ids % 5 != 0).long(), "advantages": rows * (ids % 3 + 1)}


LOSSES = ("dapo", "grpo", "dr_grpo", "bnpo", "sapo", "luspo", "vespo")
# Options of both trainers.
CASES = {
    **{name: {"loss_type": name, **FOUR} for name in LOSSES},
    "cispo, twice": {"loss_type": "cispo", "epsilon_high": 1.5, "num_iterations": 2, **FOUR},
    "every completion counts": {"share": 0.0, **FOUR},
    "nothing to learn in most steps": {"share": 0.6, "loss_type": "grpo", "max_steps": 6},
    "several updates of a batch, twice": {
        "gradient_accumulation_steps": 2, "steps_per_generation": 4, "num_iterations": 2,
        "max_steps": 6,
    },
    "a step of two batches": {"gradient_accumulation_steps": 4, "steps_per_generation": 2},
    "steps that begin within a batch": {
        "gradient_accumulation_steps": 2, "steps_per_generation": 3, "max_steps": 5,
    },
    "a step that ends with the epoch": {"max_steps": 8, **FOUR},
    "sequence": {
        "loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2, **FOUR
    },
    "off_policy": {"off_policy_mask_threshold": 1e-3, "num_iterations": 2, **FOUR},
    "sampler's correction": {"scored": weights_of_vllm, "loss_type": "grpo", **FOUR},
    "vespo with a sampler's correction": {"scored": weights_of_vllm, "loss_type": "vespo", **FOUR},
    "tool": {"scored": a_tool_s_words, **FOUR},
    "scale_rewards": {"scale_rewards": "batch", **FOUR},
    "truncated, padded to 8": {"mask_truncated_completions": True, "pad_to_multiple_of": 8, **FOUR},
    "checkpointed": {"gradient_checkpointing": True, **FOUR},
    "learned positions": {"family": "gpt2", "disable_dropout": True, **FOUR},
    "lora": {"peft_config": LoraConfig(r=4, task_type="CAUSAL_LM"), "learning_rate": 0.5, **FOUR},
    "evaluation": {"evaluate": True, "per_device_eval_batch_size": 4, **FOUR},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_same_updates_without_what_has_no_gradient(case, tmp_path):
    options, calls, theirs = CASES[case], [], []
    expected = run(GRPOTrainer, tmp_path / "theirs", calls=theirs, **options)
    actual = run(FusedGRPOTrainer, tmp_path / "mine", calls=calls, skip_untrained=True, **options)
    assert_same_updates(actual, expected)
    rows, all_rows = (sum(shape[0] for shape in x) for x in (calls, theirs))
    cells, all_cells = (sum(shape[0] * shape[1] for shape in x) for x in (calls, theirs))
    if options.get("num_iterations", 1) == 1 and "steps_per_generation" not in options:
        # Otherwise old log-probs, of all completions, are computed while the model trains.
        share = options.get("share", 0.5)
        assert rows < (1 - share) * all_rows and cells < 0.8 * (1 - share) * all_cells
    assert rows <= all_rows and cells < all_cells


def test_steps_without_anything_to_learn(tmp_path):
    """Momentum and weight decay still move weights, as in TRL."""
    options = {
        "optim": "adamw_torch", "weight_decay": 0.1, "learning_rate": 1e-3, "max_steps": 6,
        "share": 0.6, "gradient_accumulation_steps": 1, "loss_type": "grpo",
    }  # fmt: skip
    expected = run(FusedGRPOTrainer, tmp_path / "all", **options)
    actual = run(FusedGRPOTrainer, tmp_path / "skipped", skip_untrained=True, **options)
    norms = steps_of(expected[1], "grad_norm")
    assert 0 in norms and max(norms) > 0.01
    assert_same_updates(actual, expected, tolerance=1e-5)


def test_kept_sets_are_dealt_with_their_completions(tmp_path):
    options = {"replay_support": True, "top_k": 5, "num_iterations": 2, **FOUR}
    options |= {"completions": None, "mask_truncated_completions": True}
    for loss_type in ("dapo", "vespo"):
        more = {**options, "loss_type": loss_type}
        expected = run(FusedGRPOTrainer, tmp_path / f"{loss_type}-all", **more)
        actual = run(FusedGRPOTrainer, tmp_path / loss_type, skip_untrained=True, **more)
        assert_same_updates(actual, expected)


SORTED = {
    "a KL": {"beta": 0.1, "loss_type": "grpo"},
    "dapo, a KL, truncated": {"beta": 0.1, "mask_truncated_completions": True},
    "sequence": {"importance_sampling_level": "sequence", "loss_type": "dr_grpo"},
}


@pytest.mark.parametrize("case", SORTED)
def test_completions_sorted_by_length(case, tmp_path):
    options, calls, theirs = {**FOUR, "num_iterations": 2, **SORTED[case]}, [], []
    expected = run(GRPOTrainer, tmp_path / "theirs", calls=theirs, **options)
    actual = run(FusedGRPOTrainer, tmp_path / "mine", calls=calls, sort_by_length=True, **options)
    assert_same_updates(actual, expected)
    cells, all_cells = (sum(shape[0] * shape[1] for shape in x) for x in (calls, theirs))
    assert cells < all_cells and len(calls) <= len(theirs)


def test_an_exact_kl_of_completions_sorted_by_length(tmp_path):
    options = {"exact_kl": True, "beta": 1.0, "num_iterations": 2, **FOUR}
    expected = run(FusedGRPOTrainer, tmp_path / "theirs", **options)
    actual = run(FusedGRPOTrainer, tmp_path / "mine", sort_by_length=True, **options)
    assert_same_updates(actual, expected)


class Own(GRPOTrainer):
    """A trainer with a loss of its own, which is TRL's twice."""

    gradient_needs_advantage = True

    def _compute_loss(self, model, inputs):
        return 2 * super()._compute_loss(model, inputs)


def test_losses_of_one_s_own(tmp_path):
    """As a loss, and as a subclass under the patch, both of which say what they need."""
    for loss in (Clip(), Clip(aggregation="bnpo"), Vespo()):
        name = f"{type(loss).__name__} {loss.aggregation}"
        expected = run(FusedGRPOTrainer, tmp_path / name, loss=loss, **FOUR)
        actual = run(
            FusedGRPOTrainer, tmp_path / f"{name} skipped", loss=loss, skip_untrained=True, **FOUR
        )
        assert_same_updates(actual, expected)
    expected = run(Own, tmp_path / "own", **FOUR)
    with patch_trl(skip_untrained=True):
        assert_same_updates(run(Own, tmp_path / "patched", **FOUR), expected)


@pytest.mark.parametrize("loss_type", ("grpo", "bnpo"))
def test_a_wrong_denominator_is_seen(loss_type, tmp_path, monkeypatch):
    """By gradient norms: on policy the value of a loss hardly depends on log-probs."""
    own = deal.Dealer.deal

    def damaged(self, trainer, batches):
        dealt = own(self, trainer, batches)
        for batch in dealt:
            batch[deal._PART].share = 1.0
        return dealt

    options = {"loss_type": loss_type, **FOUR}
    expected = run(GRPOTrainer, tmp_path / "theirs", **options)
    monkeypatch.setattr(deal.Dealer, "deal", damaged)
    monkeypatch.setattr(micro_batch, "check_is_due", lambda state: False)
    actual = run(FusedGRPOTrainer, tmp_path, skip_untrained=True, **options)
    with pytest.raises(AssertionError, match="grad_norm"):
        assert_same_updates(actual, expected)


def test_what_trl_logs(tmp_path):
    """The table of docs/integrations.md."""
    options = {"loss_type": "grpo", "epsilon": 0.01, "num_iterations": 2, **FOUR}
    (_, theirs, _), (_, log, _) = (
        run(kind, tmp_path / kind.__name__, **more, **options)
        for kind, more in ((GRPOTrainer, {}), (FusedGRPOTrainer, {"skip_untrained": True}))
    )
    assert [row.keys() for row in log] == [row.keys() for row in theirs]
    loss_names = ("entropy", "clip_ratio")
    for row, expected in zip(log, theirs, strict=True):
        for name, value in expected.items():
            if name.startswith(loss_names):
                # Of tokens with a gradient alone; a clipped one has an advantage.
                assert 0 <= row[name] < 10
            elif not any(word in name for word in ("runtime", "per_second", "time", "flos")):
                assert row[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    clipped, expected = (
        [row["clip_ratio/region_mean"] for row in x if "loss" in row] for x in (log, theirs)
    )
    assert max(expected) > 0
    assert all(x >= y for x, y in zip(clipped, expected, strict=True))


def test_explanations_are_of_the_computed_completions(tmp_path):
    class Explained(FusedGRPOTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.add_callback(ExplainCallback(self, every=1))

    for loss_type in ("grpo", "vespo"):
        folder = tmp_path / loss_type
        run(Explained, folder, skip_untrained=True, loss_type=loss_type, num_iterations=2, **FOUR)
        assert len([*folder.rglob("*.html")]) == 3


# (options, what is wrong)
REFUSED = {
    "beta": ({"beta": 0.1}, r"beta > 0.*set beta=0\.0, or pass sort_by_length=True"),
    "entropy bonus": ({"entropy_coef": 0.1}, "an entropy bonus.*set entropy_coef"),
    "quantile": ({"top_entropy_quantile": 0.2}, "set top_entropy_quantile=1.0"),
    "experts": ({"family": "qwen3_moe"}, "set router_aux_loss_coef=0.0"),
    "a function": ({"loss": lambda t: -t.advantages * t.logps}, "declare token_local or needs"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case, tmp_path):
    options, message = REFUSED[case]
    with pytest.raises(ValueError, match=f"skip_untrained=True does not work with .*{message}"):
        run(FusedGRPOTrainer, tmp_path, skip_untrained=True, **options)


def test_more_that_is_refused(tmp_path):
    def advantages_or_not(tokens):
        return tokens.logps.square()

    advantages_or_not.token_local = True
    with pytest.raises(ValueError, match="declare gradient_needs_advantage"):
        run(FusedGRPOTrainer, tmp_path, skip_untrained=True, loss=advantages_or_not)
    with pytest.raises(ValueError, match="sort_by_length=True does not work with bnpo"):
        run(FusedGRPOTrainer, tmp_path, sort_by_length=True, loss_type="bnpo")
    with pytest.raises(TypeError, match="skip_untrained: expected a bool"):
        patch_trl(skip_untrained="sorted")

    class Undeclared(FusedGRPOTrainer):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs)

        gradient_needs_advantage = False

    class Annealed(Own, FusedGRPOTrainer):
        """Changes an option while it trains."""

        def _generate_and_score_completions(self, inputs):
            self.top_entropy_quantile = 0.5
            return super()._generate_and_score_completions(inputs)

    for kind, message in (
        (Undeclared, "gradient_needs_advantage = True"),
        (Annealed, "top_entropy_quantile < 1"),
    ):
        trainer_class = type("Trainer", (kind,), {})
        with pytest.raises(ValueError, match=message):
            run(trainer_class, tmp_path, skip_untrained=True)


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


@pytest.mark.parametrize("how", ("sum_then_normalize", "normalize_then_sum"))
def test_groups_of_equal_rewards(how, tmp_path):
    """Groups with a completion that no function scored, that differ by a bit, and others."""
    rows = []

    def some(prompts, **_):
        kinds = [prompt.split()[0] for prompt in prompts]
        rewards = []
        for i, kind in enumerate(kinds):
            by_kind = (0.3, 0.3 if i % 6 else None, 0.3 + (i % 6 == 1) * 1e-7, float(i % 2))
            rewards.append(by_kind[int(kind) % 4])
        return rewards

    class Seen(FusedGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            names = [int(x["prompt"].split()[0]) % 4 for x in inputs[::6]]
            rows.extend(zip(names, batch["advantages"].view(-1, 6), strict=True))
            return batch

    run(Seen, tmp_path, rewards=some, num_generations=6, multi_objective_aggregation=how, **FOUR)
    assert {kind for kind, _ in rows} == {0, 1, 2, 3}
    for kind, advantages in rows:
        assert bool((advantages != 0).any()) == (kind in (2, 3)), kind

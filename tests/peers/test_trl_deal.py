"""TRL's updates with completions left out, or moved: TRL's own weights and gradient norms."""

import random
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("trl", reason="needs the extra 'test'")
from peft import LoraConfig
from trl import GRPOTrainer

from grpo_kernels.integrations.trl import FusedGRPOTrainer, deal, micro_batch, patch_trl
from grpo_kernels.integrations.trl.explain import ExplainCallback
from grpo_kernels.loss.losses import Clip, Vespo
from tests.helpers.tiny_models import make_tokenizer
from tests.helpers.trl_runs import arguments_of, decided_model, noise, prompts, trained

pytestmark = pytest.mark.usefixtures("real_memory", "own_precision")
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
        assert values == pytest.approx(theirs, rel=20 * tolerance, abs=tolerance), name
    assert max(steps_of(expected[1], "grad_norm")) > 0.01
    for name, weight in expected[2].items():
        torch.testing.assert_close(actual[2][name], weight, msg=name, rtol=0, atol=tolerance)


def weights_of_vllm(batch):
    weights = (batch["completion_ids"] % 7 + 1) / 5
    return {"importance_sampling_ratio": weights.masked_fill(batch["completion_mask"] == 0, 1.0)}


def with_holes(batch):
    """A mask with tokens in the middle that are not trained, nor attended to."""
    return {"completion_mask": batch["completion_mask"] * (batch["completion_ids"] % 4 > 0)}


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
    "a mask with holes": {"scored": with_holes, **FOUR},
    "completions of a token": {
        "completions": lambda prompts: [[40 + i] for i, _ in enumerate(prompts)],
        "loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2, **FOUR,
    },
    "scale_rewards": {"scale_rewards": "batch", **FOUR},
    "truncated, padded to 8": {"mask_truncated_completions": True, "pad_to_multiple_of": 8, **FOUR},
    "checkpointed": {"gradient_checkpointing": True, **FOUR},
    "learned positions": {"family": "gpt2", "disable_dropout": True, **FOUR},
    "bf16": {"bf16": True, **FOUR},
    "groups of two in evaluation": {
        "evaluate": True, "per_device_eval_batch_size": 4, "num_generations_eval": 2, **FOUR
    },
    "lora": {"peft_config": LoraConfig(r=4, task_type="CAUSAL_LM"), "learning_rate": 0.5, **FOUR},
    "evaluation": {"evaluate": True, "per_device_eval_batch_size": 4, **FOUR},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_same_updates_without_what_has_no_gradient(case, tmp_path):
    options, calls, theirs = CASES[case], [], []
    expected = run(GRPOTrainer, tmp_path / "theirs", calls=theirs, **options)
    actual = run(FusedGRPOTrainer, tmp_path / "mine", calls=calls, skip_untrained=True, **options)
    assert_same_updates(actual, expected, 2e-3 if case == "bf16" else 1e-6)
    rows, all_rows = (sum(shape[0] for shape in x) for x in (calls, theirs))
    cells, all_cells = (sum(shape[0] * shape[1] for shape in x) for x in (calls, theirs))
    if options.get("num_iterations", 1) == 1 and "steps_per_generation" not in options:
        # Otherwise old log-probs, of all completions, are computed while the model trains.
        share = options.get("share", 0.5)
        assert rows < (1 - share) * all_rows and cells < 0.8 * (1 - share) * all_cells
    assert rows <= all_rows and cells < all_cells
    if case == "every completion counts":  # the longest come first in each optimizer step
        size = len(calls) // 3  # calls of each of the three steps
        steps = [[shape[1] for shape in calls[i * size : (i + 1) * size]] for i in range(3)]
        assert all(widths == sorted(widths, reverse=True) for widths in steps), steps
        assert all(widths[0] > widths[-1] for widths in steps)
    pad_to = options.get("pad_to_multiple_of", 1)
    assert not any(shape[1] % pad_to for shape in calls if shape[0] > 1)


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
    """Losses, and a subclass under the patch, say what they need."""
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
    """Gradient norms differ: on policy the value of a loss hardly depends on log-probs."""
    own = deal.Dealer.deal

    def damaged(self, trainer, batches):
        dealt = own(self, trainer, batches)
        for batch in dealt:
            batch[deal._COMPUTED].share = 1.0
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


def test_entropy_is_that_of_computed_tokens(tmp_path):
    """A micro-batch that no process computes does not count, and neither do masked rows."""
    seen = []

    class Seen(FusedGRPOTrainer):
        gradient_needs_advantage = True

        def _get_per_token_logps_and_entropies(self, model, ids, mask, T, *args, **kwargs):
            out = super()._get_per_token_logps_and_entropies(model, ids, mask, T, *args, **kwargs)
            seen.append((out[1] * mask[:, -T:]).sum() / mask[:, -T:].sum())
            return out

    _, log, _ = run(Seen, tmp_path, skip_untrained=True, **FOUR)
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
        ("theirs", GRPOTrainer, {}), ("mine", FusedGRPOTrainer, {"skip_untrained": True})
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
    "images": ({"scored": lambda batch: {"num_images": [1] * 4}}, "num_images, .*pass a tokenizer"),
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


class Around(FusedGRPOTrainer):
    def compute_loss(self, model, inputs, **kwargs):
        return super().compute_loss(model, inputs, **kwargs) + 1.0


class Behind(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, inputs) * 2


class InFront(FusedGRPOTrainer, Behind):
    pass


class Rebuilt(FusedGRPOTrainer):
    def _prepare_inputs(self, batch):
        inputs = super()._prepare_inputs(batch)
        return {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor)}


def changing(**options):
    """A trainer that gets other options after its first update of a generation batch."""

    class Changing(FusedGRPOTrainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            vars(self).update(options)
            return loss

    return Changing


TRAINERS = {
    "rebuilt": (Rebuilt, "a trainer that makes micro-batches itself"),
    "beta": (changing(beta=0.1), "beta > 0"),
    "quantile": (changing(top_entropy_quantile=0.5), "top_entropy_quantile < 1"),
    "loss": (changing(loss_type="bnpo"), "a loss_type that changes from bnpo, or to it"),
}


@pytest.mark.parametrize("name", TRAINERS)
def test_trainers_that_are_refused(name, tmp_path):
    trainer_class, message = TRAINERS[name]
    with pytest.raises(ValueError, match=f"skip_untrained=True does not work with {message}"):
        run(trainer_class, tmp_path, skip_untrained=True, num_iterations=2)


@pytest.mark.parametrize(
    ("kind", "name"),
    ((FusedGRPOTrainer, ""), (Undeclared, "Undeclared"), (Around, "Around"), (InFront, "Behind")),
)
def test_classes_with_a_loss_of_their_own(kind, name, tmp_path):
    """The classes of other tests here all have one, and declare what it needs."""

    def construct():
        kind(
            decided_model("qwen2"), noise, arguments_of(tmp_path), prompts(),
            processing_class=make_tokenizer(), skip_untrained=True,
        )  # fmt: skip

    if not name:
        construct()
        return
    with pytest.raises(ValueError, match=f"{name}, whose loss may .* = True on {name} if it"):
        construct()


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
    ([[0.3]] * 6, True),
    ([[0.3]] * 5 + [[NONE]], True),
    ([[NONE]] * 6, True),
    ([[0.1]] * 5 + [[0.2]], False),
    ([[1e5]] * 5 + [[1e5 + 2**-7]], False),  # one bit: advantages are one number and zeros
    ([[16777216.0]] * 5 + [[16777218.0]], False),
    ([[0.3, 0.9]] * 6, True),
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


@pytest.mark.parametrize("order", ("behind", "in front"))
def test_advantages_of_one_s_own_stay(order, tmp_path):
    bases = (FusedGRPOTrainer, Raw) if order == "behind" else (Raw, FusedGRPOTrainer)
    expected = run(Raw, tmp_path / "theirs", share=1.0, **FOUR)
    assert_same_updates(run(type("Mixed", bases, {}), tmp_path, share=1.0, **FOUR), expected)

"""The trainer: its gradients, its seams, and that a run can be taken up again."""

import json
import random
import re
import time
from dataclasses import fields, replace

import pytest
import torch

from grpo_kernels import fused_grpo_loss
from grpo_kernels.config import AGGREGATIONS
from grpo_kernels.hf_head import head_of
from grpo_kernels.training import (
    Completion,
    Trainer,
    TrainingConfig,
    load_model,
    load_problems,
    ranks,
)
from grpo_kernels.training import metrics as of
from grpo_kernels.training.micro_batches import equal_parts, plan_micro_batches
from grpo_kernels.training.policy import Batch, Policy, positions
from tests.helpers.tiny_models import make_tokenizer
from tests.helpers.trainer_runs import (
    assert_same_grads,
    config_of,
    noise,
    rows_of,
    support_around,
    trainer_of,
)

pytestmark = pytest.mark.usefixtures("real_memory", "curves")


# Micro-batches, minibatches and ranks add up


def sampled(config, **options):
    """A trainer in its first step, with completions of several lengths, scored."""
    rollout = FakeRollout(lengths=(6, 1, 3, 5, 2), **options)
    trainer = trainer_of(config, rollout=lambda _: rollout)
    trainer.step = 1
    samples = trainer.sampling(
        trainer.train_problems[:4], trainer.step, of.Clock(torch.device("cpu"))
    )
    trainer.scorer.score(samples, equal_parts(len(samples.texts), config.minibatches))
    return trainer, samples


def updated_gradient(trainer, samples, parts):
    """The gradient of one update, cut into micro-batches of so many."""
    trainer.scorer.micro_batch_size = parts
    grads = {}

    def keep(*_, **__):
        grads.update({n: p.grad.clone() for n, p in trainer.policy.named_parameters()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.optimizer, "step", keep)
        metrics = trainer._update(samples, 0, list(range(len(samples.texts))))
    return grads, metrics


CUTS = {
    **{name: {"loss_type": name} for name in AGGREGATIONS},
    "kl": {"loss_type": "grpo", "beta": 0.1},
    "entropy": {"loss_type": "grpo", "entropy_coef": 0.1},
    "entropy, dapo": {"entropy_coef": 0.1},
    "gspo": {"loss_type": "gspo", "epochs_per_rollout": 2},
    # The threshold lies between two of the tokens: one on it would go either way by an ulp.
    "top entropy": {"top_entropy_quantile": 0.4},
    "truncated": {"mask_truncated_completions": True, "loss_type": "grpo"},
    "no skipping": {"skip_untrained": False, "loss_type": "bnpo"},
    "replayed": {"top_k": 20, "epochs_per_rollout": 2},
    "turns": {"beta": 0.1},
    "turns, by completion": {"loss_type": "grpo"},
    "predicted": {"loss_type": "bnpo"},
}
# What a rollout puts between the tokens that it samples.
TURNS = {
    "turns": {"turns": True},
    "turns, by completion": {"turns": True},
    "predicted": {"turns": True, "ce_weight": 0.5},
}


@pytest.mark.parametrize("name", CUTS)
def test_any_cut_gives_the_gradient_of_the_whole(name, tiny_model, tmp_path):
    config = config_of(tiny_model, tmp_path, max_grad_norm=1e9, **CUTS[name])
    trainer, samples = sampled(config, **TURNS.get(name, {}))
    whole, metrics = updated_gradient(trainer, samples, 16)
    assert len(set(samples.lengths)) > 2
    for size in (1, 3, 4):
        grads, parts = updated_gradient(trainer, samples, size)
        assert_same_grads(grads, whole, 2e-6 if size > 1 else 5e-6)
        assert parts["loss"] == pytest.approx(metrics["loss"], rel=1e-4, abs=1e-6)
        assert parts["tokens"] == metrics["tokens"]
        assert parts["entropy"] == pytest.approx(metrics["entropy"], rel=1e-4)


@pytest.mark.parametrize("name", CUTS)
def test_two_processes_give_the_gradient_of_one(name, tiny_model, tmp_path, monkeypatch):
    """Each with half of the groups, of other lengths, what they tell each other played back."""
    config = config_of(tiny_model, tmp_path, max_grad_norm=1e9, **CUTS[name])
    trainer, samples = sampled(config, **TURNS.get(name, {}))
    whole, metrics = updated_gradient(trainer, samples, 16)

    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    monkeypatch.setattr(ranks, "gather", lambda _, rows: rows)
    monkeypatch.setattr(ranks, "largest", lambda _, numbers: numbers)
    halves = [half_of(samples, 0), half_of(samples, 8)]
    told = [[], []]
    for rank in (0, 1, 0, 1):
        # The first time round each one hears its own numbers only, and the gradient is discarded.
        others, mine = iter([*told[1 - rank]]), told[rank]
        mine.clear()

        def over(_, value, reduce, others=others, mine=mine):
            mine.append(value)
            return reduce([value, next(others, value)])

        monkeypatch.setattr(ranks, "reduce", over)
        halves[rank].logps = None
        halves[rank].grads, parts = updated_gradient(trainer, halves[rank], 8)
    average = {n: (g + halves[1].grads[n]) / 2 for n, g in halves[0].grads.items()}
    assert_same_grads(average, whole, 3e-6)
    assert parts["loss"] == pytest.approx(metrics["loss"], rel=1e-4, abs=1e-6)


def half_of(samples, start):
    def cut(x):
        sized = isinstance(x, (list, torch.Tensor)) and (not torch.is_tensor(x) or x.ndim)
        return x[start : start + 8] if sized else x

    values = {f.name: getattr(samples, f.name) for f in fields(samples)}
    prompts = {"problems", "prompts"}
    halves = {name: cut(value) for name, value in values.items() if name not in prompts}
    return replace(samples, **halves)


class FakeRollout:
    """A sampler that is no model here: it needs no weights, and says its own log-probs.

    With `turns` every third token and the one after it are not its own, and with `ce_weight` they
    are to be predicted.
    """

    def __init__(self, lengths=(4, 2), logps=None, ended=None, turns=False, ce_weight=None):
        self.lengths, self.logps, self.ended, self.calls = lengths, logps, ended, []
        self.turns, self.ce_weight = turns, ce_weight

    def __call__(self, prompts, count, sampling):
        self.calls.append((len(prompts), count, sampling))
        draw, done = random.Random(len(self.calls)), []
        for i in range(len(prompts) * count):
            length = self.lengths[i % len(self.lengths)]
            ids = [draw.randrange(33, 90) for _ in range(length)]
            logps = None if self.logps is None else [self.logps] * length
            # Some from the whole vocabulary.
            support = support_around(ids, draw) if sampling.record_support and i % 4 else None
            ended = i % 3 > 0 if self.ended is None else self.ended
            own = [t % 4 < 2 for t in range(length)] if self.turns else None
            weights = None
            if own is not None and self.ce_weight is not None:
                weights = [0.0 if mine else self.ce_weight for mine in own]
            done.append(Completion(ids, ended, logps, support, own, weights))
        return done


def test_the_gradient_is_that_of_one_call_of_the_loss(tiny_model, tmp_path):
    """Against `fused_grpo_loss` of all completions, padded, in one call on the plain model."""
    config = config_of(tiny_model, tmp_path, loss_type="dapo", max_grad_norm=1e9)
    trainer, samples = sampled(config)
    grads, metrics = updated_gradient(trainer, samples, 5)
    model, _ = load_model(config)
    batch = Batch.of_rows(
        samples.prompts, samples.prompt_of, [c.token_ids for c in samples.completions],
        trainer.tokenizer.pad_token_id,
    )  # fmt: skip
    ids = torch.cat([batch.prompts[batch.prompt_of], batch.completions], 1)
    attention = torch.cat([batch.prompt_mask[batch.prompt_of], batch.mask], 1)
    states = model.base_model(ids, attention_mask=attention, position_ids=positions(attention))
    T = batch.mask.shape[1]
    out = fused_grpo_loss(
        states.last_hidden_state[:, -T - 1 : -1], head_of(model).weight, batch.completions,
        samples.advantages, batch.mask,
    )  # fmt: skip
    out.loss.backward()
    expected = {f"model.{n}": p.grad for n, p in model.named_parameters()}
    assert_same_grads(grads, expected, 1e-5)
    assert metrics["loss"] == pytest.approx(out.loss.item(), rel=1e-4, abs=1e-7)


def test_micro_batches_hold_every_row_once_and_little_padding():
    draw = random.Random(0)
    prompt_of, tokens = [i // 8 for i in range(32)], [1, 2, 3, 4]
    lengths = [draw.randrange(1, 100) for _ in range(32)]
    for shared in (True, False):
        plan = plan_micro_batches(range(32), 5, prompt_of, tokens, lengths, shared=shared)
        assert sorted(i for part in plan for i in part) == list(range(32))
        assert all(len(part) <= 5 for part in plan) and len(plan) == 7
    by_length = plan_micro_batches(range(32), 4, prompt_of, tokens, lengths, shared=False)
    padded = sum(len(p) * max(lengths[i] for i in p) for p in by_length)
    assert padded < 1.2 * sum(lengths)
    # Long prompts, completions of one length: groups stay together.
    prompt_of = [i % 4 for i in range(32)]
    plan = plan_micro_batches(range(32), 8, prompt_of, [51] * 4, [3] * 32, shared=True)
    assert all(len({prompt_of[i] for i in part}) == 1 for part in plan)


# Runs


def test_trains_and_reports(tiny_model, tmp_path, curves, capsys):
    curves.undo()
    config = config_of(
        tiny_model, tmp_path, eval_size=5, beta=0.05, save_model=True, show_every=1,
        is_correction="token_truncate", epochs_per_rollout=2, minibatches=2, eval_every=1,
        micro_batch_size=3, warmup_steps=2, schedule="cosine",
    )  # fmt: skip
    trainer = trainer_of(config, rollout=lambda _: FakeRollout(lengths=(6, 1, 3), logps=-5.5))
    folder = trainer.train()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    expected = {
        "reward", "reward/noise", "accuracy", "loss", "kl", "entropy", "completion_length",
        "truncated", "groups_equal", "grad_norm", "ratio_mean", "ratio_max", "clip_low",
        "clip_high", "tokens", "learning_rate", "seconds", "seconds/generate", "seconds/score",
        "seconds/train", "peak_memory_gib", "sampling/importance_sampling_ratio/mean",
    }  # fmt: skip
    assert expected <= set(rows[0]), expected - set(rows[0])
    assert rows[0]["ratio_max"] > 1 and rows[0]["grad_norm"] > 0
    evaluations = (folder / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in evaluations] == [0, 1, 2]
    assert len((folder / "answers.jsonl").read_text().splitlines()) == 15
    page = (folder / "report.html").read_text()
    assert page.count("<svg") >= 8 and not re.search(r"(src|href)=.?(https?:)?//", page)
    assert (folder / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert "held-out accuracy 0.0% (95 %: 0.0% to 43.4%) of 5" in capsys.readouterr().out
    from transformers import AutoModelForCausalLM

    before = AutoModelForCausalLM.from_pretrained(tiny_model)
    after = AutoModelForCausalLM.from_pretrained(folder / "model")
    for (name, p), q in zip(before.named_parameters(), after.parameters(), strict=True):
        assert not torch.equal(p, q), name


def test_a_sampler_of_its_own_is_introduced_and_its_gap_and_time_shown(
    tiny_model, tmp_path, curves, capsys
):
    curves.undo()

    class Engine(FakeRollout):
        description = "an engine"

        def update_weights(self):
            time.sleep(0.06)

    config = config_of(tiny_model, tmp_path, eval_size=0)
    folder = trainer_of(config, rollout=lambda _: Engine(logps=-5.5)).train()
    said = capsys.readouterr().out
    assert "Completions by an engine" in said and "(sync 0.1, generate 0." in said
    page = (folder / "report.html").read_text()
    assert "<!-- gap to the sampler's log-probs, nats -->" in page and "<!-- sync -->" in page
    row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    parts = [value for name, value in row.items() if name.startswith("seconds/")]
    assert row["seconds"] == pytest.approx(sum(parts)) and row["seconds/sync"] >= 0.06


def test_the_same_seed_gives_the_same_metrics(tiny_model, tmp_path):
    first, second, other = (
        rows_of(trainer_of(config_of(tiny_model, tmp_path, name=n, seed=s, beta=0.1)).train())
        for n, s in (("a", 0), ("b", 0), ("c", 1))
    )
    assert first == second != other


def test_without_gradient_nothing_is_encoded(tiny_model, tmp_path, monkeypatch):
    config = config_of(tiny_model, tmp_path, steps=1, num_generations=2)
    halves = {"noise": lambda prompts, completions, **_: [0, 1, 2, 2, 3, 3, 4, 4]}
    trainer = trainer_of(config, rewards=halves)
    seen = []
    original = Policy.loss
    monkeypatch.setattr(
        Policy, "loss", lambda self, batch, *a, **k: seen.append(batch.mask.shape[0])
        or original(self, batch, *a, **k),
    )  # fmt: skip
    folder = trainer.train()
    assert seen == [2] and rows_of(folder)[0]["groups_equal"] == 0.75


def test_frozen_weights_are_not_copied_for_the_reference(tiny_model, tmp_path):
    config = config_of(tiny_model, tmp_path, beta=0.1, trainable=r"layers\.1\.")
    trainer = trainer_of(config)
    theirs = dict(trainer.reference.copy.named_parameters())
    same = {n for n, p in trainer.policy.named_parameters() if p.data_ptr() == theirs[n].data_ptr()}
    assert any("layers.0" in n for n in same) and not any("layers.1" in n for n in same)


def test_lora_on_the_head(tiny_model, tmp_path):
    target = r".*\.q_proj|lm_head"
    config = config_of(tiny_model, tmp_path, beta=0.1, lora_rank=2, lora_target=target, steps=2)
    trainer = trainer_of(config)
    trainer.train()
    trained = {n: p for n, p in trainer.policy.named_parameters() if p.requires_grad}
    outer = [p for n, p in trained.items() if "lm_head" in n and "lora_B" in n]
    assert len(outer) == 1 and outer[0].abs().max() > 0
    assert all("lora" in name for name in trained)


def test_lora_trains_adapters_against_the_base(tiny_model, tmp_path):
    config = config_of(tiny_model, tmp_path, beta=0.1, lora_rank=2, steps=3, save_model=True)
    trainer = trainer_of(config)
    assert trainer.reference.copy is None
    folder = trainer.train()
    kls = [row["kl"] for row in rows_of(folder)]
    assert kls[0] == pytest.approx(0, abs=1e-6) and kls[2] > 1e-4
    assert (folder / "model" / "adapter_model.safetensors").exists()


def test_dropout_is_off(tmp_path):
    """Dropout would make old and reference log-probs those of other policies."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    model = GPT2LMHeadModel(GPT2Config(
        vocab_size=257, n_embd=32, n_layer=2, n_head=2, n_positions=128, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5,
    ))  # fmt: skip
    config = config_of("m", tmp_path, beta=0.1, minibatches=2, epochs_per_rollout=2, steps=1)
    config = replace(config, learning_rate=1e-12)
    problems = load_problems(config)[0]
    folder = Trainer(config, model.train(), tokenizer, problems, rewards={"noise": noise}).train()
    row = rows_of(folder)[0]
    assert row["ratio_max"] == pytest.approx(1, abs=1e-5)
    assert row["kl"] == pytest.approx(0, abs=1e-6)


def test_layers_are_checkpointed(tiny_model, tmp_path, monkeypatch):
    """Also after a rollout, and with a sampler that does not touch the model."""
    from transformers import modeling_utils

    real, calls = modeling_utils.checkpoint, []
    monkeypatch.setattr(
        modeling_utils, "checkpoint", lambda *a, **k: calls.append(1) or real(*a, **k)
    )
    options = {"steps": 1, "gradient_checkpointing": True}
    plain = trainer_of(config_of(tiny_model, tmp_path, name="a", steps=1, share_prompts=False))
    expected = rows_of(plain.train())
    assert not calls
    mine = rows_of(trainer_of(config_of(tiny_model, tmp_path, name="b", **options)).train())
    assert len(calls) == 2  # layers, of one micro-batch
    assert mine[0]["grad_norm"] == pytest.approx(expected[0]["grad_norm"], rel=1e-4)
    config = config_of(tiny_model, tmp_path, name="c", **options)
    trainer_of(config, rollout=lambda _: FakeRollout()).train()
    assert len(calls) == 4


def test_adapters_begin_as_the_seed_says(tiny_model, tmp_path):
    config = config_of(tiny_model, tmp_path, lora_rank=2)
    first, second = (
        {n: p.clone() for n, p in load_model(config)[0].named_parameters() if "lora_A" in n}
        for _ in range(2)
    )
    assert first and all(torch.equal(p, second[n]) for n, p in first.items())


def test_a_metric_of_one_minibatch_is_not_lost(tiny_model, tmp_path):
    """The first one has groups of equal rewards alone, and so no log-probs at all."""
    config = config_of(tiny_model, tmp_path, steps=1, minibatches=2)
    halves = {"noise": lambda prompts, completions, **_: [1] * 8 + [*range(8)]}
    row = rows_of(trainer_of(config, rewards=halves).train())[0]
    assert row["ratio_max"] > 0 and row["entropy"] > 0 and row["groups_equal"] == 0.5


def test_problems_need_what_they_are_judged_by(tiny_model, tmp_path):
    config = config_of(tiny_model, tmp_path)
    loaded, problems = load_model(config), load_problems(config)[0]
    with pytest.raises(ValueError, match="held_out: expected an answer in every problem"):
        Trainer(config, *loaded, problems, [{"prompt": "a"}], rewards={"noise": noise})
    some = [{"prompt": "a", "answer": "1"}, *({"prompt": x} for x in "bcde")]
    folder = Trainer(config, *loaded, some, rewards={"noise": noise}).train()
    assert "accuracy" not in rows_of(folder)[0]


def test_a_prompt_becomes_a_message_of_a_chat(tiny_model, tmp_path):
    config = config_of(
        tiny_model, tmp_path, dataset="examples.problems:gsm_symbolic", chat=True, train_size=4
    )
    model, tokenizer = load_model(config)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}:"
    trainer = Trainer(config, model, tokenizer, [{"prompt": "hi"}], rewards={"noise": noise})
    assert tokenizer.decode(trainer.encode({"prompt": "hi"})) == "<user>hi:"


def test_trackers_get_every_step(tiny_model, tmp_path):
    from accelerate import tracking

    if not hasattr(tracking, "register_tracker_class"):
        pytest.skip("accelerate is too old")
    calls = []

    class Kept(tracking.GeneralTracker):
        name, requires_logging_directory, tracker = "kept", False, None

        def __init__(self, run_name, **_):
            super().__init__()
            calls.append(("name", run_name))

        def store_init_configuration(self, values):
            calls.append(("config", values["learning_rate"]))

        def log(self, values, step=None, **_):
            calls.append((step, sorted(values)))

        def finish(self):
            calls.append("finished")

    tracking.register_tracker_class(Kept)
    trainer_of(config_of(tiny_model, tmp_path, trackers=["kept"], eval_size=3)).train()
    assert calls[:2] == [("name", "t"), ("config", 0.01)] and calls[-1] == "finished"
    assert [c[0] for c in calls[2:-1]] == [0, 1, 2, 2]
    assert calls[2][1] == ["held_out_accuracy"] and "reward" in calls[3][1]
    with pytest.raises(ImportError, match="trackers: aim is not installed"):
        trainer_of(config_of(tiny_model, tmp_path, name="u", trackers=["aim"]))


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    (
        ({"steps": 0}, "steps: expected at least 1; got 0"),
        ({"num_generations": 1}, "num_generations: expected at least 2"),
        ({"epsilon": 2.0}, r"epsilon: expected a number in \[0, 1\]"),
        ({"loss_type": "sapo", "delta": 1.5}, "delta: expected None, as loss_type='sapo'"),
        ({"reward_weights": [1.0, 2.0]}, "reward_weights: expected one for each of"),
        ({"minibatches": 3}, "minibatches: expected a divisor of prompts_per_step = 4"),
        ({"trainable": "("}, "trainable: expected a regular expression"),
        ({"tolerance": 0.1}, "tolerance: expected 0.005 with backward='exact'"),
        ({"dtype": "fp8"}, "dtype: expected one of fp32, bf16"),
        ({"eval_every": 2}, "eval_every: expected 0 where eval_size is 0"),
        ({"name": "a/b"}, "name: expected the name of a folder"),
        ({"kl_estimator": "k1"}, "kl_estimator: expected 'k3' where beta is 0"),
        ({"lora_alpha": 8}, "lora_alpha: expected 32 where lora_rank is 0"),
        ({"eval_temperature": 1.0}, "eval_temperature: expected 0 where eval_size is 0"),
        ({"rollout": "sglang"}, "rollout: expected one of generate, vllm; got 'sglang'"),
        ({"top_entropy_quantile": 0.5, "entropy_coef": 0.1}, "entropy_coef: expected 0"),
    ),
)
def test_options_are_checked(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        config_of("m", tmp_path, **options)


def test_types_are_checked(tmp_path):
    for options in ({"steps": 1.5}, {"beta": "x"}, {"stop": "x"}, {"resume": 1}, {"model": 3}):
        (name,) = options
        with pytest.raises(TypeError, match=f"{name}: expected"):
            TrainingConfig(**{"model": "m", **options})


@pytest.mark.parametrize(
    ("options", "message"),
    (
        ({"trainable": "nothing"}, "trainable: expected to match the name of a parameter"),
        ({"rewards": ["nobody"]}, "rewards: expected some of answer, .*; got 'nobody'"),
        ({"dataset": "no:thing"}, "dataset: expected module:function; got 'no:thing'"),
        ({"is_correction": "token_mask"}, "is_correction: expected 'none' with a rollout that"),
        ({"max_prompt_length": 1}, "max_prompt_length: expected room for at least one prompt"),
    ),
)
def test_what_does_not_fit_is_refused(options, message, tiny_model, tmp_path):
    with pytest.raises(ValueError, match=message):
        trainer_of(config_of(tiny_model, tmp_path, **options)).train()


def test_a_model_that_is_not_there_is_named(tmp_path):
    with pytest.raises(OSError, match=r"model: .*nowhere' is no folder with a model, and the hub"):
        load_model(config_of(tmp_path / "nowhere", tmp_path))

"""The trainer: its gradients, its seams, and that a run can be taken up again."""

import json
import random
import re
from dataclasses import fields, replace

import pytest
import torch

from grpo_kernels import GRPOLossConfig, fused_grpo_loss, grpo_loss
from grpo_kernels.config import AGGREGATIONS
from grpo_kernels.experimental import column_draw
from grpo_kernels.hf_head import head_of
from grpo_kernels.losses import Sapo
from grpo_kernels.training import (
    Completion,
    Trainer,
    data,
    load_model,
    load_problems,
    ranks,
)
from grpo_kernels.training.micro_batches import (
    Size,
    config_of_part,
    equal_parts,
    num_items,
    pad_plan,
    plan_micro_batches,
)
from grpo_kernels.training.policy import Batch, Policy, positions
from tests.helpers.tiny_models import make_tokenizer
from tests.helpers.trainer_runs import (
    assert_same_grads,
    config_of,
    first_samples,
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
    return trainer, first_samples(trainer)


def updated_gradient(trainer, samples, parts):
    """The gradient of one update, cut into micro-batches of so many."""
    trainer.scorer.micro_batch_size = parts
    grads = {}

    def keep(*_, **__):
        grads.update({n: p.grad.clone() for n, p in trainer.policy.named_parameters()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.updates.optimizer, "step", keep)
        metrics = trainer.updates(samples, 1, 0, list(range(len(samples.texts))))
    return grads, metrics


CUTS = {
    **{name: {"loss_type": name} for name in AGGREGATIONS},
    "kl": {"loss_type": "grpo", "beta": 0.1},
    "entropy": {"loss_type": "grpo", "entropy_coef": 0.1},
    "gspo": {"loss_type": "gspo", "epochs_per_rollout": 2},
    # The threshold lies between two of the tokens: one on it would go either way by an ulp.
    "top entropy": {"top_entropy_quantile": 0.4},
    "truncated": {"mask_truncated_completions": True, "loss_type": "grpo"},
    "replayed": {"top_k": 20, "epochs_per_rollout": 2},
    "turns": {"loss_type": "grpo"},
    "predicted": {"loss_type": "bnpo", "beta": 0.1, "skip_untrained": False},
}
# What a rollout puts between the tokens that it samples.
TURNS = {
    "turns": {"turns": True},
    "predicted": {"turns": True, "ce_weight": 0.5},
}


@pytest.mark.parametrize("name", CUTS)
def test_any_cut_gives_the_gradient_of_the_whole(name, tiny_model, tmp_path):
    config = config_of(tiny_model, tmp_path, max_grad_norm=1e9, **CUTS[name])
    trainer, samples = sampled(config, **TURNS.get(name, {}))
    whole, metrics = updated_gradient(trainer, samples, 16)
    assert len(set(samples.lengths)) > 2
    for size in (1, 3):
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


@pytest.mark.parametrize("loss_type", AGGREGATIONS)
def test_the_gradient_is_that_of_one_call_of_the_loss(loss_type, tiny_model, tmp_path):
    """Against `fused_grpo_loss` of all completions, padded, in one call on the plain model."""
    options = {"loss_type": loss_type, "entropy_coef": 0.1}
    config = config_of(tiny_model, tmp_path, **options, max_grad_norm=1e9)
    length = {"max_completion_length": 6} if loss_type == "dr_grpo" else {}
    whole = GRPOLossConfig(**options, **length)
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
        samples.advantages, batch.mask, config=whole,
    )  # fmt: skip
    out.loss.backward()
    expected = {f"model.{n}": p.grad for n, p in model.named_parameters()}
    assert_same_grads(grads, expected, 1e-5)
    assert metrics["loss"] == pytest.approx(out.loss.item(), rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_an_empty_part_counts_for_nothing(aggregation):
    """And an empty whole: no denominator is 0."""
    length = {"max_completion_length": 9} if aggregation == "dr_grpo" else {}
    config = GRPOLossConfig(loss_type=aggregation, entropy_coef=0.1, **length)
    for whole in (Size(8, 30), Size(8, 0)):
        part = config_of_part(config, Size(0, 0), whole, 2)
        assert part.entropy_coef > 0  # entropies are wanted, as in the other processes
        loss = grpo_loss(
            -torch.ones(8, 6), torch.ones(8), torch.zeros(8, 6).bool(), entropy=torch.ones(8, 6),
            config=part, num_items=num_items(config, whole, 2),
        ).loss  # fmt: skip
        assert loss == 0


@pytest.mark.parametrize("shared", (True, False))
@pytest.mark.parametrize("size", (1, 3, 8, 100))
def test_every_row_is_in_one_part(shared, size):
    draw = random.Random(0)
    rows = draw.sample(range(24), 17)
    lengths = [draw.randrange(1, 100) for _ in range(24)]
    prompt_of = [i // 4 for i in range(24)]
    plan = plan_micro_batches(rows, size, prompt_of, [9] * 6, lengths, shared=shared)
    assert sorted(i for part in plan for i in part) == sorted(rows)
    assert len(plan) == -(-17 // size) and all(0 < len(part) <= size for part in plan)


def test_the_order_with_fewer_tokens_is_taken():
    lengths, prompt_of = [1, 9, 1, 9], [0, 0, 1, 1]

    def parts(prompt_length, shared):
        plan = plan_micro_batches(
            range(4), 2, prompt_of, [prompt_length] * 2, lengths, shared=shared
        )
        return {frozenset(part) for part in plan}

    by_prompt = {frozenset({0, 1}), frozenset({2, 3})}
    by_length = {frozenset({0, 2}), frozenset({1, 3})}
    assert parts(100, shared=True) == by_prompt
    assert parts(1, shared=True) == by_length == parts(100, shared=False)


def test_no_rows_no_parts_but_the_empty_ones():
    assert plan_micro_batches([], 4, [], [], [], shared=True) == []
    assert pad_plan([], 0) == [[]]
    assert pad_plan([[1], [2]], 4) == [[1], [2], [], []]
    assert pad_plan([[1], [2]], 2) == [[1], [2]]


def test_equal_parts():
    assert equal_parts(8, 4) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert equal_parts(3, 1) == [[0, 1, 2]]


# Runs


def test_trains_and_reports(tiny_model, tmp_path, curves, capsys):
    curves.undo()
    config = config_of(
        tiny_model, tmp_path, eval_size=5, beta=0.05, save_model=True, show_every=1,
        is_correction="token_truncate", epochs_per_rollout=2, minibatches=2, eval_every=1,
        micro_batch_size=3, warmup_steps=2, schedule="cosine",
    )  # fmt: skip

    class Engine(FakeRollout):
        description = "an engine"

        def update_weights(self):
            pass

    folder = trainer_of(config, rollout=lambda _: Engine(lengths=(6, 1, 3), logps=-5.5)).train()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    expected = {
        "reward", "reward/noise", "accuracy", "loss", "kl", "entropy", "completion_length",
        "truncated", "groups_equal", "grad_norm", "ratio_mean", "ratio_max", "clip_low",
        "clip_high", "tokens", "learning_rate", "seconds", "seconds/generate", "seconds/score",
        "seconds/train", "seconds/sync", "sampler_gap", "peak_memory_gib",
        "sampling/importance_sampling_ratio/mean",
    }  # fmt: skip
    assert expected <= set(rows[0]), expected - set(rows[0])
    assert rows[0]["ratio_max"] > 1 and rows[0]["grad_norm"] > 0
    parts = [value for name, value in rows[0].items() if name.startswith("seconds/")]
    assert rows[0]["seconds"] == pytest.approx(sum(parts))
    evaluations = (folder / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in evaluations] == [0, 1, 2]
    assert len((folder / "answers.jsonl").read_text().splitlines()) == 15
    page = (folder / "report.html").read_text()
    assert page.count("<svg") >= 8 and not re.search(r"(src|href)=.?(https?:)?//", page)
    assert (
        "<!-- gap to the sampler's log-probs, nats, log scale -->" in page
        and "<!-- sync -->" in page
    )
    said = capsys.readouterr().out
    assert "held-out accuracy 0.0% (95 %: 0.0% to 43.4%) of 5" in said
    assert "Completions by an engine" in said and "(sync 0." in said
    from transformers import AutoModelForCausalLM

    before = AutoModelForCausalLM.from_pretrained(tiny_model)
    after = AutoModelForCausalLM.from_pretrained(folder / "model")
    for (name, p), q in zip(before.named_parameters(), after.parameters(), strict=True):
        assert not torch.equal(p, q), name


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


@pytest.mark.parametrize("target", (None, r".*\.q_proj|lm_head"), ids=("layers", "head"))
def test_lora_trains_adapters_against_the_base(target, tiny_model, tmp_path):
    config = config_of(
        tiny_model, tmp_path, beta=0.1, lora_rank=2, steps=3, save_model=True,
        **{"lora_target": target} if target else {},
    )  # fmt: skip
    trainer, (again, _) = trainer_of(config), load_model(config)
    begin = {n: p.clone() for n, p in trainer.policy.model.named_parameters() if "lora_A" in n}
    assert begin and all(torch.equal(p, again.get_parameter(n)) for n, p in begin.items())
    assert trainer.reference.copy is None
    folder = trainer.train()
    kls = [row["kl"] for row in rows_of(folder)]
    assert kls[0] == pytest.approx(0, abs=1e-6) and kls[2] > 1e-4
    assert (folder / "model" / "adapter_model.safetensors").exists()
    trained = {n: p for n, p in trainer.policy.named_parameters() if p.requires_grad}
    assert all("lora" in name for name in trained)
    outer = [p for n, p in trained.items() if "lm_head" in n and "lora_B" in n]
    assert len(outer) == bool(target) and all(p.abs().max() > 0 for p in outer)


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
            calls.append(run_name)

        def store_init_configuration(self, values):
            calls.append(values["learning_rate"])

        def log(self, values, step=None, **_):
            calls.append((step, "reward" in values, "held_out_accuracy" in values))

        def finish(self):
            calls.append("finished")

    tracking.register_tracker_class(Kept)
    trainer_of(config_of(tiny_model, tmp_path, trackers=["kept"], eval_size=3)).train()
    steps = [(0, False, True), (1, True, False), (2, True, False), (2, False, True)]
    assert calls == ["t", 0.01, *steps, "finished"]
    with pytest.raises(ImportError, match="trackers: aim is not installed"):
        trainer_of(config_of(tiny_model, tmp_path, name="u", trackers=["aim"]))


def test_every_step_is_handed_out(tiny_model, tmp_path):
    seen = []
    config = config_of(tiny_model, tmp_path, save_every=-1)
    folder = trainer_of(config).train(lambda row, samples: seen.append((row, samples)))
    assert [row["step"] for row, _ in seen] == [1, 2]
    row, samples = seen[0]
    assert row["reward"] == pytest.approx(samples.totals.mean().item()) and row["grad_norm"] > 0
    assert len(samples.prompts) == len(samples.problems) == 4 and len(samples.texts) == 16
    assert samples.prompt_of == [i // 4 for i in range(16)]
    assert samples.logps.shape == samples.mask.shape
    assert not (folder / "checkpoints").exists()


def test_prompts_are_tokenized_once(tiny_model, tmp_path):
    trainer = trainer_of(config_of(tiny_model, tmp_path, eval_size=3))
    again = []
    trainer.encode._encode = again.append
    trainer.train()
    assert again == []
    messages = [{"role": "user", "content": "a"}]
    encode = data.PromptEncoder(None, chat=False)
    encode._encode = lambda prompt: [prompt]
    assert encode({"prompt": messages}) == [messages] != encode({"prompt": repr(messages)})


def train(config):
    return rows_of(trainer_of(config).train())


def test_a_loss_by_instance_is_that_of_its_name(tiny_model, tmp_path):
    """Its repr is recorded, by which a run goes on."""
    config = config_of(tiny_model, tmp_path, loss_type=Sapo(temperature_neg=1.3), beta=0.1)
    by_instance = train(config)
    named = replace(config, name="named", loss_type="sapo", sapo_temperature_neg=1.3)
    assert by_instance == train(named)
    recorded = json.loads((config.folder / "config.json").read_text())["loss_type"]
    assert recorded == "Sapo(temperature_pos=1.0, temperature_neg=1.3)"
    assert len(train(replace(config, steps=3, resume=True))) == 3
    with pytest.raises(ValueError, match=r"loss_type: was 'Sapo.*1\.3.*', is 'Sapo.*1\.05"):
        train(replace(config, steps=4, resume=True, loss_type=Sapo()))


def test_the_sampled_backward(tiny_model, tmp_path, monkeypatch):
    """Other columns in every micro-batch, and the same ones in a run from the same seed."""
    monkeypatch.setattr(column_draw, "_FLAT_SHARE", 2.0)  # that of a small model
    drawn = {"sampled_tolerance": 0.5, "micro_batch_size": 4}
    first, again, exact = (
        train(config_of(tiny_model, tmp_path, name=name, **options))
        for name, options in (("a", drawn), ("b", drawn), ("c", {}))
    )
    assert first == again and first[0]["loss"] == pytest.approx(exact[0]["loss"], abs=1e-5)
    assert first[0]["grad_norm"] != pytest.approx(exact[0]["grad_norm"], rel=1e-3)


# Groups of equal rewards, which are replaced by those of other problems


def judge(prompts, completions, answer, **_):
    """The same for all completions of a sum below 10, as if they were solved."""
    return [
        0.5 if int(right) < 10 else value
        for right, value in zip(answer, noise(prompts, completions), strict=True)
    ]


def resampled(model, tmp_path, reward=judge, **options):
    kept = []
    trainer = trainer_of(config_of(model, tmp_path, **options), rewards={"noise": reward})
    folder = trainer.train(lambda row, samples: kept.append(samples))
    return rows_of(folder), kept, trainer


def test_groups_of_equal_rewards_are_replaced(tiny_model, tmp_path):
    rows, kept, trainer = resampled(tiny_model, tmp_path, steps=3, resample_equal_groups=20)
    assert sum(row["resampled"] for row in rows) > 0
    for row, samples in zip(rows, kept, strict=True):
        assert row["groups_equal"] == 0 and row["resampled"] == samples.resampled
        assert len(samples.problems) == 4 and len(samples.texts) == 16
        assert all(int(problem["answer"]) >= 10 for problem in samples.problems)
        # What belongs together still does.
        assert samples.prompts == [trainer.encode(problem) for problem in samples.problems]
        answers = [samples.problems[i]["answer"] for i in samples.prompt_of]
        assert samples.rewards[:, 0].tolist() == judge(None, samples.texts, answers)
        assert samples.texts == trainer.sampler.texts(samples.completions)
        assert samples.mask.sum(1).tolist() == samples.lengths
        means = samples.advantages.view(4, 4).mean(1)
        torch.testing.assert_close(means, torch.zeros_like(means), atol=1e-6, rtol=0)


def test_resampling_ends(tiny_model, tmp_path):
    rows, _, _ = resampled(
        tiny_model, tmp_path, steps=2, resample_equal_groups=3,
        reward=lambda prompts, completions, **_: [1.0] * len(completions),
    )  # fmt: skip
    assert [row["resampled"] for row in rows] == [12, 12]
    assert [row["groups_equal"] for row in rows] == [1, 1]
    assert "resampled" not in train(config_of(tiny_model, tmp_path, name="not asked"))[0]


def test_a_resumed_run_draws_the_same_groups(tiny_model, tmp_path):
    options = {"resample_equal_groups": 20, "save_every": 1}
    whole, _, _ = resampled(tiny_model, tmp_path / "whole", steps=4, **options)
    resampled(tiny_model, tmp_path / "parts", steps=2, **options)
    parts, _, _ = resampled(tiny_model, tmp_path / "parts", steps=4, resume=True, **options)
    assert parts == whole

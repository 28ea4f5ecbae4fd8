"""Runs of the trainer: what they log, references, LoRA, who looks on, what is refused."""

import json
import re

import pytest
import torch
from accelerate import tracking
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from grpo_kernels.loss.losses import Sapo
from grpo_kernels.training import Completion, load_model
from grpo_kernels.training.problems import prompts
from grpo_kernels.training.run import checkpoint
from grpo_kernels.training.run.observers import Observer
from tests.helpers.tiny_models import make_model, make_tokenizer
from tests.helpers.trainer_runs import (
    FakeRollout,
    assert_same_weights,
    config_of,
    freeze_all_but,
    rows_of,
    trainer_of,
    weights_of,
)

pytestmark = pytest.mark.usefixtures("real_memory")


def test_trains_and_reports(make, tiny_model, capsys):
    class Engine(FakeRollout):
        def update_weights(self):
            pass

    trainer, seen = make(
        eval_size=5, beta=0.05, save_model=True, show_every=1, is_correction="token_truncate",
        epochs_per_rollout=2, minibatches=2, eval_every=1, micro_batch_size=3, warmup_steps=2,
        schedule="cosine", rollout=lambda _: Engine((6, 1, 3), logps=-5.5),
    ), []  # fmt: skip
    folder = trainer.train(lambda row, samples: seen.append((row, samples)))
    rows, evaluations, answers = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("metrics", "evaluations", "answers")
    )
    assert [row["step"] for row in rows] == [row["step"] for row, _ in seen] == [1, 2]
    assert [row["step"] for row in evaluations] == [0, 1, 2] and len(answers) == 15
    row, samples = seen[0]
    assert row["reward"] == pytest.approx(samples.rewards_total.mean().item())
    assert len(samples.prompts) == len(samples.problems) == 4 and len(samples.texts) == 16
    assert samples.prompt_of == [i // 4 for i in range(16)]
    expected = {
        "reward", "reward/noise", "accuracy", "loss", "kl", "entropy", "completion_length",
        "truncated", "groups_equal", "grad_norm", "ratio_mean", "ratio_max", "clip_low",
        "clip_high", "tokens", "learning_rate", "seconds", "seconds/generate", "seconds/score",
        "seconds/train", "seconds/sync", "seconds/head", "seconds/page", "sampler_gap",
        "peak_memory_gib",
        "sampling/importance_sampling_ratio/mean",
    }  # fmt: skip
    assert expected <= set(rows[0]), expected - set(rows[0])
    assert rows[0]["ratio_max"] > 1 and rows[0]["grad_norm"] > 0
    for row in rows:
        parts = ("sync", "generate", "reward", "score", "train")
        assert row["seconds"] == pytest.approx(sum(row[f"seconds/{name}"] for name in parts))
        assert 0 < row["seconds/head"] < row["seconds/train"] and row["seconds/page"] > 0
    page, said = (folder / "report.html").read_text(), capsys.readouterr().out
    assert not re.search(r"(src|href)=.?(https?:)?//", page)
    assert "seconds/sync" in page and "sampler_gap_max" in page
    assert "held-out accuracy 0.0% (95 %: 0.0% to 43.4%) of 5" in said
    before, after = map(AutoModelForCausalLM.from_pretrained, (tiny_model, folder / "model"))
    for (name, p), q in zip(before.named_parameters(), after.parameters(), strict=True):
        assert not torch.equal(p, q), name


# References


def weights_of_copy(trainer):
    return {n: p.clone() for n, p in trainer.reference.copy.named_parameters()}


def test_frozen_weights_are_not_copied_for_the_reference(make):
    model, tokenizer = load_model(make().config)
    freeze_all_but(model, "layers.1.")
    trainer = make(model, tokenizer, beta=0.1)
    copied = dict(trainer.reference.copy.named_parameters())
    same = {n for n, p in trainer.policy.named_parameters() if p.data_ptr() == copied[n].data_ptr()}
    assert any("layers.0" in n for n in same) and not any("layers.1" in n for n in same)


def test_a_reference_that_follows(make):
    """And goes on after a stop: the checkpoint has both models."""
    options = {"beta": 0.1, "sync_ref_every": 2, "save_every": 1}
    trainer = make(steps=4, **options)
    expected, seen = weights_of_copy(trainer), []
    rows = rows_of(trainer.train(lambda *_: seen.append((weights_of_copy(trainer),
                                                         weights_of(trainer)))))  # fmt: skip
    for step, (reference, policy) in enumerate(seen, 1):
        if step % 2 == 0:
            expected = policy
        assert_same_weights(reference, expected)
    # Before the first update of the third step a copy is the policy.
    assert rows[1]["kl"] > 1e-4
    assert rows[2]["kl"] == pytest.approx(0, abs=1e-6)
    make(name="cut", steps=3, **options).train()
    again = make(name="cut", steps=4, resume=True, **options)
    assert rows_of(again.train()) == rows
    assert_same_weights(weights_of(again), weights_of(trainer))
    assert_same_weights(weights_of_copy(again), weights_of_copy(trainer))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The folder of another model, and the model."""
    model, folder = make_model("llama"), tmp_path_factory.mktemp("other")
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    model.save_pretrained(folder)
    return str(folder), model


def test_a_reference_of_other_tokens_is_refused(other, make, tmp_path):
    """Vocabularies of one size may have other words; added tokens may be renamed."""
    saved = make_tokenizer().backend_tokenizer.to_str()
    a, b = (json.loads(saved)["model"]["vocab"][letter] for letter in "ab")
    swapped = saved.replace(f'"a":{a}', f'"a":{b}').replace(f'"b":{b}', f'"b":{a}')
    for tokens, vocab_size, error, message in (
        (saved.replace("<eos>", "<end>"), 257, None, None),
        (swapped, 257, ValueError, rf".* 2 other tokens: token {a} is 'b', not 'a'"),
        (saved, 300, ValueError, r"expected a vocabulary of 257, .*; got 300"),
        (None, 0, OSError, r".*none does not exist"),
    ):
        folder = tmp_path / ("reference" if tokens else "none")
        if tokens:
            make_model("llama", vocab_size=vocab_size).save_pretrained(folder)
            make_tokenizer().save_pretrained(folder)
            (folder / "tokenizer.json").write_text(tokens)
        if error is None:
            make(beta=0.1, ref_model=str(folder))
            continue
        with pytest.raises(error, match=f"ref_model: {message}"):
            make(beta=0.1, ref_model=str(folder))


@pytest.mark.parametrize("kind", ("copy", "lora", "other"))
def test_the_exact_kl_holds_the_policy_back(kind, other, make):
    options = {"copy": {}, "lora": {"lora_rank": 2}, "other": {"ref_model": other[0]}}[kind]
    options |= {"kl_estimator": "exact", "steps": 4, "learning_rate": 3e-3}
    kls = [
        [row["kl"] for row in rows_of(make(name=str(beta), beta=beta, **options).train())]
        for beta in (0.05, 20.0)
    ]
    if kind == "other":
        assert kls[0][0] > 1e-3 and kls[1][-1] < kls[0][-1]
    else:  # the policy itself, before its first update
        assert [kls[0][0], kls[1][0]] == pytest.approx([0, 0], abs=1e-6)
        assert 0 < kls[1][-1] < kls[0][-1] / 2


# What is trained


def test_adapters_of_no_module_are_refused(make):
    with pytest.raises(ValueError, match=r"^lora_target='no_such': Target modules no_such"):
        make(lora_rank=2, lora_target="no_such")


@pytest.mark.parametrize("target", ({}, {"lora_target": r".*\.q_proj|lm_head"}), ids=str)
def test_lora_trains_adapters_against_the_base(target, make):
    trainer = make(beta=0.1, lora_rank=2, steps=3, save_model=True, **target)
    begin = {n: p.clone() for n, p in trainer.policy.model.named_parameters() if "lora_A" in n}
    again, _ = load_model(trainer.config)
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


def test_dropout_is_off(make):
    """Dropout would make old and reference log-probs those of other policies."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(
        vocab_size=257, n_embd=32, n_layer=2, n_head=2, n_positions=128, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5,
    ))  # fmt: skip
    options = {"beta": 0.1, "minibatches": 2, "epochs_per_rollout": 2, "learning_rate": 1e-12}
    trainer = make(model.train(), make_tokenizer(), steps=1, **options)
    (row,) = rows_of(trainer.train())
    assert row["ratio_max"] == pytest.approx(1, abs=1e-5)
    assert row["kl"] == pytest.approx(0, abs=1e-6)


def test_layers_are_checkpointed(make, monkeypatch):
    """Also after a rollout, and with a sampler that does not touch the model."""
    from transformers import modeling_utils

    real, calls = modeling_utils.checkpoint, []
    monkeypatch.setattr(
        modeling_utils, "checkpoint", lambda *a, **k: calls.append(1) or real(*a, **k)
    )
    norms = []
    for options, count in (
        ({"share_prompts": False}, 0),
        ({"gradient_checkpointing": True}, 2),  # layers, of one micro-batch
        ({"gradient_checkpointing": True, "rollout": lambda _: FakeRollout()}, 4),
    ):
        folder = make(name=f"{count}", steps=1, **options).train()
        norms.append(rows_of(folder)[0]["grad_norm"])
        assert len(calls) == count
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_a_minibatch_without_gradient_is_not_encoded_and_loses_no_metric(make):
    """The first one has groups of equal rewards alone, and so no log-probs at all."""
    halves = {"noise": lambda prompts, completions, **_: [1, 1, 1, 1, 0, 1, 2, 2]}
    trainer = make(steps=1, minibatches=2, num_generations=2, rewards=halves)
    forward, seen = trainer.policy.forward, []

    def counted(what, batch, *args, **options):
        if what == "loss":
            seen.append(len(batch.mask))
        return forward(what, batch, *args, **options)

    trainer.policy.forward = counted
    (row,) = rows_of(trainer.train())
    # The first has a part without rows, which a batch has one for.
    assert seen == [1, 2] and row["groups_equal"] == 0.75
    assert row["ratio_max"] > 0 and row["entropy"] > 0
    updates = [{"loss": 1.0, "tokens": 2}, {"loss": 3.0, "tokens": 3, "kl_max": 7.0}]
    merged = trainer.metrics.merge_updates(updates)
    assert merged == {"loss": 2.0, "tokens": 5, "kl_max": 7.0}


def test_a_loss_by_instance_is_that_of_its_name(make):
    """The loss's repr is recorded; a run goes on by it."""
    instance = {"loss_type": Sapo(temperature_neg=1.3), "beta": 0.1}
    named = {"loss_type": "sapo", "sapo_temperature_neg": 1.3, "beta": 0.1}
    folders = [
        make(name=name, **o).train() for name, o in (("instance", instance), ("named", named))
    ]
    assert rows_of(folders[0]) == rows_of(folders[1])
    recorded = json.loads((folders[0] / "config.json").read_text())["loss_type"]
    assert recorded == "Sapo(temperature_pos=1.0, temperature_neg=1.3)"
    make(name="instance", steps=3, resume=True, **instance).train()
    assert len(rows_of(folders[0])) == 3
    with pytest.raises(ValueError, match=r"loss_type: was 'Sapo.*1\.3.*', is 'Sapo.*1\.05"):
        make(name="instance", steps=4, resume=True, **instance | {"loss_type": Sapo()})


# Problems, answers and tokens

ODD = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": 0.5}]
NO_TEXT = "dataset: expected text or a whole number as answer; got "
OWN = {"is_correct": lambda text, right: right == 0.5}


@pytest.mark.parametrize(
    ("rewards", "parts", "options", "message"),
    (
        (["noise"], (ODD, [{"prompt": "a"}]), {}, "held_out: expected an answer in every problem"),
        (["noise"], (ODD, [{"prompt": "a", "answer": None}]), {}, "held_out: expected an answer"),
        (["noise"], (ODD, ()), {}, rf"{NO_TEXT}0.5: .*\(train\[1\]\)$"),
        (["noise"], (ODD[:1], ODD), {}, rf"{NO_TEXT}0.5: .*\(held_out\[1\]\)$"),
        # By the reward, whatever evaluations count by.
        (["answer"], (ODD, ()), OWN, rf"{NO_TEXT}0.5: .*\(train\[1\]\)$"),
        (["answer"], ([ODD[0], {"prompt": "b"}], ()), {}, rf"{NO_TEXT}None: .*\(train\[1\]\)$"),
    ),
)
def test_answers_that_cannot_be_compared_are_refused(rewards, parts, options, message, make):
    with pytest.raises(ValueError, match=message):
        make(rewards=rewards, problems=parts, **options)


def test_problems_may_have_no_answer_or_any(make):
    """Checked only where the library itself compares answers."""
    some = [*ODD[:1], {"prompt": "b", "answer": None}, *({"prompt": x} for x in "cde")]
    others = [{**problem, "prompt": f"{problem['prompt']}!"} for problem in ODD]
    for name, parts, options in (("none", (some, ()), {}), ("any", (ODD * 2, others), OWN)):
        (row,) = rows_of(make(name=name, steps=1, problems=parts, **options).train())
        assert ("accuracy" in row) == (parts[1] != ())


def test_held_out_problems_are_never_trained_on(make, capsys):
    some = [{"prompt": x, "answer": "1"} for x in "abcd"]
    trainer = make(problems=(some, some[1:3]), prompts_per_step=2)
    assert [[p["prompt"] for p in part] for part in (trainer.train_problems, trainer.held_out)] == [
        ["a", "d"], ["b", "c"]
    ]  # fmt: skip
    assert "2 of 4 problems to train on are left out" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"^train: the prompts of all . problems are held out"):
        make(problems=(some, some))


@pytest.mark.parametrize("pad_token", (None, "[PAD]"))
def test_a_tokenizer_has_a_pad_token_that_the_model_knows(pad_token, tiny_model, tmp_path):
    """Users add one, and no row of the embedding."""
    config = config_of(tiny_model, tmp_path)
    model, tokenizer = load_model(config)
    tokenizer.pad_token = None
    trainer_of(config, model, tokenizer)
    assert tokenizer.pad_token == "<eos>"
    tokenizer.eos_token = tokenizer.pad_token = None
    if pad_token is not None:
        tokenizer.add_special_tokens({"pad_token": pad_token})
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    message = re.escape(f"257 tokens of the model; got {pad_token!r} (")
    with pytest.raises(ValueError, match=f"tokenizer: expected a pad_token, or .* {message}"):
        trainer_of(config, model, tokenizer)


def test_special_tokens_are_text_but_for_those_that_end_begin_or_pad(make, tiny_model, tmp_path):
    """Here `#` is a tag, and `~` an end of the model that the tokenizer knows nothing of."""
    model, tokenizer = load_model(config_of(tiny_model, tmp_path))
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["#", "~", "|"], "pad_token": "_", "bos_token": "^"}
    )
    end, mark = tokenizer.convert_tokens_to_ids(["~", "!"])
    model.generation_config.eos_token_id = [0, end, mark]
    texts = ("^#4#2|~", "#_42#<eos>", "~42", "#a\n!", "<eos>")
    done = [Completion(tokenizer(text).input_ids, True) for text in texts]
    assert [len(one.token_ids) for one in done] == [7, 6, 3, 4, 1]
    # An end that is no special token is text.
    expected = ["#4#2|", "#42#", "42", "#a\n!", ""]
    assert make(model, tokenizer).sampler.texts(done) == expected


def test_prompts_are_tokenized_once():
    tokenizer, calls = make_tokenizer(), []
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}:"
    template = tokenizer.apply_chat_template
    tokenizer.apply_chat_template = lambda *a, **k: calls.append(1) or template(*a, **k)
    encode = prompts.PromptEncoder(tokenizer, chat=True, vocabulary=len(tokenizer))
    messages = [{"role": "system", "content": "a"}]
    for prompt, text in (("hi", "<user>hi:"), (messages, "<system>a:"),
                         (repr(messages), f"<user>{messages}:")) * 2:  # fmt: skip
        assert tokenizer.decode(encode({"prompt": prompt})) == text
    assert len(calls) == 3


# Who looks on


def test_trackers_get_every_step(make):
    """And options as they take them: TensorBoard takes numbers, bools and text."""
    calls, options = [], {}

    class Kept(tracking.GeneralTracker):
        name, requires_logging_directory, tracker = "kept", False, None

        def __init__(self, run_name, **_):
            super().__init__()
            calls.append(run_name)
            self.store_init_configuration = options.update
            self.finish = lambda: calls.append("finished")

        def log(self, values, step=None, **_):
            numbers = all(isinstance(x, (int, float)) for x in values.values())
            calls.append((step, numbers, "reward" in values, "held_out_accuracy" in values))

    tracking.register_tracker_class(Kept)
    options_of_run = {"loss_options": {}, "stop": ["a", "b"], "explain_every": 1}
    make(trackers=["kept"], eval_size=3, **options_of_run).train()
    steps = [(0, False, True), (1, True, False), (2, True, False), (2, False, True)]
    assert calls == ["t", *((step, True, *has) for step, *has in steps), "finished"]
    assert all(isinstance(x, (int, float, str, type(None))) for x in options.values())
    assert (options["stop"], options["loss_options"], options["steps"]) == ("a, b", "{}", 2)
    with pytest.raises(ImportError, match="trackers: aim is not installed"):
        make(name="u", trackers=["aim"])


def test_a_run_that_nobody_looks_at_trains_the_same(make):
    options = {"eval_size": 3, "eval_every": 1, "save_every": 1, "steps": 4}
    seen, alone = make(name="seen", **options), make(name="alone", **options)
    alone.run.observers.clear()
    folders = [seen.train(), alone.train()]
    assert_same_weights(weights_of(alone), weights_of(seen))
    assert {path.name for path in folders[1].iterdir()} == {
        ".lock", "checkpoints", "config.json", "metrics.jsonl", "evaluations.jsonl",
        "answers.jsonl", "held_out.jsonl", "trained_on.json",
    }  # fmt: skip
    kept = [len([*(folder / "checkpoints").iterdir()]) for folder in folders]
    assert kept[0] == kept[1] in (2, 3)


@pytest.mark.parametrize("event", ("start", "step", "evaluation", "end", "terminal"))
@pytest.mark.parametrize("error", (ConnectionError, SystemExit))
def test_who_looks_on_never_ends_a_run(event, error, make, monkeypatch, capsys):
    """A tracker without a network, say, or a terminal that was closed.

    The row is there when a tracker looks, and so are all others.
    """
    trainer, seen = make(eval_size=2, eval_every=1, save_every=1, steps=3), []

    def fails(*_, **__):
        seen.append(len(rows_of(trainer.config.folder)) if trainer.run.step else 0)
        raise error("no route to the tracker")

    class Tracker(Observer):
        pass

    if event == "terminal":
        monkeypatch.setattr("tqdm.tqdm.write", fails)
    setattr(Tracker, event, fails)
    trainer.run.observers.insert(0, Tracker(trainer.config))
    folder = trainer.train()
    assert len(rows_of(folder)) == 3 and checkpoint.latest(folder).name == "step-000003.pt"
    assert (folder / "report.html").exists()
    if event == "step":
        assert seen == [1, 2, 3]
    if event != "terminal":
        message = f"Tracker failed ({error.__name__}: no route to the tracker)"
        assert capsys.readouterr().out.count(message) == 1


def test_who_looks_on_gets_a_row_of_its_own(make):
    trainer, seen = make(steps=2), []

    class Changes(Observer):
        def step(self, row, samples):
            row.clear()

    class Sees(Observer):
        def step(self, row, samples):
            seen.append(row["step"])

    trainer.run.observers[:] = [Changes(trainer.config), Sees(trainer.config)]
    trainer.train(lambda row, _: seen.append(row["step"]))
    assert seen == [1, 1, 2, 2]

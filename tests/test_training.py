"""Runs of the trainer: what they log, their seams, LoRA, resampling."""

import json
import re
from dataclasses import replace

import pytest
import torch

from grpo_kernels.loss.losses import Sapo
from grpo_kernels.training import (
    Completion,
    Trainer,
    checkpoint,
    evaluate,
    load_model,
    load_problems,
    prompts,
)
from grpo_kernels.training.observers import Observer, Trackers
from tests.helpers.tiny_models import make_model, make_tokenizer
from tests.helpers.trainer_runs import (
    FakeRollout,
    assert_same_weights,
    config_of,
    noise,
    rows_of,
    trainer_of,
    weights_of,
)

pytestmark = pytest.mark.usefixtures("real_memory", "curves")


def test_trains_and_reports(tiny_model, tmp_path, curves, capsys):
    curves.undo()
    config = config_of(
        tiny_model, tmp_path, eval_size=5, beta=0.05, save_model=True, show_every=1,
        is_correction="token_truncate", epochs_per_rollout=2, minibatches=2, eval_every=1,
        micro_batch_size=3, warmup_steps=2, schedule="cosine",
    )  # fmt: skip

    class Engine(FakeRollout):
        def update_weights(self):
            pass

    trainer, seen = trainer_of(config, rollout=lambda _: Engine((6, 1, 3), logps=-5.5)), []
    folder = trainer.train(lambda row, samples: seen.append((row, samples)))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [row["step"] for row, _ in seen] == [1, 2]
    row, samples = seen[0]
    assert row["reward"] == pytest.approx(samples.rewards_total.mean().item())
    assert len(samples.prompts) == len(samples.problems) == 4 and len(samples.texts) == 16
    assert samples.prompt_of == [i // 4 for i in range(16)]
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
    assert "<!-- gap to the sampler's log-probs, nats, log scale -->" in page
    assert "<!-- sync -->" in page
    said = capsys.readouterr().out
    assert "held-out accuracy 0.0% (95 %: 0.0% to 43.4%) of 5" in said
    assert "(sync 0." in said
    from transformers import AutoModelForCausalLM

    before = AutoModelForCausalLM.from_pretrained(tiny_model)
    after = AutoModelForCausalLM.from_pretrained(folder / "model")
    for (name, p), q in zip(before.named_parameters(), after.parameters(), strict=True):
        assert not torch.equal(p, q), name


def test_frozen_weights_are_not_copied_for_the_reference(tiny_model, tmp_path):
    config = config_of(tiny_model, tmp_path, beta=0.1, trainable=r"layers\.1\.")
    trainer = trainer_of(config)
    theirs = dict(trainer.reference.copy.named_parameters())
    same = {n for n, p in trainer.policy.named_parameters() if p.data_ptr() == theirs[n].data_ptr()}
    assert any("layers.0" in n for n in same) and not any("layers.1" in n for n in same)


def weights_of_copy(trainer):
    return {n: p.clone() for n, p in trainer.reference.copy.named_parameters()}


@pytest.mark.parametrize("alpha", (1.0, 0.25))
def test_a_reference_that_follows(alpha, tiny_model, tmp_path):
    """And goes on after a stop: the checkpoint has both models."""
    options = {"beta": 0.1, "sync_ref_every": 2, "ref_mixup_alpha": alpha, "save_every": 1}
    trainer = trainer_of(config_of(tiny_model, tmp_path / "whole", steps=4, **options))
    expected, seen = weights_of_copy(trainer), []

    def look(row, samples):
        policy = {n: p.detach().clone() for n, p in trainer.policy.named_parameters()}
        seen.append((weights_of_copy(trainer), policy))

    rows = rows_of(trainer.train(look))
    for step, (reference, policy) in enumerate(seen, 1):
        if step % 2 == 0:
            expected = {n: x + alpha * (policy[n] - x) for n, x in expected.items()}
        assert_same_weights(reference, expected, 1e-6, 1e-7)
    # Before the first update of the third step a copy is the policy.
    assert rows[1]["kl"] > 1e-4
    assert (rows[2]["kl"] == pytest.approx(0, abs=1e-6)) is (alpha == 1)

    cut = config_of(tiny_model, tmp_path / "cut", steps=3, **options)
    trainer_of(cut).train()
    again = trainer_of(replace(cut, steps=4, resume=True))
    assert rows_of(again.train()) == rows
    assert_same_weights(weights_of(again), weights_of(trainer))
    assert_same_weights(weights_of_copy(again), weights_of_copy(trainer))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The folder of a model, and the model."""
    model, folder = make_model("llama"), tmp_path_factory.mktemp("other")
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    model.save_pretrained(folder)
    return str(folder), model


def test_another_model_is_the_reference(other, tiny_model, tmp_path):
    folder, model = other
    config = config_of(tiny_model, tmp_path, beta=0.1, ref_model=folder)
    for lora_rank in (0, 2):
        trainer = trainer_of(
            replace(config, output=str(tmp_path / f"lora-{lora_rank}"), lora_rank=lora_rank)
        )
        for name, p in trainer.reference.copy.model.named_parameters():
            assert torch.equal(p, model.get_parameter(name)) and not p.requires_grad
        assert rows_of(trainer.train())[0]["kl"] > 0.01
    make_model("llama", vocab_size=300).save_pretrained(tmp_path / "small")
    for name, error, message in (
        ("small", ValueError, r"expected a vocabulary of 257, .*; got 300"),
        ("none", OSError, r"'.*none' is not a folder with a model"),
    ):
        with pytest.raises(error, match=f"ref_model: {message}"):
            trainer_of(replace(config, ref_model=str(tmp_path / name)))


def test_a_reference_of_another_tokenizer_is_refused(other, tiny_model, tmp_path):
    """Vocabularies of one size may have other words; added tokens may be renamed."""
    folder, model = tmp_path / "reference", other[1]
    model.save_pretrained(folder)
    config = config_of(tiny_model, tmp_path, beta=0.1, ref_model=str(folder))
    saved = make_tokenizer().backend_tokenizer.to_str()
    make_tokenizer().save_pretrained(folder)
    (folder / "tokenizer.json").write_text(saved.replace("<eos>", "<end>"))
    trainer_of(config)
    vocabulary = json.loads(saved)["model"]["vocab"]
    a, b = vocabulary["a"], vocabulary["b"]
    swapped = saved.replace(f'"a":{a}', f'"a":{b}').replace(f'"b":{b}', f'"b":{a}')
    (folder / "tokenizer.json").write_text(swapped)
    with pytest.raises(
        ValueError, match=rf"ref_model: .* 2 other tokens: token {a} is 'b', not 'a'"
    ):
        trainer_of(config)


@pytest.mark.parametrize("kind", ("copy", "lora", "other"))
def test_the_exact_kl_holds_the_policy_back(kind, other, tiny_model, tmp_path):
    options = {"copy": {}, "lora": {"lora_rank": 2}, "other": {"ref_model": other[0]}}[kind]
    first, last = [], []
    for beta in (0.05, 20.0):
        config = config_of(
            tiny_model, tmp_path / str(beta), beta=beta, kl_estimator="exact", steps=4,
            learning_rate=3e-3, **options,
        )  # fmt: skip
        kls = [row["kl"] for row in rows_of(trainer_of(config).train())]
        first.append(kls[0])
        last.append(kls[-1])
    if kind == "other":
        assert first[0] > 1e-3 and last[1] < last[0]
    else:  # the policy itself, before its first update
        assert first == pytest.approx([0, 0], abs=1e-6)
        assert 0 < last[1] < last[0] / 2


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
    model = GPT2LMHeadModel(GPT2Config(
        vocab_size=257, n_embd=32, n_layer=2, n_head=2, n_positions=128, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5,
    ))  # fmt: skip
    config = config_of("m", tmp_path, beta=0.1, minibatches=2, epochs_per_rollout=2, steps=1)
    config = replace(config, learning_rate=1e-12)
    row = rows_of(trainer_of(config, model.train(), make_tokenizer()).train())[0]
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


def test_a_minibatch_without_gradient_is_not_encoded_and_loses_no_metric(tiny_model, tmp_path):
    """The first one has groups of equal rewards alone, and so no log-probs at all."""
    config = config_of(tiny_model, tmp_path, steps=1, minibatches=2, num_generations=2)
    halves = {"noise": lambda prompts, completions, **_: [1, 1, 1, 1, 0, 1, 2, 2]}
    trainer, seen = trainer_of(config, rewards=halves), []
    forward = trainer.policy.forward

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


def test_problems_need_what_they_are_judged_by(tiny_model, tmp_path):
    config = config_of(tiny_model, tmp_path)
    loaded, problems = load_model(config), load_problems(config)[0]
    for without in ({"prompt": "a"}, {"prompt": "a", "answer": None}):
        with pytest.raises(ValueError, match="held_out: expected an answer in every problem"):
            Trainer(config, *loaded, problems, [without], rewards={"noise": noise})
    some = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": None},
            *({"prompt": x} for x in "cde")]  # fmt: skip
    folder = Trainer(config, *loaded, some, rewards={"noise": noise}).train()
    assert "accuracy" not in rows_of(folder)[0]


def test_answers_that_cannot_be_compared_are_refused_before_the_first_step(tiny_model, tmp_path):
    config = config_of(tiny_model, tmp_path)
    odd = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": 0.5}]
    paid, own = config_of(tiny_model, tmp_path, rewards=["answer"]), {"rewards": {"noise": noise}}
    loaded = load_model(config)
    for used, parts, options, where in (
        (config, (odd,), own, "got 0.5 in train"), (config, (odd[:1], odd), own, "in held_out"),
        # By the reward, whatever evaluations count by.
        (paid, (odd,), {"is_correct": lambda text, right: False}, "got 0.5 in train"),
        (paid, ([odd[0], {"prompt": "b"}],), {}, "got None in train"),
    ):  # fmt: skip
        message = "answer is neither text nor a whole number: write it as text, .*"
        with pytest.raises(ValueError, match=rf"{message}{where}\[1\]$"):
            Trainer(used, *loaded, *parts, **options)
    # Nothing of the library's compares them.
    Trainer(config, *loaded, odd, odd, is_correct=lambda text, right: right == 0.5, **own)


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
    model.save_pretrained(folder := tmp_path / "model")
    tokenizer.save_pretrained(folder)
    told = re.escape(f"257 tokens of the model; got {pad_token!r} (")
    told = f"tokenizer: expected a pad_token, or .* {told}"
    with pytest.raises(ValueError, match=told):
        trainer_of(config, model, tokenizer)
    with pytest.raises(ValueError, match=told):
        evaluate.main(
            [f"--model={folder}", f"--dataset={config.dataset}", f"--output={tmp_path}/e"]
        )


def test_trackers_get_every_step(tiny_model, tmp_path):
    from accelerate import tracking

    calls = []

    class Kept(tracking.GeneralTracker):
        name, requires_logging_directory, tracker = "kept", False, None

        def __init__(self, run_name, **_):
            super().__init__()
            calls.append(run_name)
            self.store_init_configuration = lambda values: calls.append(values["learning_rate"])
            self.finish = lambda: calls.append("finished")

        def log(self, values, step=None, **_):
            calls.append((step, "reward" in values, "held_out_accuracy" in values))

    tracking.register_tracker_class(Kept)
    trainer_of(config_of(tiny_model, tmp_path, trackers=["kept"], eval_size=3)).train()
    steps = [(0, False, True), (1, True, False), (2, True, False), (2, False, True)]
    assert calls == ["t", 0.01, *steps, "finished"]
    with pytest.raises(ImportError, match="trackers: aim is not installed"):
        trainer_of(config_of(tiny_model, tmp_path, name="u", trackers=["aim"]))


def test_a_run_that_nobody_looks_at_trains_the_same(tiny_model, tmp_path):
    config = config_of(tiny_model, tmp_path, eval_size=3, eval_every=1, save_every=1, steps=4)
    seen, alone = trainer_of(config), trainer_of(replace(config, output=str(tmp_path / "alone")))
    seen.train()
    alone.run.observers.clear()
    folder = alone.train()
    assert_same_weights(weights_of(alone), weights_of(seen))
    assert {path.name for path in folder.iterdir()} == {
        ".lock", "checkpoints", "config.json", "metrics.jsonl", "evaluations.jsonl",
        "answers.jsonl",
    }  # fmt: skip
    kept = [len([*(x / "checkpoints").iterdir()]) for x in (config.folder, folder)]
    assert kept[0] == kept[1] in (2, 3)


@pytest.mark.parametrize("event", ("start", "step", "evaluation", "end", "on_step"))
def test_who_looks_on_never_ends_a_run(event, tiny_model, tmp_path, capsys):
    """A tracker without a network, say: the row is there when it looks, and so are all others."""
    config = config_of(tiny_model, tmp_path, eval_size=2, eval_every=1, save_every=1, steps=3)
    trainer, seen = trainer_of(config), []

    def fails(*_):
        seen.append(len(rows_of(config.folder)) if trainer.run.step else 0)
        raise ConnectionError("no route to the tracker")

    class Tracker(Observer):
        pass

    setattr(Tracker, event, fails)
    trainer.run.observers.insert(0, Tracker(config))
    folder = trainer.train(fails if event == "on_step" else None)
    assert len(rows_of(folder)) == 3 and checkpoint.latest(folder).name == "step-000003"
    assert (folder / "report.html").exists()
    if event in ("step", "on_step"):
        assert seen == [1, 2, 3]
    name = "on_step" if event == "on_step" else "Tracker"
    printed = capsys.readouterr().out
    assert printed.count(f"{name} failed (ConnectionError: no route to the tracker)") == 1


def test_a_terminal_that_was_closed_ends_no_run(tiny_model, tmp_path, monkeypatch):
    def closed(*_, **__):
        raise BrokenPipeError(32, "Broken pipe")

    trainer = trainer_of(config_of(tiny_model, tmp_path, steps=1))
    monkeypatch.setattr("tqdm.tqdm.write", closed)
    assert len(rows_of(trainer.train())) == 1


def test_trackers_get_options_that_they_take(tiny_model, tmp_path):
    """TensorBoard takes numbers, bools and text."""
    options = {"loss_options": {}, "stop": ["a", "b"], "trackers": []}
    trainer, taken = trainer_of(config_of(tiny_model, tmp_path, **options)), {}
    trainer.accelerator.init_trackers = lambda name, config: taken.update(config)
    Trackers(trainer.config, trainer.accelerator).start(0)
    assert all(isinstance(x, (int, float, str, type(None))) for x in taken.values())
    assert (taken["stop"], taken["loss_options"], taken["steps"]) == ("a, b", "{}", 2)


def test_special_tokens_are_text_but_for_those_that_end_begin_or_pad(tiny_model, tmp_path):
    """Here `#` is a tag, and `~` an end of the model that the tokenizer knows nothing of."""
    config = config_of(tiny_model, tmp_path, max_completion_length=9)
    model, tokenizer = load_model(config)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["#", "~", "|"], "pad_token": "_", "bos_token": "^"}
    )
    end = tokenizer.convert_tokens_to_ids("~")
    model.generation_config.eos_token_id = [0, end, tokenizer.convert_tokens_to_ids("!")]
    trainer = trainer_of(config, model, tokenizer)
    texts = ("^#4#2|~", "#_42#<eos>", "~42", "#a\n!", "<eos>")
    done = [Completion(tokenizer(text).input_ids, True) for text in texts]
    assert [len(one.token_ids) for one in done] == [7, 6, 3, 4, 1]
    # An end that is no special token is text.
    assert trainer.sampler.texts(done) == ["#4#2|", "#42#", "42", "#a\n!", ""]


def test_prompts_are_tokenized_once():
    tokenizer, asked = make_tokenizer(), []
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}:"
    template = tokenizer.apply_chat_template
    tokenizer.apply_chat_template = lambda *a, **k: asked.append(1) or template(*a, **k)
    encode = prompts.PromptEncoder(tokenizer, chat=True)
    messages = [{"role": "system", "content": "a"}]
    for prompt, text in (("hi", "<user>hi:"), (messages, "<system>a:"),
                         (repr(messages), f"<user>{messages}:")) * 2:  # fmt: skip
        assert tokenizer.decode(encode({"prompt": prompt})) == text
    assert len(asked) == 3


def test_a_loss_by_instance_is_that_of_its_name(tiny_model, tmp_path):
    """The loss's repr is recorded; a run goes on by it."""
    config = config_of(tiny_model, tmp_path, loss_type=Sapo(temperature_neg=1.3), beta=0.1)
    named = replace(
        config, output=str(tmp_path / "named"), loss_type="sapo", sapo_temperature_neg=1.3
    )
    rows = [rows_of(trainer_of(one).train()) for one in (config, named)]
    assert rows[0] == rows[1]
    recorded = json.loads((config.folder / "config.json").read_text())["loss_type"]
    assert recorded == "Sapo(temperature_pos=1.0, temperature_neg=1.3)"
    trainer_of(replace(config, steps=3, resume=True)).train()
    assert len(rows_of(config.folder)) == 3
    with pytest.raises(ValueError, match=r"loss_type: was 'Sapo.*1\.3.*', is 'Sapo.*1\.05"):
        trainer_of(replace(config, steps=4, resume=True, loss_type=Sapo())).train()

"""Runs of the trainer beside their options: what they log, problems and tokens, observers."""

import json
import re

import pytest
import torch
from accelerate import tracking
from transformers import AutoModelForCausalLM

from grpo_kernels.explain import runs
from grpo_kernels.explain.records import read_rows
from grpo_kernels.loss.losses import Sapo
from grpo_kernels.training import Completion, load_model
from grpo_kernels.training.run import checkpoint
from grpo_kernels.training.run.observers import Observer
from tests.helpers.trainer_runs import (
    FakeRollout,
    config_of,
    freeze_all_but,
    rows_of,
)

pytestmark = pytest.mark.usefixtures("real_memory")


def test_trains_and_reports(make, tiny_model, capsys):
    trainer, seen = make(
        eval_size=5, beta=0.05, save_model=True, is_correction="token_truncate", eval_every=1,
        rollout=lambda _: FakeRollout((6, 1, 3), logps=-5.5),
    ), []  # fmt: skip
    folder = trainer.train(lambda row, samples: seen.append((row, samples)))
    rows, evaluations, answers = (
        read_rows(folder / f"{name}.jsonl") for name in ("metrics", "evaluations", "answers")
    )
    assert [row["step"] for row in rows] == [row["step"] for row, _ in seen] == [1, 2]
    assert [row["step"] for row in evaluations] == [0, 1, 2] and len(answers) == 15
    _, samples = seen[0]
    assert len(samples.prompts) == len(samples.problems) == 4 and len(samples.texts) == 16
    assert samples.prompt_of == [i // 4 for i in range(16)]
    assert {
        "reward/noise", "accuracy", "completion_length", "truncated", "groups_equal",
        "sampler_gap", "peak_memory_gib",
    } <= set(rows[0])  # fmt: skip
    for row in rows:
        parts = ("sync", "generate", "reward", "score", "train")
        total = sum(row.get(f"seconds/{name}", 0) for name in parts)
        assert row["seconds"] == pytest.approx(total)
        assert 0 < row["seconds/head"] < row["seconds/train"] and row["seconds/page"] > 0
    assert not re.search(r"(src|href)=.?(https?:)?//", (folder / "report.html").read_text())
    said = capsys.readouterr().out
    assert "held-out accuracy 0.0% (95 %: 0.0% to 43.4%) of 5" in said
    before, after = map(AutoModelForCausalLM.from_pretrained, (tiny_model, folder / "model"))
    for (name, p), q in zip(before.named_parameters(), after.parameters(), strict=True):
        assert not torch.equal(p, q), name


def test_frozen_weights_are_not_copied_for_the_reference(make):
    model, tokenizer = load_model(make().config)
    freeze_all_but(model, "layers.1.")
    trainer = make(model, tokenizer, beta=0.1)
    copied = dict(trainer.reference.copy.named_parameters())
    same = {n for n, p in trainer.policy.named_parameters() if p.data_ptr() == copied[n].data_ptr()}
    assert any("layers.0" in n for n in same) and not any("layers.1" in n for n in same)


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


def test_a_run_goes_on_by_the_repr_of_its_loss(make):
    instance = {"loss_type": Sapo(temperature_neg=1.3)}
    folder = make(steps=1, **instance).train()
    recorded = json.loads((folder / "config.json").read_text())["loss_type"]
    assert recorded == "Sapo(temperature_pos=1.0, temperature_neg=1.3)"
    make(resume=True, **instance).train()
    assert len(rows_of(folder)) == 2
    with pytest.raises(ValueError, match=r"loss_type: was 'Sapo.*1\.3.*', is 'Sapo.*1\.05"):
        make(resume=True, loss_type=Sapo())


# Problems, answers and tokens


def test_problems_may_have_no_answer(make):
    some = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": None}]
    some += [{"prompt": x} for x in "cde"]
    (row,) = rows_of(make(steps=1, problems=(some, ())).train())
    assert "accuracy" not in row


def test_held_out_problems_are_never_trained_on(make, capsys):
    some = [{"prompt": x, "answer": "1"} for x in "abcd"]
    trainer = make(problems=(some, some[1:3]), prompts_per_step=2)
    parts = trainer.train_problems, trainer.held_out
    assert [[p["prompt"] for p in part] for part in parts] == [["a", "d"], ["b", "c"]]
    assert "2 of 4 problems to train on are left out" in capsys.readouterr().out


def test_a_tokenizer_without_a_pad_token_pads_with_its_end(make):
    model, tokenizer = load_model(make().config)
    tokenizer.pad_token = None
    make(model, tokenizer)
    assert tokenizer.pad_token == "<eos>"


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


def test_observers_that_fail_end_no_run(make, monkeypatch, capsys):
    """A tracker without a network, say; the row is there when one looks, and so are all others."""
    trainer, seen = make(eval_size=2, eval_every=1, save_every=1, steps=3, show_every=1), []

    def fails(error):
        def work(*_, **__):
            seen.append(len(rows_of(trainer.config.folder)) if trainer.run.step else 0)
            raise error("not today")

        return work

    events = {"start": ConnectionError, "step": SystemExit, "evaluation": ValueError,
              "end": SystemExit}  # fmt: skip
    for event, error in events.items():
        kind = type(f"At_{event}", (Observer,), {event: fails(error)})
        trainer.run.observers.insert(0, kind(trainer.config))

    def broken(*_):
        raise ValueError("not today")

    monkeypatch.setattr(runs, "write", broken)  # of the page
    trainer.run.watch.after_step = trainer.explanations.steps.why = broken
    folder = trainer.train()
    assert len(rows_of(folder)) == 3 and checkpoint.latest(folder).name == "step-000003.pt"
    assert not (folder / "report.html").exists() and {1, 2, 3} <= {*seen}
    said = capsys.readouterr().out
    names = {f"At_{event}": error for event, error in events.items()}
    for name, error in {
        **names,
        **dict.fromkeys(("Page", "warnings", "explain"), ValueError),
    }.items():
        assert said.count(f"{name} failed ({error.__name__}: not today)") == 1, name


def test_a_terminal_that_was_closed_ends_no_run(make, monkeypatch):
    def fails(*_, **__):
        raise SystemExit

    monkeypatch.setattr("tqdm.tqdm.write", fails)
    folder = make().train()
    assert len(rows_of(folder)) == 2 and (folder / "report.html").exists()


def test_who_looks_on_gets_rows_and_problems_of_its_own(make):
    some = [{"prompt": x, "answer": [x]} for x in "abcde"]
    trainer, seen = make(problems=(some[:4], some[4:]), is_correct=lambda text, right: True), []

    class Changes(Observer):
        def step(self, row, samples):
            row.clear()

        def evaluation(self, step, evaluation):
            for row in evaluation.answers:
                row["answer"].clear()

    class Sees(Observer):
        def step(self, row, samples):
            seen.append(row["step"])

    trainer.run.observers[:] = [Changes(trainer.config), Sees(trainer.config)]
    trainer.train(lambda row, _: seen.append(row["step"]))
    assert seen == [1, 1, 2, 2] and trainer.held_out == [{"prompt": "e", "answer": ["e"]}]

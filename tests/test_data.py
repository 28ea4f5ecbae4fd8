"""Problems: where they come from, what is held out, and in which order they come."""

import json
import math
from datetime import datetime
from decimal import Decimal

import numpy
import pytest
from tokenizers.processors import TemplateProcessing

from examples import problems
from grpo_kernels.training import (
    TrainingConfig,
    answers,
    data,
    load_problems,
    report,
    rewards,
)
from grpo_kernels.training.prompts import EXAMPLE, PromptEncoder, build_prompt, short_enough
from grpo_kernels.training.run import place_of
from tests.helpers.tiny_models import make_tokenizer

pytestmark = pytest.mark.usefixtures("real_memory")


def config_of(**options):
    return TrainingConfig(model="m", **options)


def in_lines(path, *rows):
    """Writes a file with a row of JSON per line; returns its name."""
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def in_parquet(path, *rows):
    import datasets

    datasets.Dataset.from_list(list(rows)).to_parquet(path)
    return str(path)


def question_of(problem):
    return problem["prompt"].rpartition("Question: ")[2].rstrip("\n")


def chain_sum(config):
    return problems.of_reasoning_gym("chain_sum", config)


def test_no_dataset_is_asked_for():
    for load, name in ((load_problems, ()), (data.load_to_answer, ("",))):
        with pytest.raises(ValueError, match="dataset: expected a name on the hub, a file, or"):
            load(config_of(), *name)


@pytest.mark.parametrize("name", ("examples.problems:nothing", "no.such:thing", "json:__doc__"))
def test_what_cannot_be_imported(name):
    with pytest.raises(ValueError, match=r"rewards: expected (module:function|a function); got"):
        rewards.resolve_rewards([name])
    with pytest.raises(ValueError, match=r"dataset: expected (module:function|a function); got"):
        load_problems(config_of(dataset=name))


@pytest.mark.parametrize(
    ("name", "sizes"),
    (
        ("examples.problems:additions", (54, 27)),
        ("examples.problems:gsm_symbolic", (20, 5)),
        (f"{__name__}:chain_sum", (20, 5)),
    ),
)
def test_made_problems_are_held_out(name, sizes):
    given = {"dataset": name, "train_size": sizes[0], "eval_size": sizes[1]}
    train, held_out = load_problems(config_of(**given))
    prompts = [{p["prompt"] for p in some} for some in (train, held_out)]
    assert len(held_out) == sizes[1] and sizes[0] / 2 < len(train) <= sizes[0]
    assert not prompts[0] & prompts[1]
    assert all(answers.number_of(p["answer"]) is not None for p in (*train, *held_out))
    if name.endswith("gsm_symbolic"):
        assert EXAMPLE in train[0]["prompt"]
        chat = load_problems(config_of(**given, chat=True))[0][0]
        assert [m["role"] for m in chat["prompt"]] == ["user"]
    if name.endswith("chain_sum"):  # which has a judge of its own
        texts = [f"<answer>{train[0]['answer']}</answer>", "<answer>no</answer>"]
        functions = rewards.resolve_rewards(["examples.problems:score"])
        table = rewards.reward_table(functions, train[:2], texts)
        assert functions[0].label == "score" and table[0] == [2.0] and table[1][0] < 2.0


@pytest.mark.parametrize("write", (in_lines, in_parquet))
def test_files(write, tmp_path):
    """Rows may be sorted, and several have one prompt: all count, and are in one part."""
    rows = [{"question": f"{i // 2}?", "answer": f"so\n#### {i}", "level": i // 2}
            for i in range(40)]  # fmt: skip
    name = write(tmp_path / ("a.jsonl" if write is in_lines else "a.parquet"), *rows)
    train, held_out = load_problems(config_of(dataset=name))
    answers = [[int(p["answer"]) for p in part] for part in (train, held_out)]
    assert [len(part) for part in answers] == [32, 8]
    assert sorted(x for part in answers for x in part) == [*range(40)]
    assert sorted(answers[1]) != [*range(8)]
    assert all(p["level"] == int(p["answer"]) // 2 for p in (*train, *held_out))
    assert not {p["prompt"] for p in train} & {p["prompt"] for p in held_out}
    assert train[3]["prompt"].endswith(f"Question: {train[3]['level']}?\n")
    fewer = load_problems(config_of(dataset=name, eval_size=2))
    assert [len(part) for part in fewer] == [38, 2]
    whole, which = data.load_to_answer(config_of(), name, 100)
    assert [int(p["answer"]) for p in whole] == [*range(40)] and which.startswith("All 40 problems")
    part, which = data.load_to_answer(config_of(), name, 30)
    assert part == whole[:30] and which.startswith("The first 30 problems of ")


def test_answers_are_text_or_whole_numbers(tmp_path):
    """In a file of lines, of types, and as a function makes them."""
    config = config_of(dataset=str(tmp_path / "a.jsonl"), eval_size=0)
    for answer, text in (("so #### 1.50", "1.50"), ("007", "007"), ("", ""), (7, "7"), (-7, "-7"),
                         (2**53 + 1, str(2**53 + 1)), (numpy.int64(8), "8")):  # fmt: skip
        assert data.problem_of({"answer": answer}, config) == {"answer": text}
        if type(answer) is not numpy.int64:
            in_lines(tmp_path / "a.jsonl", {"question": answer, "answer": answer, "level": 0.5})
            (problem,) = load_problems(config)[0]
            assert problem["answer"] == text and problem["level"] == 0.5
            assert question_of(problem) == str(answer)
    day = datetime(2020, 1, 31)
    for value in (12.0, True, [1, 2], {"a": 1}, Decimal("1.50"), day, day.date()):
        for column in ("answer", "question", "prompt"):
            if column == "prompt" and isinstance(value, list):
                continue
            message = f"^dataset: {column} is neither text nor a whole number: write it as text, or"
            with pytest.raises(ValueError, match=message):
                data.problem_of({"prompt": "a", column: value} if column != "question" else
                                {column: value}, config)  # fmt: skip


@pytest.mark.parametrize("write", (in_lines, in_parquet))
def test_the_row_of_another_answer_is_named(write, tmp_path):
    name = write(tmp_path / ("a.jsonl" if write is in_lines else "a.parquet"),
                 {"prompt": "a", "answer": 1.5}, {"prompt": "b", "answer": 2.5})  # fmt: skip
    where = "line" if write is in_lines else "row"
    with pytest.raises(ValueError, match=f"as it is; got 1.5 in {where} 1 of .*a[.]"):
        load_problems(config_of(dataset=name, eval_size=0))


def test_an_answer_of_nan_is_none(tmp_path):
    name = in_parquet(tmp_path / "a.parquet", {"prompt": "a", "answer": math.nan})
    with pytest.raises(ValueError, match=r"an answer, .* got \['prompt'\] in row 1 of"):
        load_problems(config_of(dataset=name, eval_size=0))


OWN = {"rewards": ["m:f", "format"]}


def test_answers_where_nothing_needs_one(tmp_path):
    name = in_lines(tmp_path / "a.jsonl", {"prompt": "a", "answer": None}, {"prompt": "b"})
    train = load_problems(config_of(dataset=name, **OWN, eval_size=0))[0]
    assert sorted(train, key=str) == [{"prompt": "a"}, {"prompt": "b"}]
    with pytest.raises(ValueError, match=r"an answer, for an eval_size > 0; got .* in line 1 of"):
        data.load_to_answer(config_of(**OWN), name)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    (
        ('{"question": "a", "answer": "b"}\n\n{', {}, "expected JSON in line 3 of .*a.jsonl"),
        ('[{"question": "a", "answer": "b"}]', {}, "expected an object in line 1 of .*a.jsonl"),
        (b'{"question": "\xff", "answer": "b"}', {}, "expected JSON in line 1 of .*a.jsonl"),
        ('{"question": null, "answer": "b"}', {}, r"a question .* got \['answer'\] in line 1 of"),
        ('{"question": "a", "answer": null}', {}, r"an answer, .* got \['prompt', 'question'\] in"),
        ('{"text": "a"}', {}, r"expected problems with a question .* got \['text'\]"),
        ("", {}, "expected at least one problem to train on; got none in .*a.jsonl"),
        (None, {}, "expected a file; .*a.jsonl does not exist"),
        ('{"prompt": "b"}', {**OWN, "eval_size": 1}, "an answer, for an eval_size > 0; got .* in"),
        ('{"prompt": "a", "rewards": "f"}\n{"prompt": "b", "rewards": ["answer"]}',
         {"rewards": ["answer", "m:f"]}, "an answer, for the reward answer; got .* in line 2 of"),
    ),
)  # fmt: skip
def test_files_that_are_no_problems(text, options, message, tmp_path):
    path = tmp_path / "a.jsonl"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message):
        load_problems(config_of(dataset=str(path), **{"eval_size": 0, **options}))


@pytest.mark.parametrize(
    ("splits", "train", "held_out", "answered"),
    (
        ("train test validation", "train 0 to 29", "test 0 to 19", "test"),
        ("train validation", "train 0 to 29", "validation 0 to 19", "validation"),
        ("train", "24 of train", "6 of train", "train"),
        ("test", None, None, "test"),
    ),
)
def test_splits_go_by_their_names(splits, train, held_out, answered, tmp_path):
    for split in splits.split():
        count = 30 if split == "train" else 20
        rows = ({"question": f"{split} {i}", "answer": i} for i in range(count))
        in_lines(tmp_path / f"{split}.jsonl", *rows)
    config = config_of(dataset=str(tmp_path), eval_size=25)
    if train is None:
        message = rf"^dataset: expected a split train .* got \['{splits}"
        with pytest.raises(ValueError, match=message):
            load_problems(config)
    else:
        for part, expected in zip(load_problems(config), (train, held_out), strict=True):
            asked = [question_of(p).split() for p in part]
            assert [int(p["answer"]) for p in part] == [int(number) for _, number in asked]
            numbers = f"{asked[0][0]} {asked[0][1]} to {asked[-1][1]}"
            assert expected in (numbers, f"{len(asked)} of {asked[0][0]}")
    some, which = data.load_to_answer(config, config.dataset, 25)
    assert f" split {answered} " in which and len(some) == (25 if splits == "train" else 20)
    assert {question_of(p).split()[0] for p in some} == {answered}


def test_a_split_is_read_as_far_as_it_is_needed(tmp_path):
    """Ten to train on need more than those for a held-out fifth of six."""
    in_lines(tmp_path / "train.jsonl", *({"question": f"{i}", "answer": i} for i in range(200)))
    parts = load_problems(config_of(dataset=str(tmp_path), train_size=10, eval_size=6))
    assert [len(part) for part in parts] == [10, 6]
    assert all(int(p["answer"]) < 30 for part in parts for p in part)
    parts = load_problems(config_of(dataset=str(tmp_path), train_size=100, eval_size=6))
    assert [len(part) for part in parts] == [100, 6]
    assert all(int(p["answer"]) < 106 for part in parts for p in part)


def test_problems_that_are_held_out_are_not_trained_on(tmp_path, caplog):
    rows = [{"question": f"{i}?", "answer": str(i)} for i in range(10)]
    in_lines(tmp_path / "train.jsonl", *rows)
    in_lines(tmp_path / "test.jsonl", *rows[:4])
    # Those of the split that this run does not answer, too.
    train, held_out = load_problems(config_of(dataset=str(tmp_path), eval_size=2))
    assert [p["answer"] for p in train] == list("456789")
    assert [p["answer"] for p in held_out] == ["0", "1"]
    assert "4 of 10 problems to train on are left out" in caplog.text
    files = {"dataset": str(tmp_path / "train.jsonl"), "eval_dataset": str(tmp_path / "test.jsonl")}
    train, held_out = load_problems(config_of(**files, eval_size=2, eval_every=1))
    assert sorted(p["answer"] for p in train) == list("456789") and len(held_out) == 2
    files["dataset"] = files["eval_dataset"]
    with pytest.raises(ValueError, match="expected at least one problem to train on; got none in"):
        load_problems(config_of(**files))


def test_a_test_split_without_answers_is_in_the_way_of_no_run_that_does_not_ask_it(tmp_path):
    rows = [{"question": f"{i}?", "answer": str(i)} for i in range(10)]
    in_lines(tmp_path / "train.jsonl", *rows)
    in_lines(tmp_path / "test.jsonl", {"question": "3?"}, {"question": "new?", "answer": 0.5}, {})
    train, held_out = load_problems(config_of(dataset=str(tmp_path), eval_size=0))
    assert [p["answer"] for p in train] == list("012456789") and not held_out
    with pytest.raises(ValueError, match=r"an answer, .*; got .* in row 1 of split test"):
        load_problems(config_of(dataset=str(tmp_path), eval_size=1))


def test_held_out_problems_of_a_file_of_their_own(tmp_path):
    for name, count in (("train", 30), ("test", 7)):
        rows = ({"question": f"{name} {i}", "answer": str(i)} for i in range(count))
        in_lines(tmp_path / f"{name}.jsonl", *rows)
    files = {"dataset": str(tmp_path / "train.jsonl"), "eval_dataset": str(tmp_path / "test.jsonl")}
    train, held_out = load_problems(config_of(**files, train_size=0, eval_size=5))
    assert len(held_out) == 5 and all("test" in p["question"] for p in held_out)
    assert len(train) == 30 and all("train" in p["question"] for p in train)


def test_prompts_have_tokens_and_not_too_many():
    def kept(*prompts):
        problems = [{"prompt": prompt} for prompt in prompts]
        some = short_enough(problems, lambda problem: [*problem["prompt"]], 3, said.append)
        return [problem["prompt"] for problem in some]

    said = []
    assert kept("abc", "a") == ["abc", "a"] and kept() == [] and said == []
    assert kept("abc", "", "abcd", "a", "abcde") == ["abc", "a"]
    assert said == [
        "2 of 5 problems are left out: their prompts have more than max_prompt_length = 3 tokens",
        "1 of 5 problems are left out: their prompts have no token",
    ]
    for none in (("", "abcd"), ("", "")):
        with pytest.raises(
            ValueError, match="max_prompt_length=3: every prompt is longer, or empty"
        ):
            kept(*none)


def test_every_problem_once_an_epoch():
    order = [place_of(turn, 7, seed=3) for turn in range(21)]
    assert [sorted(order[i : i + 7]) for i in (0, 7, 14)] == [list(range(7))] * 3
    assert order[:7] != order[7:14]


# Prompts

CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
USER = {"role": "user", "content": "2 + 3?"}


@pytest.fixture(params=("$A", "<bos> $A", "$A <eos>", "<bos> $A <eos>"))
def tokenizer(request):
    """A tokenizer that puts these around a text."""
    found = make_tokenizer()
    found.add_special_tokens({"bos_token": "<bos>"})
    ids = [("<bos>", found.bos_token_id), ("<eos>", found.eos_token_id)]
    found.backend_tokenizer.post_processor = TemplateProcessing(
        single=request.param, special_tokens=ids
    )
    found.chat_template, found.begins = CHAT, "<bos>" * ("<bos>" in request.param)
    return found


def test_a_prompt_is_to_be_gone_on_from(tokenizer):
    def seen(prompt, chat=False):
        return tokenizer.decode(PromptEncoder(tokenizer, chat=chat)({"prompt": prompt}))

    assert seen("2 + 3?") == f"{tokenizer.begins}2 + 3?"
    assert seen("") == tokenizer.begins
    assert seen("no end<eos>") == f"{tokenizer.begins}no end<eos>"
    asked = "<bos>[user]2 + 3?[end][assistant]"
    assert seen([USER]) == seen("2 + 3?", chat=True) == asked
    rendered = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    assert seen(rendered) == asked
    begun = [USER, {"role": "assistant", "content": "<think>Two plus"}]
    assert seen(begun) == f"{asked}<think>Two plus"
    assert seen([*begun, USER]) == f"{asked}<think>Two plus[end][user]2 + 3?[end][assistant]"


@pytest.mark.parametrize(
    ("content", "text"),
    (
        ("2 + 3?", "2 + 3?"),
        ([{"type": "text", "text": "2 + "}, {"type": "text", "text": "3?"}], "2 + 3?"),
        ([{"type": "image", "text": None}, {"type": "text", "text": "?"}], "?"),
        (None, ""),
    ),
)
def test_a_message_has_a_text_parts_or_nothing(content, text):
    assert report.prompt_text([USER, {"role": "user", "content": content}]) == text


def prompt(**options):
    return build_prompt("1 + 1?", config_of(**options))


def test_prompts_are_made_as_the_options_say():
    assert prompt().endswith(f"{EXAMPLE}\n\nQuestion: 1 + 1?\n") and "<think>" in prompt()
    assert prompt(prompt_template="Q: {question} A:") == "Q: 1 + 1? A:"
    own = {"system_prompt": "Be brief.", "prompt_template": "{question}"}
    assert prompt(**own) == "Be brief.\n1 + 1?"
    system, user = prompt(chat=True, **own)
    assert system == {"role": "system", "content": "Be brief."}
    assert user == {"role": "user", "content": "1 + 1?"}

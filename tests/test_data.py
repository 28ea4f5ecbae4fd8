"""Problems: where they come from, what is held out, and in which order they come."""

import csv
import json
from pathlib import Path

import numpy
import pytest
from tokenizers.processors import TemplateProcessing

from examples import problems
from grpo_kernels.explain.records import prompt_text
from grpo_kernels.training import TrainingConfig, load_model, load_problems
from grpo_kernels.training.problems import answers, data, rewards
from grpo_kernels.training.problems.prompts import (
    EXAMPLE,
    PromptEncoder,
    build_prompt,
    short_enough,
)
from grpo_kernels.training.run.schedule import index_at_turn
from tests.helpers.tiny_models import make_tokenizer

pytestmark = pytest.mark.usefixtures("real_memory")


def config_of(**options):
    return TrainingConfig(model="m", **options)


def write(path, *rows):
    """Writes a file of rows, by its suffix; returns its name."""
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, rows[0])
            table.writeheader()
            table.writerows(rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif path.suffix == ".parquet":
        import datasets

        datasets.Dataset.from_list(list(rows)).to_parquet(path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def numbered(text, numbers):
    return [{"question": f"{text} {i}", "answer": str(i)} for i in numbers]


def answers_of(part):
    return [int(problem["answer"]) for problem in part]


def question_of(problem):
    return problem["prompt"].rpartition("Question: ")[2].rstrip("\n")


# Problems that are made


def chain_sum(config):
    return problems.of_reasoning_gym("chain_sum", config)


@pytest.mark.parametrize("name", ("examples.problems:gsm_symbolic", f"{__name__}:chain_sum"))
def test_made_problems_are_held_out(name):
    train, held_out = load_problems(config_of(dataset=name, train_size=20, eval_size=5))
    prompts = [{p["prompt"] for p in some} for some in (train, held_out)]
    assert len(held_out) == 5 and 10 < len(train) <= 20 and not prompts[0] & prompts[1]
    assert all(answers.number_of(p["answer"]) is not None for p in (*train, *held_out))
    if name.endswith("chain_sum"):  # which has a judge of its own
        texts = [f"<answer>{train[0]['answer']}</answer>", "<answer>no</answer>"]
        functions = rewards.resolve_rewards(["examples.problems:score"])
        table = rewards.reward_table(functions, train[:2], texts)
        assert functions[0].label == "score" and table[0] == [2.0] and table[1][0] < 2.0


# Files


@pytest.mark.parametrize("name", ("a.jsonl", "a.parquet", "a.json"))
def test_files(name, tmp_path):
    """Rows may be sorted, and several have one prompt: all count, and are in one part."""
    rows = [{"question": f"{i // 2}?", "answer": f"so\n#### {i}", "level": i // 2}
            for i in range(40)]  # fmt: skip
    name = write(tmp_path / name, *rows)
    train, held_out = load_problems(config_of(dataset=name))
    assert [len(train), len(held_out)] == [32, 8]
    assert sorted(answers_of([*train, *held_out])) == [*range(40)]
    assert sorted(answers_of(held_out)) != [*range(8)]
    assert all(p["level"] == int(p["answer"]) // 2 for p in (*train, *held_out))
    assert not {p["prompt"] for p in train} & {p["prompt"] for p in held_out}
    assert train[3]["prompt"].endswith(f"Question: {train[3]['level']}?\n")
    assert [*map(len, load_problems(config_of(dataset=name, eval_size=2)))] == [38, 2]
    assert answers_of(data.problems_of(name, config_of())) == [*range(40)]


# Files, and folders of the names of a format and of a function.
NAMES = ("t_2026-11-28T14:03:00.jsonl", "me@host/a.jsonl", "json:dumps/a.csv", "[a] *.parquet",
         "a b.json", "./m:f.jsonl", "json/train.jsonl",
         "examples.problems:additions/train.jsonl")  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_what_is_on_the_disk_is_read_whatever_its_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (path := Path(name)).parent.mkdir(exist_ok=True)
    write(path, *numbered("", range(9)))
    for dataset in (name, *([str(path.parent)] if path.parent.name else [])):
        train, _ = load_problems(config_of(dataset=dataset, eval_size=0))
        assert sorted(answers_of(train)) == [*range(9)]


def test_a_folder_of_save_to_disk(tmp_path):
    import datasets

    rows = {x: datasets.Dataset.from_list(numbered(x, range(10))) for x in ("train", "test")}
    datasets.DatasetDict(rows).save_to_disk(tmp_path)
    assert [*map(len, load_problems(config_of(dataset=str(tmp_path))))] == [10, 10]


def test_no_type_of_a_table_is_guessed(tmp_path):
    """Spreadsheets write a mark before the first column, and others before a list."""
    (tmp_path / "a.JSON").write_text("\ufeff" + json.dumps(numbered("", range(2))))
    assert answers_of(data.problems_of(str(tmp_path / "a.JSON"), config_of())) == [0, 1]
    path = tmp_path / "a.csv"
    rows = 'question,answer,note\n1?,007,NA\n"2,\n3?",1.50,\n4?,2024-01-02,x\n'
    path.write_text("\ufeff" + rows)
    problems = data.problems_of(str(path), config_of())
    assert [(p["answer"], p["note"]) for p in problems] == [
        ("007", "NA"), ("1.50", None), ("2024-01-02", "x")
    ]  # fmt: skip
    assert question_of(problems[1]) == "2,\n3?"


def test_a_problem_may_have_no_answer_if_nothing_needs_one(tmp_path):
    assert data.problem_of({"answer": numpy.int64(8)}, config_of()) == {"answer": "8"}
    name = write(tmp_path / "a.jsonl", {"prompt": "a", "answer": None}, {"prompt": "b"})
    config = config_of(dataset=name, rewards=["m:f", "format"], eval_size=0)
    assert sorted(load_problems(config)[0], key=str) == [{"prompt": "a"}, {"prompt": "b"}]


# Splits


@pytest.mark.parametrize(
    ("splits", "train", "held_out"),
    (
        ("train test validation", "train 0 to 29", "test 0 to 19"),
        ("train validation", "train 0 to 29", "validation 0 to 19"),
        ("train", "24 of train", "6 of train"),
    ),
)
def test_splits_go_by_their_names(splits, train, held_out, tmp_path):
    for split in splits.split():
        write(tmp_path / f"{split}.jsonl", *numbered(split, range(30 if split == "train" else 20)))
    parts = load_problems(config_of(dataset=str(tmp_path), eval_size=25))
    for part, expected in zip(parts, (train, held_out), strict=True):
        names, numbers = zip(*(question_of(p).split() for p in part), strict=True)
        assert answers_of(part) == [*map(int, numbers)]
        whole = f"{names[0]} {numbers[0]} to {numbers[-1]}"
        assert expected in (whole, f"{len(part)} of {names[0]}")


@pytest.mark.parametrize("eval_size", (2, 0))
def test_problems_that_are_held_out_are_not_trained_on(eval_size, tmp_path, caplog):
    """Nor those of the split that this run does not answer."""
    for name, numbers in (("train", range(10)), ("test", range(4))):
        write(tmp_path / f"{name}.jsonl", *numbered("", numbers))
    config = config_of(dataset=str(tmp_path), train_size=0, eval_size=eval_size)
    train, held_out = load_problems(config)
    assert sorted(answers_of(train)) == [*range(4, 10)]
    assert answers_of(held_out) == [*range(eval_size)]
    assert "4 of 10 problems to train on are left out: their prompts are held out" in caplog.text


def test_prompts_are_the_same_in_any_order_of_keys_with_any_white_space_and_as_list_or_tuple():
    user = {"role": "user", "content": "a b"}
    train = [{"prompt": [user]}, {"prompt": "ab"}]
    for prompt in ((user,), [dict(reversed(user.items()))], [user | {"content": "a\n b "}]):
        said = []
        assert data.not_held_out(train, [{"prompt": prompt}], said.append) == train[1:]
        assert said[0].startswith("1 of 2 problems to train on are left out")
    assert data.not_held_out(train, [], None) == train


def test_every_problem_once_an_epoch():
    order = [index_at_turn(turn, 7, seed=3) for turn in range(21)]
    assert [sorted(order[i : i + 7]) for i in (0, 7, 14)] == [list(range(7))] * 3
    assert order[:7] != order[7:14]


# Prompts


def test_prompts_have_tokens_and_not_too_many():
    def short(*prompts):
        problems = [{"prompt": prompt} for prompt in prompts]
        some = short_enough(problems, lambda problem: [*problem["prompt"]], 3, printed.append)
        return [problem["prompt"] for problem in some]

    printed = []
    assert short("abc", "a") == ["abc", "a"] and short() == [] and printed == []
    assert short("abc", "", "abcd", "a", "abcde") == ["abc", "a"]
    assert printed == [
        "2 of 5 problems are left out: their prompts have more than max_prompt_length = 3 tokens",
        "1 of 5 problems are left out: their prompts have no token",
    ]


CHAT = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
USER = {"role": "user", "content": "2 + 3?"}
BEGUN = [USER, {"role": "assistant", "content": "<think>Two plus"}]
OPENED = "<bos>[user]2 + 3?[end][assistant]"


@pytest.mark.parametrize("around", ("$A", "<bos> $A <eos>"))
def test_a_prompt_is_to_be_gone_on_from(around):
    """Some tokenizers put these around a text."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    ids = [("<bos>", tokenizer.bos_token_id), ("<eos>", tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=around, special_tokens=ids
    )
    tokenizer.chat_template, begin = CHAT, "<bos>" * ("<bos>" in around)
    rendered = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    for prompt, chat, text in (
        ("2 + 3?", False, f"{begin}2 + 3?"),
        ("", False, begin),
        ([], False, ""),
        ("no end<eos>", False, f"{begin}no end<eos>"),
        ([USER], False, OPENED),
        ("2 + 3?", True, OPENED),
        (rendered, False, OPENED),
        (BEGUN, False, f"{OPENED}<think>Two plus"),
        ([*BEGUN, USER], False, f"{OPENED}<think>Two plus[end][user]2 + 3?[end][assistant]"),
    ):
        encode = PromptEncoder(tokenizer, chat=chat, vocabulary=len(tokenizer))
        assert tokenizer.decode(encode({"prompt": prompt})) == text


def test_a_message_has_a_text_parts_or_nothing():
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "3?"}]
    messages = [{"role": "user", "content": content} for content in ("2 +", None, parts)]
    assert prompt_text(messages) == "2 +\n\n3?"


def test_prompts_are_made_as_the_options_say():
    def prompt(**options):
        return build_prompt("1 + 1?", config_of(**options))

    assert prompt().endswith(f"{EXAMPLE}\n\nQuestion: 1 + 1?\n") and "<think>" in prompt()
    assert "<think>" in prompt(chat=True)[0]["content"]
    own = {"system_prompt": "Be brief."}
    assert prompt(**own) == "Be brief.\n1 + 1?"
    messages = {"system": "Be brief.", "user": "1 + 1?"}
    assert prompt(chat=True, **own) == [{"role": k, "content": v} for k, v in messages.items()]


def test_a_prompt_that_has_the_system_prompt_stays_as_it_is(tmp_path):
    """A run's held-out problems were made with it."""
    system = {"role": "system", "content": "Be\nbrief."}
    config = config_of(system_prompt=system["content"], eval_size=0)
    parts = system | {"content": [{"type": "text", "text": system["content"]}]}
    for prompt in ([system, USER], [parts, USER], "Be\nbrief.\n1 + 1?"):
        name = write(tmp_path / "a.jsonl", {"question": "a", "prompt": prompt, "answer": "2"})
        assert data.problems_of(name, config)[0]["prompt"] == prompt


# The hub


def test_without_the_hub_a_model_is_a_folder(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # else it asks for long
    with pytest.raises(OSError, match=r"^model: 'no/where' is not a folder with a model, and not"):
        load_model(TrainingConfig(model="no/where"))


class DatasetNotFoundError(Exception):
    """An error of `datasets`, known by its name."""


def test_why_nothing_was_downloaded():
    def said(text):
        error = OSError("no")
        error.__cause__ = DatasetNotFoundError(text)
        return data.why_not_downloaded(error)

    assert "accept the terms on its page" in said("'a' is a gated dataset")
    assert "nothing has this name" in said("'a' does not exist")

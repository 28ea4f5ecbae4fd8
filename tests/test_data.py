"""Problems: where they come from, what is held out, and in which order they come."""

import json
import math
from datetime import date, datetime
from decimal import Decimal
from fractions import Fraction

import pytest

from examples import problems
from grpo_kernels.training import TrainingConfig, data, judging, load_problems, rewards
from grpo_kernels.training.run import place_of

pytestmark = pytest.mark.usefixtures("real_memory")


def config_of(**options):
    return TrainingConfig(model="m", **options)


def chain_sum(config):
    return problems.of_reasoning_gym("chain_sum", config)


def test_the_tasks_own_judge():
    train, _ = load_problems(config_of(dataset=f"{__name__}:chain_sum", train_size=2, eval_size=1))
    texts = [f"<answer>{train[0]['answer']}</answer>", "<answer>no</answer>"]
    functions = judging.resolve_rewards(["examples.problems:score"])
    table = judging.reward_table(functions, train, texts)
    assert list(functions) == ["score"] and table[0] == [2.0] and table[1][0] < 2.0


@pytest.mark.parametrize("name", ("examples.problems:nothing", "no.such:thing", "json:__doc__"))
def test_what_cannot_be_imported(name):
    with pytest.raises(ValueError, match=r"rewards: expected (module:function|a function); got"):
        judging.resolve_rewards([name])
    with pytest.raises(ValueError, match=r"dataset: expected (module:function|a function); got"):
        load_problems(config_of(dataset=name))


@pytest.mark.parametrize(
    ("name", "sizes"), (("additions", (54, 27)), ("gsm_symbolic", (20, 5)), ("chain_sum", (20, 5)))
)
def test_made_problems_are_held_out(name, sizes):
    where = __name__ if name == "chain_sum" else "examples.problems"
    given = {} if name == "additions" else {"train_size": 20, "eval_size": 5}
    train, held_out = load_problems(config_of(dataset=f"{where}:{name}", **given))
    prompts = [{p["prompt"] for p in some} for some in (train, held_out)]
    assert len(held_out) == sizes[1] and sizes[0] / 2 < len(train) <= sizes[0]
    assert not prompts[0] & prompts[1]
    assert all(rewards.number_of(p["answer"]) is not None for p in (*train, *held_out))
    chat = load_problems(config_of(dataset=f"{where}:{name}", **given, chat=True))[0][0]
    if name == "gsm_symbolic":
        assert data.EXAMPLE.replace("{tag}", "think") in train[0]["prompt"]
        assert [m["role"] for m in chat["prompt"]] == ["user"]


@pytest.mark.parametrize("kind", ("jsonl", "parquet"))
def test_files(kind, tmp_path):
    """They may be sorted, and have rows of one prompt: these all count, and are in one part."""
    import datasets

    rows = [{"question": f"{i // 2}?", "answer": f"so\n#### {i}", "level": i // 2}
            for i in range(40)]  # fmt: skip
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    train, held_out = load_problems(config_of(dataset=str(path)))
    answers = [[int(p["answer"]) for p in part] for part in (train, held_out)]
    assert [len(part) for part in answers] == [32, 8]
    assert sorted(x for part in answers for x in part) == [*range(40)]
    assert sorted(answers[1]) != [*range(8)]
    assert all(p["level"] == int(p["answer"]) // 2 for p in (*train, *held_out))
    assert not {p["prompt"] for p in train} & {p["prompt"] for p in held_out}
    assert train[3]["prompt"].endswith(f"Question: {train[3]['level']}?\n")
    fewer = load_problems(config_of(dataset=str(path), eval_size=2))
    assert [len(part) for part in fewer] == [38, 2]
    whole, which = data.load_to_answer(config_of(dataset=str(path), eval_size=100))
    assert [int(p["answer"]) for p in whole] == [*range(40)] and which.startswith("All 40 problems")
    part, which = data.load_to_answer(config_of(dataset=str(path), eval_size=30))
    assert part == whole[:30] and which.startswith("The first 30 problems of ")


# What stands in the file, the answer in a file of lines, and in one of types.
ANSWERS = (
    ("12", "12", "12"), ("12.0", "12.0", "12"), ("1e-05", "0.00001", "0.00001"),
    ("1e+16", "10000000000000000", "10000000000000000"), ("0.10", "0.10", "0.1"),
    ("1e999", "1E+999", "Infinity"), ("-3", "-3", "-3"), ("true", "true", "true"), ('""', "", ""),
    ('"2020-01-31"',) + ("2020-01-31",) * 2, ('"007"', "007", "007"), ('"so #### 7"', "7", "7"),
    ('["a", 1.5]',) + ('["a", 1.5]',) * 2, ('"\\u0663"', "\u0663", "\u0663"),
)  # fmt: skip


@pytest.mark.parametrize(("written", "of_line", "of_type"), ANSWERS)
def test_an_answer_is_what_stands_in_the_file(written, of_line, of_type, tmp_path):
    path = tmp_path / "a.jsonl"
    text = f'{{"question": {written}, "answer": {written}, "level": 0.5, "day": "2020-01-31"}}\n'
    path.write_text("\ufeff" + text * 2 + '\n{"question": "x", "answer": 0.5}', encoding="utf-8")
    config = config_of(dataset=str(path), eval_size=0)
    found = [p for p in load_problems(config)[0] if "level" in p]
    assert [p["answer"] for p in found] == [of_line] * 2
    assert [(p["level"], p["day"]) for p in found] == [(0.5, "2020-01-31")] * 2
    if "####" not in written:
        assert found[0]["prompt"].endswith(f"Question: {of_line}\n")
    assert data.problem_of({"answer": json.loads(written)}, config) == {"answer": of_type}


def test_types_that_are_no_text(tmp_path):
    import datasets

    path = str(tmp_path / "a.parquet")
    config = config_of(dataset=path, eval_size=0)
    for value, text in ((Decimal("1.50"), "1.50"), (date(2020, 1, 31), "2020-01-31")):
        datasets.Dataset.from_list([{"prompt": "a", "answer": value}]).to_parquet(path)
        assert load_problems(config)[0] == [{"prompt": "a", "answer": text}]
    rows = [{"prompt": "a", "answer": datetime(2020, 1, 31)}]
    datasets.Dataset.from_list(rows).to_parquet(path)
    with pytest.raises(ValueError, match=r"text or a number; got datetime.* in row 1 of .*parquet"):
        load_problems(config)
    datasets.Dataset.from_list([{"prompt": "a", "answer": math.nan}]).to_parquet(path)
    with pytest.raises(ValueError, match=r"an answer, .* got \['prompt'\] in row 1 of .*parquet"):
        load_problems(config)


def test_answers_where_nothing_needs_one(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "answer": null}\n{"prompt": "b"}')
    own = {"dataset": str(path), "rewards": ["m:f", "format"]}
    train = load_problems(config_of(**own, eval_size=0))[0]
    assert sorted(train, key=str) == [{"prompt": "a"}, {"prompt": "b"}]
    with pytest.raises(ValueError, match=r"an answer, for an eval_size > 0; got .* in line 1 of"):
        load_problems(config_of(**own))
    with pytest.raises(ValueError, match=r"an answer, for an eval_size > 0; got .* in line 1 of"):
        data.load_to_answer(config_of(**own))
    path.write_text('{"prompt": "a", "rewards": "f"}\n{"prompt": "b", "rewards": ["answer"]}')
    with pytest.raises(ValueError, match=r"an answer, for the reward answer; got .* in line 2 of"):
        load_problems(config_of(dataset=str(path), rewards=["answer", "m:f"], eval_size=0))


@pytest.mark.parametrize(
    ("splits", "train", "held_out", "answered"),
    (
        ("train test validation", "train 0 to 29", "test 0 to 19", "split test"),
        ("train validation", "train 0 to 29", "validation 0 to 19", "split validation"),
        ("train", "24 of train", "6 of train", "split train"),
        ("test", None, None, "split test"),
        ("validation", None, None, "split validation"),
    ),
)
def test_splits_go_by_their_names(splits, train, held_out, answered, tmp_path):
    for split in splits.split():
        rows = [
            {"question": f"{split} {i}", "answer": i} for i in range(30 if split == "train" else 20)
        ]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = config_of(dataset=str(tmp_path), eval_size=25)
    if train is None:
        with pytest.raises(
            ValueError, match=rf"^dataset: expected a split train .* got \['{splits}"
        ):
            load_problems(config)
    else:
        for part, expected in zip(load_problems(config), (train, held_out), strict=True):
            asked = [p["prompt"].rpartition("Question: ")[2].split() for p in part]
            assert [int(p["answer"]) for p in part] == [int(number) for _, number in asked]
            numbers = f"{asked[0][0]} {asked[0][1]} to {asked[-1][1]}"
            assert expected in (numbers, f"{len(asked)} of {asked[0][0]}")
    problems, which = data.load_to_answer(config)
    assert f" {answered} " in which and len(problems) == (25 if splits == "train" else 20)
    (split,) = {p["prompt"].rpartition("Question: ")[2].split()[0] for p in problems}
    assert split == answered.split()[1]


@pytest.mark.parametrize(
    ("text", "message"),
    (
        ('{"question": "a", "answer": "b"}\n\n{', "expected JSON in line 3 of .*a.jsonl"),
        ('[{"question": "a", "answer": "b"}]', "expected an object in line 1 of .*a.jsonl"),
        (b'{"question": "\xff", "answer": "b"}', "expected JSON in line 1 of .*a.jsonl"),
        ('{"question": null, "answer": "b"}', r"a question .* got \['answer'\] in line 1 of"),
        (
            '{"question": "a", "answer": null}',
            r"an answer, .* got \['prompt', 'question'\] in line",
        ),
        ('{"text": "a"}', r"expected problems with a question .* got \['text'\]"),
        ("", "expected at least one problem to train on; got none in .*a.jsonl"),
        (None, "expected a file; .*a.jsonl does not exist"),
    ),
)
def test_files_that_are_no_problems(text, message, tmp_path):
    if text is not None:
        (tmp_path / "a.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message):
        load_problems(config_of(dataset=str(tmp_path / "a.jsonl"), eval_size=0))


def test_prompts_have_tokens_and_not_too_many():
    def kept(*prompts):
        problems = [{"prompt": prompt} for prompt in prompts]
        some = data.short_enough(problems, lambda problem: [*problem["prompt"]], 3, said.append)
        return [problem["prompt"] for problem in some]

    said = []
    assert kept("abc", "", "abcd", "a", "abcde") == ["abc", "a"]
    assert said == [
        "2 of 5 problems are left out: their prompts have more than max_prompt_length = 3 tokens",
        "1 of 5 problems are left out: their prompts have no token",
    ]
    said = []
    assert kept("abc", "a") == ["abc", "a"] and kept() == [] and said == []
    for none in (("", "abcd"), ("", "")):
        with pytest.raises(ValueError, match=r"expected room for .* prompt with a token; got 3"):
            kept(*none)


def test_every_problem_once_an_epoch():
    order = [place_of(turn, 7, seed=3) for turn in range(21)]
    assert [sorted(order[i : i + 7]) for i in (0, 7, 14)] == [list(range(7))] * 3
    assert order[:7] != order[7:14]


# Prompts


def prompt(question="1 + 1?", **options):
    return data.prompt_of(question, config_of(**options))


def test_prompts_are_made_as_the_options_say():
    example = data.EXAMPLE.replace("{tag}", "think")
    assert prompt().endswith(f"{example}\n\nQuestion: 1 + 1?\n") and "<think>" in prompt()
    assert "<reasoning>4 * 6" in prompt(think_tag="reasoning") and "<think>" not in prompt(
        think_tag="reasoning"
    )
    assert prompt(prompt_template="Q: {question} A:") == "Q: 1 + 1? A:"
    assert prompt(system_prompt="Be brief.", prompt_template="{question}") == "Be brief.\n1 + 1?"
    chat = prompt(chat=True, system_prompt="Be brief.", prompt_template="{question}")
    assert chat == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}
    ]  # fmt: skip
    assert [x["role"] for x in prompt(chat=True)] == ["user"]
    for options, message in (
        ({"prompt_template": "no place"}, "prompt_template: expected a text with {question} in it"),
        ({"think_tag": "<think>"}, "think_tag: expected the name of a tag"),
    ):
        with pytest.raises(ValueError, match=message):
            config_of(**options)


def test_one_switch_is_from_scratch():
    config = config_of(from_scratch=True)
    assert config.think_tag == "reasoning" and config.last_answer
    assert config.rewards == ["correctness", "format"]
    lines = data.prompt_of("1 + 1?", config).split("\n")
    assert lines[0] == "Respond in the following format:" and lines[-2:] == ["</answer>", "1 + 1?"]
    own = config_of(from_scratch=True, rewards=["answer"], think_tag="plan")
    assert own.rewards == ["answer"] and own.think_tag == "plan" and own.last_answer


# GSM8K, as its authors wrote it


@pytest.mark.parametrize(
    ("written", "number"),
    # Of the 8,792 of its two files, all of the first four kinds (8,694, 87, 6, 5 at 3101c7d).
    (("72", 72), ("1,234", 1234), ("2,125,000", 2125000), ("-3", -3), ("0.5", 0.5), ("$18", 18),
     ("70000.0", 70000), ("50%", 50), ("5.00", 5)),
)  # fmt: skip
def test_answers_of_gsm8k(written, number, tmp_path):
    path = tmp_path / "gsm8k.jsonl"
    solution = f"She has 3 + 4 = <<3+4=7>>7.\nSo it is #1.\n#### {written}"
    rows = [{"question": f"How many? {i}", "answer": solution} for i in range(10)]
    path.write_text("\n".join(map(json.dumps, rows)))
    train, held_out = load_problems(config_of(dataset=str(path), train_size=0, eval_size=2))
    assert len(train) == 8 and len(held_out) == 2
    for problem in (*train, *held_out):
        assert problem["answer"] == written and rewards.number_of(written) == Fraction(str(number))
        given = f"<answer>{number}</answer>"
        assert rewards.is_marked_correct(given, problem["answer"])
        assert not rewards.is_marked_correct("<answer>8</answer>", problem["answer"])


def test_held_out_problems_of_a_file_of_their_own(tmp_path):
    for name, count in (("train", 30), ("test", 7)):
        rows = ({"question": f"{name} {i}", "answer": str(i)} for i in range(count))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = {"dataset": str(tmp_path / "train.jsonl"), "eval_dataset": str(tmp_path / "test.jsonl")}
    train, held_out = load_problems(config_of(**files, train_size=0, eval_size=5))
    assert len(held_out) == 5 and all("test" in p["question"] for p in held_out)
    assert len(train) == 30 and all("train" in p["question"] for p in train)
    (tmp_path / "test.jsonl").write_text('{"question": "without"}')
    with pytest.raises(ValueError, match=r"expected problems with .* and an answer"):
        load_problems(config_of(**files))

"""Problems: where they come from, what is held out, and in which order they come."""

import json
from itertools import islice

import pytest

from examples import problems
from grpo_kernels.training import TrainingConfig, data, load_problems, rewards

pytestmark = pytest.mark.usefixtures("real_memory")


def config_of(**options):
    return TrainingConfig(model="m", **options)


def chain_sum(config):
    return problems.of_reasoning_gym("chain_sum", config)


def test_the_tasks_own_judge():
    train, _ = load_problems(config_of(dataset=f"{__name__}:chain_sum", train_size=2, eval_size=1))
    texts = [f"<answer>{train[0]['answer']}</answer>", "<answer>no</answer>"]
    functions = rewards.resolve_rewards(["examples.problems:score"])
    table = rewards.reward_table(functions, train, texts)
    assert list(functions) == ["score"] and table[0] == [2.0] and table[1][0] < 2.0


@pytest.mark.parametrize("name", ("examples.problems:nothing", "no.such:thing", "json:__doc__"))
def test_what_cannot_be_imported(name):
    with pytest.raises(ValueError, match=r"rewards: expected (module:function|a function); got"):
        rewards.resolve_rewards([name])
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
        assert data.EXAMPLE in train[0]["prompt"]
        assert [m["role"] for m in chat["prompt"]] == ["user"]


@pytest.mark.parametrize("kind", ("jsonl", "parquet"))
def test_files(kind, tmp_path):
    """They may have rows twice, and be sorted: no problem is in both parts."""
    import datasets

    rows = [{"question": f"{i // 2}?", "answer": f"so\n#### {i // 2}", "level": i // 2}
            for i in range(40)]  # fmt: skip
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    train, held_out = load_problems(config_of(dataset=str(path)))
    answers = [[int(p["answer"]) for p in part] for part in (train, held_out)]
    assert [len(part) for part in answers] == [16, 4]
    assert sorted(x for part in answers for x in part) == [*range(20)]
    assert answers[1] != [0, 1, 2, 3]
    assert all(p["level"] == int(p["answer"]) for p in (*train, *held_out))
    assert train[3]["prompt"].endswith(f"Question: {train[3]['level']}?\n")
    fewer = load_problems(config_of(dataset=str(path), eval_size=2))
    assert [len(part) for part in fewer] == [18, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    (
        ('{"question": "a", "answer": "b"}\n{', "expected rows of json in .*a.jsonl"),
        ('{"text": "a"}', r"expected problems with a question .* got \['text'\]"),
        ("", "expected rows of json in .*a.jsonl"),
        (None, "expected a file; .*a.jsonl does not exist"),
    ),
)
def test_files_that_are_no_problems(text, message, tmp_path):
    if text is not None:
        (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_problems(config_of(dataset=str(tmp_path / "a.jsonl"), eval_size=0))


def test_every_problem_once_an_epoch():
    order = list(islice(data.shuffled_epochs(7, seed=3), 21))
    assert [sorted(order[i : i + 7]) for i in (0, 7, 14)] == [list(range(7))] * 3
    assert order[:7] != order[7:14] and order == list(islice(data.shuffled_epochs(7, seed=3), 21))

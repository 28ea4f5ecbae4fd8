"""Explanations in files, exports of other trainers, and the command that makes pages of both."""

import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch

from grpo_kernels.explain import __main__ as command
from grpo_kernels.explain.exports import read
from grpo_kernels.explain.records import write_jsonl
from tests.helpers.explanations import HOSTILE, explanation, strict_json


def values_of(e):
    """All but the causes and the loss, as a text in which NaN equals itself."""
    columns = [(name, x.dtype, x.tolist()) for name, x in e.columns.items()]
    return repr((columns, e.sequence, e.position, e.sequences, e.groups, e.texts, e.token_ids))


@pytest.mark.parametrize(
    "changes", ({}, {"texts": None, "token_ids": None, "columns": {"logp": torch.zeros(10)},
                     "loss": None}), ids=("all", "little"),
)  # fmt: skip
def test_a_file_has_all_but_the_causes(tmp_path, changes):
    expected = explanation(**changes)
    write_jsonl(expected, tmp_path / "step.jsonl")
    actual = read(tmp_path / "step.jsonl")
    assert values_of(actual) == values_of(expected) and actual.causes == []
    assert actual.loss == pytest.approx(expected.loss)


def test_rows_are_strict_json_and_some_of_them_are_a_file(tmp_path):
    path = tmp_path / "step.jsonl"
    write_jsonl(explanation(), path)
    lines = path.read_bytes().splitlines(keepends=True)
    rows = [strict_json(x) for x in lines]
    assert [row["sequence"] for row in rows] == [0, 1, 2, 3] and path.read_bytes().isascii()
    largest = torch.finfo(torch.float32).max
    assert rows[0]["tokens"]["ratio"][:3] == [None, largest, -largest]
    assert rows[2]["loss_share"] is None and rows[3]["loss_share"] == largest
    assert rows[1]["prompt"] == HOSTILE and rows[2]["tokens"]["text"] == []
    path.write_bytes(b"".join(lines[1::2]))
    assert read(path).sequence.tolist() == [0, 0, 0, 1, 1]
    assert [group["sequences"] for group in read(path).groups] == [[0], [1]]


def prime_rl(first_id=7, mask=(False, True, False, True), **changes):
    """A row with a prompt of one token, and a tool's token among the trained."""
    columns = {
        "token_ids": [first_id, 8, 9, 10], "loss_mask": list(mask), "trainer_logprobs": [-1.0] * 4,
        "position_ids": [0, 1, 2, 3], "advantages": [0.5] * 4, "rewards": [1.0] * 4,
        "entropy": [0.1, 0.2, 0.3, 0.4], "importance_ratio": [1.0, 1.1, None, 1.3],
        "log_importance_ratio": [0.0, 0.1, 0.2, 0.3], "is_masked": [False, True, False, True],
        "is_masked_low": [False, True, False, False], "is_masked_high": [False, False, False, True],
    }  # fmt: skip
    return json.dumps({"schema_version": 1, "step": 3, "rank": 0, **columns} | changes) + "\n"


def test_prime_rl_exports_have_their_trained_tokens(tmp_path):
    folder = tmp_path / "step_3"
    folder.mkdir()
    (folder / "STABLE").touch()
    (folder / "rank_0.jsonl").write_text(prime_rl() + prime_rl(6, rewards=[None] * 4))
    (folder / "rank_1.jsonl").write_text(prime_rl() + prime_rl(mask=[False] * 4))
    one, all_ranks = read(folder / "rank_0.jsonl"), read(folder)
    assert [x["group"] for x in one.sequences] == [0, 1]
    assert [x["group"] for x in all_ranks.sequences] == [0, 1, 0, 2]  # the last is all prompt
    assert one.sequences[0] == {"group": 0, "length": 2, "reward": 1.0, "advantage": 0.5}
    assert "reward" not in one.sequences[1] and all_ranks.sequences[3]["length"] == 0
    assert one.position.tolist() == [0, 2] * 2 and one.token_ids.tolist() == [8, 10] * 2
    expected = {
        "ratio": [1.1, 1.3], "logp": [-1.0, -1.0], "entropy": [0.2, 0.4], "advantage": [0.5, 0.5],
        "dropped": [1.0, 1.0], "sampler_gap": [0.1, 0.3], "importance_weight": [0.0, 0.0],
        "clip": [-1.0, 1.0],
    }  # fmt: skip
    assert list(one.columns) == list(expected)
    for name, values in expected.items():
        torch.testing.assert_close(one.columns[name], torch.tensor(values * 2))


def test_prime_rl_columns_that_a_loss_lacks_have_no_numbers(tmp_path):
    path = tmp_path / "rank_0.jsonl"
    none = dict.fromkeys(("importance_ratio", "is_masked", "is_masked_low"), [None] * 4)
    path.write_text(prime_rl(**none, advantages=[0.1, 0.2, 0.3, 0.4]))
    columns = read(path).columns
    assert "advantage" not in read(path).sequences[0]  # as it is not the same for all tokens
    assert columns["ratio"].isnan().all() and columns["clip"].isnan().all()
    assert not columns["logp"].isnan().any()


def parquet(path, **columns):
    pytest.importorskip("pyarrow")
    from pyarrow import Table, parquet

    path.parent.mkdir(exist_ok=True)
    parquet.write_table(Table.from_pydict(columns), path)
    return path


def message(role, content):
    return {"role": role, "content": content}


def part(text):
    return {"type": "text" if text else "image", "text": text}


def test_trl_completions_are_words_with_their_advantage(tmp_path):
    path = parquet(
        tmp_path / "completions_00003.parquet", step=[3, 3],
        prompt=[[message("user", "1 + 1?")], [message("user", "2?")]],
        completion=[[message("assistant", "It is\n 2 ")], [message("assistant", "")]],
        accuracy_reward=[1.0, 0.0], advantage=[0.7, -0.7],
    )  # fmt: skip
    result = read(path)
    assert result.texts == [["It", " is", "\n 2", " "], []] and result.token_ids is None
    assert result.sequences[0] == {"group": 0, "prompt": "1 + 1?", "advantage": 0.7, "reward": 1.0}
    torch.testing.assert_close(result.columns, {"advantage": torch.full((4,), 0.7)})
    assert [group["reward"] for group in result.groups] == [1.0, 0.0]


def test_parts_of_messages_are_text_and_several_rewards_of_trl_stay_apart(tmp_path):
    prompt = [message("system", [part("Add.")])]
    prompt += [message("user", [part(None), part("2 + "), part("3?")])]
    path = parquet(
        tmp_path / "completions_00003.parquet", advantage=[0.1, -0.1], prompt=[prompt] * 2,
        completion=[[message("assistant", [part("It is 5.")])]] * 2,
        right=[1.0, math.nan], form=[0.5, 0.5],
    )  # fmt: skip
    assert read(path).texts == [["It", " is", " 5."]] * 2
    first, second = read(path).sequences
    assert first["prompt"] == "Add.\n2 + 3?" and "reward" not in first
    assert first["group"] == second["group"] == 0
    assert (first["right"], first["form"]) == (1.0, 0.5) and math.isnan(second["right"])


def test_the_command_prints_causes_and_writes_the_page(tmp_path, monkeypatch, capsys):
    path = tmp_path / "step.jsonl"
    write_jsonl(explanation(), path)
    monkeypatch.setattr(command, "rank", lambda x: explanation().causes)
    command.main([str(path), "--sort", "gradient"])
    *lines, last = capsys.readouterr().out.splitlines()
    # A terminal gets no control characters from a text.
    assert lines[0].startswith(" 50 %  ratio: </script><img") and r"\u2028\u202e" in "".join(lines)
    assert last == f"page: {tmp_path / 'step.html'}"
    assert '"sort":"gradient"' in (tmp_path / "step.html").read_text()


def test_the_page_of_a_folder_is_beside_it(tmp_path, monkeypatch):
    (folder := tmp_path / "step_3.v2").mkdir()
    (folder / "rank_0.jsonl").write_text(prime_rl())
    monkeypatch.chdir(folder)
    command.main(["."])
    assert "<h1>step_3.v2</h1>" in (tmp_path / "step_3.v2.html").read_text()


def test_the_command_decodes_ids(tmp_path, monkeypatch):
    path, page = tmp_path / "rank_0.jsonl", tmp_path / "page.html"
    path.write_text(prime_rl())
    decoder = SimpleNamespace(decode=lambda ids: "".join(f"({x})" for x in ids))
    tokenizers = SimpleNamespace(from_pretrained=lambda name: {"some/model": decoder}[name])
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoTokenizer=tokenizers))
    command.main([str(path), "--tokenizer", "some/model", "--output", str(page)])
    assert '"texts":[["(8)","(10)"]]' in page.read_text()

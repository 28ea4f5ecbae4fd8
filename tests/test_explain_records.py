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
    "changes",
    (
        {},
        {"texts": None},
        {"token_ids": None},
        {"columns": {"logp": torch.zeros(10)}, "loss": None},
    ),
    ids=("all", "no texts", "no ids", "no loss"),
)
def test_a_file_has_all_but_the_causes(tmp_path, changes):
    expected = explanation(**changes)
    write_jsonl(expected, tmp_path / "step.jsonl")
    actual = read(tmp_path / "step.jsonl")
    assert values_of(actual) == values_of(expected) and actual.causes == []
    assert actual.loss == pytest.approx(expected.loss)


def test_a_row_is_strict_json(tmp_path):
    path = tmp_path / "step.jsonl"
    write_jsonl(explanation(), path)
    rows = [strict_json(x) for x in path.read_bytes().split(b"\n")[:-1]]
    assert [row["sequence"] for row in rows] == [0, 1, 2, 3] and path.read_bytes().isascii()
    largest = torch.finfo(torch.float32).max
    assert rows[0]["tokens"]["ratio"][:3] == [None, largest, -largest]
    assert rows[2]["loss_share"] is None and rows[3]["loss_share"] == largest
    assert rows[1]["prompt"] == HOSTILE and rows[2]["tokens"]["text"] == []


def test_some_of_the_rows_are_a_file(tmp_path):
    path = tmp_path / "step.jsonl"
    write_jsonl(explanation(), path)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1::2]))
    part = read(path)
    assert part.sequence.tolist() == [0, 0, 0, 1, 1]
    assert [group["sequences"] for group in part.groups] == [[0], [1]]


ROW = {"group": 0, "loss_share": 0.5, "tokens": {"position": [0, 1], "text": ["a", "b"]}}


def changed(row=ROW, **changes):
    return json.dumps(row | changes)


def tokens(**changes):
    return changed(tokens=ROW["tokens"] | changes)


@pytest.mark.parametrize(
    ("line", "message"),
    (
        ('{"group": 0, "tok', "Unterminated string"),
        ("", "Expecting value"),
        ("\xff", "Expecting value"),
        ("[" * 100_000, "recursion"),
        ("[1]", r"expected an object; got \[1\]"),
        (changed(tokens=None), "expected tokens: an object; got None"),
        (changed(tokens={"loss": []}), r"expected tokens.position: a list; got \['loss'\]"),
        (tokens(position=[0, True]), "expected tokens.position: whole numbers; got True"),
        (tokens(position=[0, 2**63]), "expected tokens.position: whole numbers; got 922"),
        (tokens(position=[0.5, 1]), "expected tokens.position: whole numbers; got 0.5"),
        (tokens(text=["a"]), r"expected tokens.text: 2 texts; got \['a'\]"),
        (tokens(text=["a", None]), "expected tokens.text: texts; got None"),
        (tokens(loss=[0.5, "1"]), "expected tokens.loss: numbers or null; got '1'"),
        (tokens(loss=[0.5, 10**400]), "int too large"),
        (tokens(loss="ab"), "expected tokens.loss: 2 numbers or null; got 'ab'"),
        (changed({"tokens": ROW["tokens"]}), "expected group: a whole number or null; got 'none'"),
        (changed(group=True), "expected group: a whole number or null; got True"),
        (changed(reward="x" * 500), r"expected reward: numbers or null; got 'x{99}\.\.\."),
        (changed(loss_share=[1]), r"expected loss_share: numbers or null; got \[1\]"),
        (changed(truncated="yes"), "expected truncated: numbers or null; got 'yes'"),
        (tokens(gradient_share=[0.5, 0.5]), "expected gradient_share: a number, the sum of the"),
        (
            tokens(loss=[0, 1]),
            r"with the columns of the first row, \['position', 'text'\]; got \['pos",
        ),
        ('{"trainer_logprobs": 1}', "expected trainer_logprobs: a list; got 1"),
        ('{"trainer_logprobs": [1], "token_ids": [1, 2]}', "expected token_ids: 1 whole numbers"),
    ),
)
def test_a_broken_row_is_named(tmp_path, line, message):
    path = tmp_path / "step.jsonl"
    path.write_text(f"{json.dumps(ROW)}\n{line}\n{json.dumps(ROW)}\n")
    with pytest.raises(ValueError, match=f"step.jsonl, line 2: .*{message}"):
        read(path)


def test_a_file_without_rows_is_refused(tmp_path):
    for path in (tmp_path / "step.jsonl", tmp_path / "folder"):
        path.touch() if path.suffix else path.mkdir()
        with pytest.raises(ValueError, match=f"{path.name}: expected a row per sequence; got none"):
            read(path)


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
    # The last row's tokens are all its prompt.
    assert [x["group"] for x in all_ranks.sequences] == [0, 1, 0, 2]
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


def test_files_of_two_kinds_are_refused(tmp_path):
    (tmp_path / "rank_0.jsonl").write_text(prime_rl())
    write_jsonl(explanation(), tmp_path / "rank_1.jsonl")
    with pytest.raises(
        ValueError, match=r"rank_1\.jsonl, line 1: expected tokens with the columns"
    ):
        read(tmp_path)


def test_tokens_that_prime_rl_masks_are_a_cause(tmp_path):
    """Half of the tokens of each sequence are out of its trust region; a tenth is no news."""
    path = tmp_path / "rank_0.jsonl"
    for masked, causes in (([True, False], ["importance_weight"]), ([True] + [False] * 9, [])):
        columns = {
            "token_ids": [*range(21)],
            "loss_mask": [False] + [True] * 20,
            "is_masked": [False, *masked * (20 // len(masked))],
        }
        columns |= {"trainer_logprobs": [-1.0] * 21, "inference_logprobs": [-1.5] * 21,
                    "entropy": [1.0] * 21, "rewards": [1.0] * 21}  # fmt: skip
        rows = [{**columns, "advantages": [a] * 21} for a in (0.5, -0.5)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert [cause.name for cause in command.rank(read(path))] == causes
        assert not causes or "masks drop 50 % of the tokens" in command.rank(read(path))[0].text


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


def test_trl_completions_are_words_with_their_advantage(tmp_path):
    chat = [[{"role": "user", "content": "1 + 1?"}], [{"role": "user", "content": "2?"}]]
    answers = [[{"role": "assistant", "content": x}] for x in ("It is\n 2 ", "")]
    path = parquet(
        tmp_path / "completions_00003.parquet", step=[3, 3], prompt=chat, completion=answers,
        accuracy_reward=[1.0, 0.0], advantage=[0.7, -0.7],
    )  # fmt: skip
    result = read(path)
    assert result.texts == [["It", " is", "\n 2", " "], []] and result.token_ids is None
    assert result.sequences[0] == {"group": 0, "prompt": "1 + 1?", "advantage": 0.7, "reward": 1.0}
    torch.testing.assert_close(result.columns, {"advantage": torch.full((4,), 0.7)})
    assert [group["reward"] for group in result.groups] == [1.0, 0.0]


def test_content_of_messages_in_parts_is_its_text(tmp_path):
    def parts(*texts):
        return [{"type": "text" if x else "image", "text": x} for x in texts]

    path = parquet(
        tmp_path / "completions_00003.parquet", advantage=[0.7],
        prompt=[[{"role": "system", "content": parts("Add.")},
                 {"role": "user", "content": parts(None, "2 + ", "3?")}]],
        completion=[[{"role": "assistant", "content": parts("It is 5.")}]],
    )  # fmt: skip
    result = read(path)
    assert result.sequences[0]["prompt"] == "Add.\n2 + 3?"
    assert result.texts == [["It", " is", " 5."]]


@pytest.mark.parametrize(
    ("columns", "message"),
    (
        ({"completion": [None]}, "expected completion: a text or messages; got None"),
        ({"prompt": [[1]]}, r"expected prompt: a text or messages; got \[1\]"),
        ({"advantage": ["high"]}, "expected advantage: numbers or null; got 'high'"),
    ),
)
def test_a_row_of_trl_that_is_broken_is_named(tmp_path, columns, message):
    good = {"prompt": ["p"], "completion": ["c"], "advantage": [None]}
    path = parquet(tmp_path / "completions_1.parquet", **good | columns)
    with pytest.raises(ValueError, match=rf"completions_1\.parquet, row 1: {message}"):
        read(path)


def test_several_rewards_of_trl_stay_apart(tmp_path):
    path = parquet(
        tmp_path / "completions_00003.parquet", step=[3] * 2, prompt=["p"] * 2,
        completion=["a", "b"], right=[1.0, math.nan], form=[0.5, 0.5], advantage=[0.1, -0.1],
    )  # fmt: skip
    first, second = read(path).sequences
    assert first["group"] == second["group"] == 0 and "reward" not in first
    assert (first["right"], first["form"]) == (1.0, 0.5) and math.isnan(second["right"])


def test_a_parquet_file_of_something_else_is_named(tmp_path):
    path = parquet(tmp_path / "other.parquet", prompt=["p"], completion=["c"])
    with pytest.raises(ValueError, match=r"other\.parquet, row 1: expected a column advantage"):
        read(path)
    path.write_bytes(b"no parquet")
    with pytest.raises(ValueError, match=r"other\.parquet: .*[Pp]arquet"):
        read(path)


def test_without_pyarrow_a_parquet_file_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"a\.parquet: .*pip install pyarrow"):
        read(tmp_path / "a.parquet")


def test_the_command_prints_causes_and_writes_the_page(tmp_path, monkeypatch, capsys):
    path = tmp_path / "step.jsonl"
    write_jsonl(explanation(), path)
    monkeypatch.setattr(command, "rank", lambda x: explanation().causes)
    command.main([str(path), "--sort", "gradient"])
    *lines, last = capsys.readouterr().out.splitlines()
    # A terminal gets no control characters from a text.
    assert lines[0].startswith(" 50 %  ratio: </script><img") and r"\u2028\u202e" in "".join(lines)
    assert last == f"page: {tmp_path / 'step.html'}" and "-> `delta`" in lines[-1]
    page = (tmp_path / "step.html").read_text()
    assert "<h1>step.jsonl</h1>" in page and '"sort":"gradient"' in page


def test_the_page_of_a_step_of_a_run_is_the_trainers(tmp_path, capsys):
    path = tmp_path / "base/explanations/step-000012.jsonl"
    path.parent.mkdir(parents=True)
    path.with_name("step-000030.html").touch()
    write_jsonl(explanation(), path)
    command.main([str(path)])
    page = path.with_suffix(".html").read_text()
    assert "<h1>Step 12 of base</h1>" in page and '<a rel="next" href="step-000030.html">' in page


@pytest.mark.parametrize("name", (".", "../step_3.v2"))
def test_the_page_of_a_folder_is_beside_it(name, tmp_path, monkeypatch, capsys):
    (folder := tmp_path / "step_3.v2").mkdir()
    (folder / "rank_0.jsonl").write_text(prime_rl())
    monkeypatch.chdir(folder)
    command.main([name])
    assert "<h1>step_3.v2</h1>" in (tmp_path / "step_3.v2.html").read_text()
    assert "step_3.v2.html" in capsys.readouterr().out


def test_the_command_decodes_ids(tmp_path, monkeypatch):
    path, page = tmp_path / "rank_0.jsonl", tmp_path / "page.html"
    path.write_text(prime_rl())
    decoder = SimpleNamespace(decode=lambda ids: "".join(f"({x})" for x in ids))
    tokenizers = SimpleNamespace(from_pretrained=lambda name: {"some/model": decoder}[name])
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoTokenizer=tokenizers))
    command.main([str(path), "--tokenizer", "some/model", "--output", str(page)])
    assert '"texts":[["(8)","(10)"]]' in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (["missing.jsonl"], "No such file"),
        (["words.jsonl", "--output", "words.jsonl"], "--output: expected another file than PATH"),
        (["broken.jsonl"], "broken.jsonl, line 2: expected tokens: an object; got None"),
        (["words.jsonl", "--tokenizer", "x"], "--tokenizer: expected a file with token ids"),
        (["words.jsonl", "--output", "no/folder.html"], "No such file"),
    ),
)
def test_the_command_says_what_is_wrong(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.jsonl").write_text(json.dumps(ROW) + "\n{}\n")
    (tmp_path / "words.jsonl").write_text(json.dumps(ROW) + "\n")
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert message in capsys.readouterr().err

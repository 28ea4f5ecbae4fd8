"""Refusals of `explain/`: its calls, the files that it reads, and its command."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from grpo_kernels import GRPOLossConfig, grpo_loss
from grpo_kernels.explain import Thresholds, explain, join
from grpo_kernels.explain import __main__ as command
from grpo_kernels.explain.exports import read
from grpo_kernels.explain.page import step_page
from grpo_kernels.explain.runs import write
from grpo_kernels.explain.steps import ExplainedSteps
from tests.refusals import table

B, T = 4, 3
LOGPS, SIX = torch.full((B, T), -1.0), [["a"] * T] * B
CONFIG = GRPOLossConfig(beta=0.2)
OUT = grpo_loss(LOGPS, torch.ones(B), ref_logps=LOGPS, config=CONFIG)
GOOD = {
    "out": OUT, "targets": torch.zeros(B, T).long(), "advantages": torch.ones(B),
    "ref_logps": LOGPS, "config": CONFIG,
}  # fmt: skip


class Bytes:
    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode()


def explained(**changes: Any) -> Any:
    return explain(**GOOD | changes)


def joined(parts: int = 2, scales: list | None = None, **other: Any) -> None:
    explanations = [explained() for _ in range(parts - bool(other))]
    join([*explanations, *([explained(**other)] if other else [])], scales)


EXPLAIN = [
    *table(explained,
        ("out: expected a GRPOLossOutput; got int", {"out": 3}),
        ("out.logps: expected a tensor; got NoneType", {"out": OUT._replace(logps=None)}),
        ("rewards: expected numbers; got 'a'", {"rewards": ["a"] * B}),
        ("prompts: expected a list or tensor; got str", {"prompts": "abcd"}),
        ("groups: expected whole numbers; got others", {"groups": torch.ones(B)}),
        ("d_hidden: expected dtype ...; got int64", {"d_hidden": torch.ones(B, T, 2).long()}),
        ("texts[0]: expected a list of texts; got one text", {"texts": ["aaa"] * B}),
        ("tokenizer: expected an object with decode(ids); got str", {"tokenizer": "gpt2"}),
        ("out.loss: expected the sum of the tokens' losses, ...: pass", {"ref_logps": 3 * LOGPS}),
        ("beta=0.2 needs the log-probs of the reference", {"ref_logps": None}),
        ("entropy_coef=0.1 needs the entropy of", {"config": GRPOLossConfig(entropy_coef=0.1)}),
        ("advantages: expected finite", {"advantages": torch.tensor([1.0, 1.0, 1.0, torch.inf])}),
        ("targets: expected shape [4, 3]; got [4, 1]", {"targets": torch.ones(B, 1).long()}),
        ("groups: expected a divisor of the number of sequences, 4; got 3", {"groups": 3}),
        ("groups: expected one for each of 4 sequences; got shape [2]", {"groups": [1, 2]}),
        ("texts[0]: expected 3 texts, or 3 and more for all positions", {"texts": [["a"]] * B}),
        ("targets: expected token ids for a tokenizer", {"targets": None, "tokenizer": Bytes()}),
        ("tokenizer: expected None with texts; got one", {"texts": SIX, "tokenizer": Bytes()}),
    ),
    *table(joined,
        ("parts: expected one explanation at least; got none", {"parts": 0}),
        ("scales: expected 2, one for each part; got 1", {"scales": [1.0]}),
        ("parts[1]: expected the columns of parts[0], ", {"next_logps": LOGPS}),
    ),
    *table(Thresholds, ("thresholds.ratio: expected a number > 0; got -1", {"ratio": -1.0})),
    *table(partial(ExplainedSteps, "unused"),
        ("every: expected a number >= 0; got -1", {"every": -1}),
    ),
    *table(lambda path: explained().write(path),
        ("path: expected a name in .html or .jsonl; got '.png'", {"path": "a.png"})),
    *table(lambda sort: step_page(explained(), sort=sort),
        ("sort: expected one of call, gradient; got 'loss'", {"sort": "loss"})),
]  # fmt: skip

# Files

ROW = {"group": 0, "loss_share": 0.5, "tokens": {"position": [0, 1], "text": ["a", "b"]}}


def line_of(line: str, place: str = "step.jsonl, line 2: ") -> None:
    """Reads a file whose second line is this one; the error begins with its place."""
    Path("step.jsonl").write_text(f"{json.dumps(ROW)}\n{line}\n{json.dumps(ROW)}\n")
    try:
        read("step.jsonl")
    except ValueError as error:
        assert str(error).startswith(place)
        raise ValueError(str(error).removeprefix(place)) from error


def row_of(**changes: Any) -> None:
    line_of(json.dumps(ROW | changes))


def tokens_of(**changes: Any) -> None:
    row_of(tokens=ROW["tokens"] | changes)


def trl_row(**columns: Any) -> None:
    from pyarrow import Table, parquet

    good = {"prompt": ["p"], "completion": ["c"], "advantage": [None]}
    named = {k: x for k, x in (good | columns).items() if x is not None}
    parquet.write_table(Table.from_pydict(named), "a.parquet")
    read("a.parquet")


def file_of(name: str, text: str) -> None:
    Path(name).write_text(text)
    read(name)


def main(arguments: str) -> None:
    """The command, among files of each kind."""
    Path("run").mkdir()
    Path("run/config.json").write_text('{"steps": 1}')
    Path("list").mkdir()
    Path("list/config.json").write_text("[1, 2")
    Path("log.txt").write_text("{'kl': 0.1}")
    Path("words.jsonl").write_text(json.dumps(ROW) + "\n")
    command.main(arguments.split())


def log_of(name: str, text: str) -> None:
    Path(name).write_text(text)
    command.main([name])


FILES = [
    *table(line_of,
        ("...while decoding a JSON array", {"line": "[" * 100_000}),
        ("expected an object; got [1]", {"line": "[1]"}),
        ("expected trainer_logprobs: a list; got 1", {"line": '{"trainer_logprobs": 1}'}),
        ("expected group: a whole number or", {"line": json.dumps({"tokens": ROW["tokens"]})}),
    ),
    *table(row_of,
        ("expected tokens: an object; got None", {"tokens": None}),
        ("expected tokens.position: a list; got ['loss']", {"tokens": {"loss": []}}),
    ),
    *table(tokens_of,
        ("expected tokens.position: whole numbers; got True", {"position": [0, True]}),
        ("expected tokens.text: 2 texts; got ['a']", {"text": ["a"]}),
        ("expected gradient_share: a number, the sum of the", {"gradient_share": [0.5, 0.5]}),
        ("expected tokens with the columns of the first row, ['position'", {"loss": [0, 1]}),
    ),
    *table(trl_row,
        ("a.parquet, row 1: expected a column advantage", {"advantage": None}),
        ("a.parquet, row 1: expected completion: a text or messages; got", {"completion": [None]}),
    ),
    *table(file_of,
        ("a.parquet: ...arquet", {"name": "a.parquet", "text": "no parquet"}),
        ("a.jsonl: expected a row per sequence; got none", {"name": "a.jsonl", "text": ""}),
    ),
    *table(lambda folders: write(folders, "r.html"),
        ("folders: expected 1 to 6 runs; got 0", {"folders": ""}),
    ),
    *table(main,
        ("--output: expected none for a log; leave it", {"arguments": "log.txt --output a.html"}),
        ("PATH: expected one path, or several runs; got log.txt, a", {"arguments": "run log.txt"}),
        ("folder: expected a run's, with its config.json; got ...list", {"arguments": "list"}),
        ("--output: expected another file than", {"arguments": "words.jsonl --output words.jsonl"}),
        ("--tokenizer: expected a file with token", {"arguments": "words.jsonl --tokenizer x"}),
    ),
    *table(log_of,
        ("a.txt: expected trainer_state.json, ...; line 1: got ''", {"name": "a.txt", "text": ""}),
        ("...line 1: got JSON without a list log_history",
         {"name": "trainer_state.json", "text": '{"log_history": 3}'}),
        ("...line 1: got columns of a, b: export a single run",
         {"name": "a.csv", "text": "Step,a - train/kl,b - train/kl\n1,1,2\n"}),
        ("...line 3: field", {"name": "a.csv", "text": f"Step,kl\n1,2\n2,{'1' * 200_000}"}),
    ),
]  # fmt: skip
TABLE = EXPLAIN + FILES

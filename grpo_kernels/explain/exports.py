"""Explanations from files: JSONL of `records.py`, and exports of TRL and prime-rl."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from .explanation import SHARES, Explanation, group_sums
from .records import LARGEST, prompt_text

# prime-rl's names of our columns. Its ratio is the policy's to the sampler's.
_PRIME_RL = {
    "importance_ratio": "ratio", "trainer_logprobs": "logp", "entropy": "entropy",
    "advantages": "advantage", "is_masked": "dropped", "log_importance_ratio": "sampler_gap",
}  # fmt: skip
# Numbers of a sequence that causes, groups and pages compute with.
_NUMBERS = ("length", "advantage", "reward", "truncated")
# Facts of a sequence, and its tokens' columns by name.
Row = tuple[dict[str, Any], dict[str, list[Any]]]


def read(path: str | Path) -> Explanation:
    """Reads a file of `write_jsonl`, or an export of TRL or prime-rl, without ranking causes.

    - prime-rl, `token_exports/step_N/rank_R.jsonl` or a step's folder: trained tokens only.
      Sequences with the same tokens up to the first trained one are a group.
    - TRL, `completions/completions_N.parquet` of `log_completions`: words instead of tokens, with
      the advantage as their only number. Equal prompts are a group. A single column of floats is
      the reward; several stay apart, because the file has no weights for them.

    Raises:
        ValueError: naming file and line, what was expected and what came.
        ImportError: a parquet file needs pyarrow.
    """
    path, rows = Path(path), list[Row]()
    if path.suffix == ".parquet":
        try:
            from pyarrow import parquet

            table = parquet.read_table(path).to_pylist()
        except ImportError as error:
            raise ImportError(f"{path}: parquet files need pyarrow: pip install pyarrow") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        _parse(path, "row", table, _trl, rows)
    else:
        for file in sorted(path.glob("rank_*.jsonl")) if path.is_dir() else [path]:
            _parse(file, "line", file.read_bytes().splitlines(), _line, rows)
    return _explanation(path, rows)


def _parse(
    path: Path, place: str, items: Iterable[Any], parse: Callable[[Any], Row], rows: list[Row]
) -> None:
    """Adds a file's rows, which have the same columns; an error names the row."""
    for number, item in enumerate(items, 1):
        try:
            rows.append(parse(item))
            names, first = ([*tokens] for _, tokens in (rows[-1], rows[0]))
            _expect(names == first, f"tokens with the columns of the first row, {first}", names)
        except (ValueError, OverflowError, RecursionError) as error:
            raise ValueError(f"{path}, {place} {number}: {error}") from error


def _line(line: bytes) -> Row:
    row = json.loads(line)
    _expect(isinstance(row, dict), "an object", row)
    return _prime_rl(row) if "trainer_logprobs" in row else _own(row)


def _own(row: dict[str, Any]) -> Row:
    """Checks a row of `write_jsonl`. Drops sequence numbers: a file may have only some rows."""
    tokens, group = row.pop("tokens", None), row.get("group", "none")
    _expect(isinstance(tokens, dict), "tokens: an object", tokens)
    _expect(isinstance(tokens.get("position"), list), "tokens.position: a list", [*tokens])
    _expect(type(group) in (int, type(None)), "group: a whole number or null", group)
    sequence = {"group": group}
    for name, x in row.items():
        if name in SHARES or (x is not None and name in _NUMBERS):
            (number,) = _column(name, [x], 1, name)
            sequence[name] = x if type(x) in (int, bool) else number
        elif x is not None and name != "sequence":
            sequence[name] = x
    has_share = "gradient_share" in row or "gradient_share" not in tokens
    _expect(has_share, "gradient_share: a number, the sum of the tokens'", "none")
    count = len(tokens["position"])
    return sequence, {k: _column(k, x, count, f"tokens.{k}") for k, x in tokens.items()}


def _prime_rl(row: dict[str, Any]) -> Row:
    """Returns the trained tokens of a row of prime-rl."""
    logps = row["trainer_logprobs"]
    _expect(isinstance(logps, list), "trainer_logprobs: a list", logps)
    names = ("loss_mask", "rewards", "is_masked_low", "is_masked_high", *_PRIME_RL)
    columns = {x: _column(x, row.get(x, [None] * len(logps)), len(logps), x) for x in names}
    columns["token_ids"] = _column("token_id", row.get("token_ids"), len(logps), "token_ids")
    trained = [i for i, keep in enumerate(columns["loss_mask"]) if keep == 1]
    start = trained[0] if trained else len(logps)
    # Tokens before the first trained one are the prompt.
    sequence = {"group": str(columns["token_ids"][:start]), "length": len(trained)}
    columns = {name: [x[i] for i in trained] for name, x in columns.items()}
    for name in ("reward", "advantage"):
        values = set(columns[f"{name}s"]) - {math.nan}
        sequence |= {name: values.pop()} if len(values) == 1 else {}
    ends = zip(columns["is_masked_low"], columns["is_masked_high"], strict=True)
    tokens = {"position": [i - start for i in trained], "token_id": columns["token_ids"]}
    tokens |= {ours: columns[theirs] for theirs, ours in _PRIME_RL.items()}
    # prime-rl masks by the importance ratio and does not export the weight of other tokens.
    tokens["importance_weight"] = [0.0 if x == 1 else math.nan for x in tokens["dropped"]]
    return sequence, tokens | {"clip": [high - low for low, high in ends]}


def _trl(row: dict[str, Any]) -> Row:
    """Returns the words of a row of TRL."""
    for name in ("prompt", "completion", "advantage"):
        _expect(name in row, f"a column {name}", [*row])
    for name in ("prompt", "completion"):
        x = row[name]
        known = isinstance(x, list) and all(isinstance(message, dict) for message in x)
        _expect(known or isinstance(x, str), f"{name}: a text or messages", x)
    (advantage,) = _column("advantage", [row.pop("advantage")], 1, "advantage")
    prompt, completion = prompt_text(row["prompt"]), prompt_text(row["completion"])
    floats = {name: x for name, x in row.items() if isinstance(x, float)}
    rewards = {"reward": next(iter(floats.values()))} if len(floats) == 1 else floats
    words = re.findall(r"\s*\S+|\s+", completion)
    tokens = {"position": [*range(len(words))], "text": words}
    sequence = {"group": prompt, "prompt": prompt, "advantage": advantage, **rewards}
    return sequence, tokens | {"advantage": [advantage] * len(words)}


def _explanation(path: Path, rows: Sequence[Row]) -> Explanation:
    if not rows:
        raise ValueError(f"{path}: expected a row per sequence; got none")
    prompts: dict[str, int] = {}
    sequences, tokens = ([*part] for part in zip(*rows, strict=True))
    for row in sequences:
        if isinstance(row["group"], str):  # of an export: the prompt
            row["group"] = prompts.setdefault(row["group"], len(prompts))
    lengths = [len(row["position"]) for row in tokens]
    columns = {name: [x for row in tokens for x in row[name]] for name in tokens[0]}
    with torch.device("cpu"):
        position, ids, sequence = (
            torch.tensor(x, dtype=torch.int64)
            for x in (columns.pop("position"), columns.pop("token_id", []), lengths)
        )
        texts = [row["text"] for row in tokens] if columns.pop("text", None) is not None else None
        numbers = {name: torch.tensor(x, dtype=torch.float32) for name, x in columns.items()}
    return Explanation(
        numbers, torch.repeat_interleave(sequence), position, sequences, group_sums(sequences), [],
        texts, ids if "token_id" in tokens[0] else None,
        numbers["loss"].nansum().item() if "loss" in numbers else None,
    )  # fmt: skip


def _column(name: str, values: Any, count: int, label: str) -> list[Any]:
    """Checks a list of a row, and returns it with NaN and infinity."""
    integers, text = name in ("position", "token_id"), name == "text"
    types = (int,) if integers else (str,) if text else (int, float, bool, type(None))
    kind = "whole numbers" if integers else "texts" if text else "numbers or null"
    _expect(isinstance(values, list) and len(values) == count, f"{label}: {count} {kind}", values)
    wrong = [x for x in values if type(x) not in types or (integers and x.bit_length() > 63)]
    _expect(not wrong, f"{label}: {kind}", *wrong[:1] or [None])
    if integers or text:
        return list(values)
    floats = [math.nan if x is None else float(x) for x in values]
    return [math.copysign(math.inf, x) if abs(x) >= LARGEST else x for x in floats]


def _expect(condition: bool, expected: str, got: object) -> None:
    if not condition:
        text = repr(got)
        raise ValueError(f"expected {expected}; got {text[:100]}{'...' * (len(text) > 100)}")

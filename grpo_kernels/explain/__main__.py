"""Explains runs, logs and steps of GRPO: writes pages, and says which numbers are normal.

python -m grpo_kernels.explain runs/a runs/b  # pages of runs of this library
python -m grpo_kernels.explain output         # logs: a folder of TRL; verl, wandb, printed lines
python -m grpo_kernels.explain step.jsonl     # a step's tokens: causes, and a page
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..base.text import printable
from . import exports, logs, page, rules
from .causes import rank
from .explanation import Explanation
from .records import read_rows
from .tokens import decoded


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m grpo_kernels.explain", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("paths", type=Path, nargs="+", metavar="PATH", help="folders of runs; or a log; or a "
        "step: JSONL of an explanation, parquet of TRL's log_completions, prime-rl's token export "
        "(a file, or the folder of a step)")  # fmt: skip
    add("--output", type=Path, help="the page of runs or of a step; default: report.html in the "
        "run's folder, runs.html beside several, PATH with .html for a step")  # fmt: skip
    add("--sort", choices=("call", "gradient"),
        help="initial order of a step's sequences: as in the file (default), or by share of the "
        "gradient")  # fmt: skip
    add("--tokenizer", help="name or folder, to decode a step that has ids only")
    options = parser.parse_args(argv)
    try:
        text = "\n".join(_lines(options.paths, options))
    except (OSError, ValueError, ImportError) as error:
        parser.error(str(error))
    print(printable(text))


def _lines(paths: list[Path], options: argparse.Namespace) -> Iterator[str]:
    """Writes the pages of the paths; yields the lines to print."""
    # `.` and `..` have no name for a page.
    paths = [_log_in(path if path.name.strip(".") else path.resolve()) for path in paths]
    kinds = {path: _kind(path) for path in paths}
    for path, kind in kinds.items():
        if len(paths) > 1 and kind != "run":
            raise ValueError(f"PATH: expected one path, or several runs; got {path}, a {kind}")
    for name in {"run": ("sort", "tokenizer"), "log": vars(options), "step": ()}[kind]:
        if name != "paths" and getattr(options, name) is not None:
            raise ValueError(f"--{name}: expected none for a {kind}; leave it out")
    if kind == "run":
        return _run_lines(paths, options.output)
    return _log_lines(paths[0]) if kind == "log" else _step_lines(paths[0], options)


def _log_in(path: Path) -> Path:
    """The log in a folder of TRL, or in its last checkpoint; the path itself if there is none."""
    states = [*path.glob("trainer_state.json"), *path.glob("checkpoint-*/trainer_state.json")]
    return max(
        states, key=lambda x: (x.parent == path, len(x.parent.name), x.parent.name), default=path
    )


def _kind(path: Path) -> str:
    if path.is_dir():
        return "step" if [*path.glob("rank_*.jsonl")] else "run"
    if path.suffix == ".parquet":
        return "step"
    with path.open(errors="replace") as file:
        try:
            row = json.loads(file.readline())
        except (ValueError, RecursionError):
            return "log"
    row = row if isinstance(row, dict) else {}
    is_step = "trainer_logprobs" in row or isinstance(row.get("tokens"), dict)
    return "step" if is_step else "log"  # whose rows may have a number of tokens


def _run_lines(folders: list[Path], output: Path | None) -> Iterator[str]:
    from . import runs

    if output is None:
        parent = os.path.commonpath([x.resolve().parent for x in folders])
        output = folders[0] / "report.html" if len(folders) == 1 else Path(parent) / "runs.html"
    yield runs.write(folders, output)
    yield f"page: {output}"
    for folder in folders:
        if read_rows(path := folder / "metrics.jsonl"):
            yield from _log_lines(path)


def _log_lines(path: Path) -> Iterator[str]:
    rows, known, names = logs.read(path)
    # An evaluation is of weights after a step, or before all of them.
    bounds = {"step", "held_out_low", "held_out_high"}
    steps = sum(bool(row.keys() - bounds - {"held_out_accuracy"}) for row in rows)
    shown = ", ".join(names[x] for x in logs.NAMES if x in names.keys() - bounds)
    yield f"{steps} step{'s' * (steps != 1)} of {path}: {shown}"
    if "reward" not in names:
        yield "The log has no reward: most rules are for logs of GRPO, which have one."
    yield from (findings := _findings(rows, known, names))
    yield f"Nothing {'else ' if findings else ''}stands out."


def _findings(*log: Any) -> list[str]:
    findings = rules.verdicts(*log)
    return [f"{rules.VERDICTS[x.rule.verdict]}: {x} [{x.rule.source}]" for x in findings]


def _step_lines(path: Path, options: argparse.Namespace) -> Iterator[str]:
    # The page is beside a file, or beside the folder of a step.
    default = path.with_name(f"{path.name}.html") if path.is_dir() else path.with_suffix(".html")
    output = options.output or default
    if output == path:
        raise ValueError(f"--output: expected another file than PATH; got {output}")
    explanation = exports.read(path)
    if options.tokenizer:
        explanation = _with_texts(explanation, options.tokenizer)
    explanation = replace(explanation, causes=rank(explanation))
    text = page.step_page(explanation, path.name, options.sort or "call", output)
    output.write_text(text, encoding="ascii")
    yield str(explanation)
    yield from _findings([logs.row_of(explanation)])
    yield f"page: {output}"


def _with_texts(explanation: Explanation, name: str) -> Explanation:
    """Decodes the tokens' ids by a tokenizer of transformers."""
    if explanation.token_ids is None:
        raise ValueError("--tokenizer: expected a file with token ids; got one without")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name)
    counts = explanation.sequence.bincount(minlength=len(explanation.sequences)).tolist()
    ids = [x.tolist() for x in explanation.token_ids.split(counts)]
    return replace(explanation, texts=decoded(tokenizer, ids))


if __name__ == "__main__":
    main()

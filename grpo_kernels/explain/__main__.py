"""Shows which tokens a step's loss comes from, and writes a page.

python -m grpo_kernels.explain STEP.jsonl
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from ..base.text import printable
from . import exports, page
from .causes import rank
from .explanation import Explanation
from .tokens import decoded


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m grpo_kernels.explain", description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    add("file", type=Path, help="JSONL of an explanation, parquet of TRL's log_completions, or "
        "prime-rl's token export (a file, or the folder of a step)")  # fmt: skip
    add("--output", type=Path, help="name of the page; default: FILE with .html")
    add("--sort", choices=("call", "gradient"), default="call",
        help="initial order of sequences: as in FILE, or by share of the gradient")  # fmt: skip
    add("--tokenizer", help="name or folder, to decode a FILE that has ids only")
    options = parser.parse_args(argv)
    # `.` and `..` have no name for the page.
    file = options.file if options.file.name.strip(".") else options.file.resolve()
    try:
        output = options.output or _page_of(file)
        if output == file:
            raise ValueError(f"--output: expected another file than FILE; got {output}")
        explanation = exports.read(file)
        if options.tokenizer:
            explanation = _with_texts(explanation, options.tokenizer)
        explanation = replace(explanation, causes=rank(explanation))
        text = page.step_page(explanation, title=file.name, sort=options.sort)
        output.write_text(text, encoding="ascii")
    except (OSError, ValueError, ImportError) as error:
        parser.error(str(error))
    print(printable(str(explanation)))
    print(f"page: {output}")


def _page_of(file: Path) -> Path:
    """Returns the page beside a file, or beside the folder of a step."""
    return file.with_name(f"{file.name}.html") if file.is_dir() else file.with_suffix(".html")


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

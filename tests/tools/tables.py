"""Puts tables into docs/testing.md, each between two comments that name it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"


def write_table(name: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    lines = [head, ["---"] * len(head), *rows]
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    text, count = re.subn(
        rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)",
        lambda found: f"{found[1]}{table}\n{found[2]}", PAGE.read_text(), flags=re.S,
    )  # fmt: skip
    if count != 1:
        raise ValueError(f"{PAGE.name}: expected one place for the table {name}; found {count}")
    PAGE.write_text(text)

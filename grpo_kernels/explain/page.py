"""An explanation as one HTML file that needs no network."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .records import dump

if TYPE_CHECKING:
    from .explanation import Explanation


def html(explanation: Explanation, title: str = "Why this loss", sort: str = "call") -> str:
    """Returns the page, in ASCII; it runs only its own script and loads nothing.

    Args:
        explanation: the result of `explain`.
        title: title of the page.
        sort: initial order of the sequences, "call" or "gradient"; the page has a switch.
    """
    if sort not in ("call", "gradient"):
        raise ValueError(f"sort: expected 'call' or 'gradient'; got {sort!r}")
    e = explanation
    data = {
        "title": title, "sort": sort, "loss": e.loss, "sequences": e.sequences, "groups": e.groups,
        "causes": [asdict(cause) for cause in e.causes], "nothing": "" if e.causes else str(e),
        "texts": e.texts,
        "token_ids": None if e.token_ids is None else e.token_ids.tolist(),
        "sequence": e.sequence.tolist(), "position": e.position.tolist(),
        "columns": {name: _packed(column) for name, column in e.columns.items()},
    }  # fmt: skip
    template = Path(__file__).with_name("page.html").read_text(encoding="ascii")
    for part in ("style", "script"):
        code = re.search(f"<{part}>(.*?)</{part}>", template, re.DOTALL)[1]  # type: ignore[index]
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        template = template.replace(f"{part.upper()}_HASH", f"'sha256-{digest}'")
    # "<" could end the script's element, or open a comment in it.
    return template.replace("DATA", dump(data).replace("<", "\\u003c"))


def _packed(column: Tensor) -> str:
    """Returns the upper three bytes of each float32: four digits, in four characters of base64."""
    # A GPU's NaN has all bits set, which rounding would carry into the sign.
    plain = column.float().masked_fill(column.isnan(), torch.nan)
    three = (plain.view(torch.int32) + 0x80).view(torch.uint8).view(-1, 4)[:, 1:]
    return base64.b64encode(bytes(three.flatten().tolist())).decode()

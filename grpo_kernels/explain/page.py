"""Pages in one HTML file that need no network: a head that all share, and a part of their own."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..base.text import printable
from .records import dump

if TYPE_CHECKING:
    from .explanation import Explanation


def render(name: str, title: str, data: Mapping[str, Any], **texts: str) -> str:
    """Returns a page in ASCII, which runs only its own script and loads nothing.

    Args:
        name: the part of its own, `step.html`, say: a style, what stands in the header and below
            it, and a script.
        title: of the page and its tab.
        data: what the script finds as `D`.
        texts: texts for places of the part, `VERDICT="..."` for `@VERDICT@`.
    """
    escaped = {
        key: html.escape(printable(text)).encode("ascii", "xmlcharrefreplace").decode()
        for key, text in {"TITLE": title, **texts}.items()
    }
    # "<" could end the script's element, or open a comment in it.
    places = {**escaped, "DATA": dump(data).replace("<", "\\u003c")}
    return re.sub(f"@({'|'.join(places)})@", lambda place: places[place[1]], _template(name))


@cache
def _template(name: str) -> str:
    """The page without its data, with the digests of its style and script."""
    folder = Path(__file__).parent
    text, own = ((folder / x).read_text(encoding="ascii") for x in ("page.html", name))
    parts = r"<style>\n(.*)</style>\n<header>(.*?)</header>\n(.*)<script>\n(.*)</script>\n"
    style, head, body, script = re.fullmatch(parts, own, re.DOTALL).groups()  # type: ignore[union-attr]
    for place, part in (
        ("HEAD", head),
        ("BODY", body),
        ("OWN_STYLE", style),
        ("OWN_SCRIPT", script),
    ):
        text = text.replace(f"@{place}@", part)
    for part in ("style", "script"):
        code = re.search(f"<{part}>(.*?)</{part}>", text, re.DOTALL)[1]  # type: ignore[index]
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        text = text.replace(f"@{part.upper()}@", f"'sha256-{digest}'")
    return text


def step_page(explanation: Explanation, title: str = "Why this loss", sort: str = "call") -> str:
    """Returns the page of a step.

    Args:
        explanation: the result of `explain`.
        title: title of the page.
        sort: initial order of the sequences, "call" or "gradient"; the page has a switch.
    """
    if sort not in ("call", "gradient"):
        raise ValueError(f"sort: expected 'call' or 'gradient'; got {sort!r}")
    e = explanation
    data = {
        "sort": sort, "loss": e.loss, "sequences": e.sequences, "groups": e.groups,
        "causes": [asdict(cause) for cause in e.causes], "nothing": "" if e.causes else str(e),
        "texts": e.texts,
        "token_ids": None if e.token_ids is None else e.token_ids.tolist(),
        "sequence": e.sequence.tolist(), "position": e.position.tolist(),
        "columns": {name: _packed(column) for name, column in e.columns.items()},
    }  # fmt: skip
    return render("step.html", title, data)


def _packed(column: Tensor) -> str:
    """Returns the upper three bytes of each float32: four digits, in four characters of base64."""
    # A GPU's NaN has all bits set, which rounding would carry into the sign.
    plain = column.float().masked_fill(column.isnan(), torch.nan)
    three = (plain.view(torch.int32) + 0x80).view(torch.uint8).view(-1, 4)[:, 1:]
    return base64.b64encode(bytes(three.flatten().tolist())).decode()

"""Pages in one HTML file that need no network: a shared frame, and a part for each kind of page."""

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

from ..base.checks import check_choice
from ..base.text import printable
from .records import dump

if TYPE_CHECKING:
    from .explanation import Explanation

_STEP = re.compile(r"step-(\d+)\.html")


def render(name: str, title: str, data: Mapping[str, Any], **texts: str) -> str:
    """Returns a page in ASCII, which runs only its script and loads nothing.

    `name`: the kind's part, such as `step.html`, with style, header, body and script. `data`: the
    script's variable `D`. `texts` replace places of the part: `VERDICT="..."` for `@VERDICT@`.
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
    text, source = ((folder / x).read_text(encoding="ascii") for x in ("page.html", name))
    source = re.sub(r"@(\w+\.js)@\n", lambda place: (folder / place[1]).read_text("ascii"), source)
    parts = r"<style>\n(.*)</style>\n<header>(.*?)</header>\n(.*)<script>\n(.*)</script>\n"
    groups = re.fullmatch(parts, source, re.DOTALL).groups()  # type: ignore[union-attr]
    for place, part in zip(("OWN_STYLE", "HEAD", "BODY", "OWN_SCRIPT"), groups, strict=True):
        text = text.replace(f"@{place}@", part)
    for part in ("style", "script"):
        code = re.search(f"<{part}>(.*?)</{part}>", text, re.DOTALL)[1]  # type: ignore[index]
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        text = text.replace(f"@{part.upper()}@", f"'sha256-{digest}'")
    return text


def step_page(
    explanation: Explanation, title: str = "Why this loss", sort: str = "call",
    path: Path | None = None, why: str = "",
) -> str:  # fmt: skip
    """Returns the page of a step.

    Args:
        explanation: the result of `explain`.
        title: title of the page.
        sort: initial order of the sequences, "call" or "gradient"; the page has a switch.
        path: where the page will be. For `RUN/explanations/step-000012.html` the title is "Step 12
            of RUN", and links lead to the run's page and to the explained steps before and after.
        why: the reason to explain the step.
    """
    check_choice("sort", sort, ("call", "gradient"))
    title, links = _place(title, Path() if path is None else path.resolve())
    e = explanation
    data = {
        "sort": sort, "loss": e.loss, "sequences": e.sequences, "groups": e.groups,
        "causes": [asdict(cause) for cause in e.causes], "nothing": "" if e.causes else str(e),
        "texts": e.texts,
        "token_ids": None if e.token_ids is None else e.token_ids.tolist(),
        "sequence": e.sequence.tolist(), "position": e.position.tolist(),
        "columns": {name: _packed(column) for name, column in e.columns.items()},
    }  # fmt: skip
    return render("step.html", title, data, **links, WHY=f"Explained: {why}." * bool(why))


def _place(title: str, page: Path) -> tuple[str, dict[str, str]]:
    """The title and the links of a page; a step's page in a run's folder links to other pages."""
    here = _STEP.fullmatch(page.name)
    if page.parent.name != "explanations" or not here:
        return title, dict.fromkeys(("REPORT", "PREVIOUS", "NEXT"), "")
    step, others = int(here[1]), pages(page.parent)
    # Our trainer writes about.json at the start, report.html later; others write neither.
    run = page.parents[1]
    report = any((run / x).exists() for x in ("about.json", "report.html"))
    return f"Step {step} of {run.name}", {
        "REPORT": f"../report.html#step-{step}" * report,
        "PREVIOUS": ["", *(name for number, name in others.items() if number < step)][-1],
        "NEXT": [*(name for number, name in others.items() if number > step), ""][0],
    }


def pages(folder: Path) -> dict[int, str]:
    """The names of the pages of steps, by step, in order."""
    matches = (_STEP.fullmatch(path.name) for path in folder.glob("step-*.html"))
    return dict(sorted((int(name[1]), name[0]) for name in matches if name))


def link_next(folder: Path, step: float, name: str) -> None:
    """Sets the link to the next page in the last page before `step`; "" clears it."""
    for page in [folder / x for number, x in pages(folder).items() if number < step][-1:]:
        place, scratch = rb'(<a rel="next" href=")[^"]*', page.with_suffix(".tmp")
        scratch.write_bytes(re.sub(place, rb"\g<1>" + name.encode(), page.read_bytes(), count=1))
        scratch.replace(page)


def _packed(column: Tensor) -> str:
    """Returns the upper three bytes of each float32: four digits, in four characters of base64."""
    # A GPU's NaN has all bits set, which rounding would carry into the sign.
    plain = column.float().masked_fill(column.isnan(), torch.nan)
    three = (plain.view(torch.int32) + 0x80).view(torch.uint8).view(-1, 4)[:, 1:]
    return base64.b64encode(bytes(three.flatten().tolist())).decode()

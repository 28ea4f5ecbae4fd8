"""The page of an explanation: what it may load and run, what it holds, how large it is."""

import base64
import struct
from dataclasses import asdict

import pytest
import torch

from grpo_kernels.base.text import printable
from grpo_kernels.explain.page import step_page
from grpo_kernels.explain.records import LARGEST
from tests.helpers.explanations import HOSTILE, TEXTS, Page, explanation

EMPTY = explanation(
    columns={}, sequence=torch.tensor([]), position=torch.tensor([]), sequences=[], groups=[],
    causes=[], texts=None, token_ids=None, loss=None,
)  # fmt: skip


def links(page):
    """Targets of the links: the run, the step before, the next one."""
    return [attributes["href"] for _, attributes in page.tags if "href" in attributes]


def test_a_page_has_its_explanation_and_runs_its_script_alone():
    expected, page = explanation(), Page(step_page(explanation(), title=HOSTILE))
    page.check_harmless()
    assert links(page) == ["", "", ""]
    assert page.parts[("title",)] == page.parts[("h1",)] == printable(HOSTILE)
    assert step_page(expected).isascii()
    data, e = page.data(), expected
    columns = data.pop("columns")
    assert data == {
        "sort": "call", "loss": e.loss, "nothing": "", "groups": data["groups"],
        "sequences": [{k: None if x != x else min(x, LARGEST) if type(x) is float else x
                       for k, x in row.items()} for row in e.sequences],
        "causes": [{**asdict(e.causes[0]), "tokens": [[0, 2], [3, 0]]}],
        "texts": [list(texts) for texts in TEXTS], "token_ids": e.token_ids.tolist(),
        "sequence": e.sequence.tolist(), "position": e.position.tolist(),
    }  # fmt: skip
    assert data["causes"][0]["text"] == data["sequences"][1]["prompt"] == HOSTILE
    assert list(columns) == list(e.columns) and HOSTILE in columns
    for name, column in e.columns.items():  # four digits
        packed = base64.b64decode(columns[name], validate=True)
        parts = [b"\0" + packed[i : i + 3] for i in range(0, len(packed), 3)]
        floats = torch.tensor([struct.unpack("<f", x)[0] for x in parts])
        torch.testing.assert_close(floats, column, rtol=2.0**-16, atol=1e-42, equal_nan=True)


def test_a_page_without_a_cause_says_so_and_hostile_text_adds_no_element():
    page, empty = (Page(step_page(x, sort="gradient")) for x in (explanation(), EMPTY))
    assert page.tags == empty.tags and page.parts[("script",)] == empty.parts[("script",)]
    assert empty.data()["nothing"] == str(EMPTY) != "" and empty.data()["sort"] == "gradient"


def test_columns_with_strides_and_the_nan_of_a_gpu():
    column = torch.tensor([[1.0, 0.0], [float("nan"), 0.0]]).repeat(5, 1)[:, 0]
    column[1] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    (packed,) = Page(step_page(explanation(columns={"loss": column}))).data()["columns"].values()
    assert packed == base64.b64encode(b"\0\x80\x3f" + b"\0\xc0\x7f").decode() * 5


def test_64_000_tokens_are_less_than_8_mb():
    """Per token: 18 columns, ids of five digits, a text of five letters."""
    n, sequences = 1_000, 4
    count = n * sequences
    large = explanation(
        columns={f"column {i}": torch.randn(count) for i in range(18)},
        sequence=torch.arange(sequences).repeat_interleave(n),
        position=torch.arange(n).repeat(sequences),
        texts=[[" word"] * n for _ in range(sequences)],
        token_ids=torch.randint(10_000, 100_000, (count,)),
    )
    per_token = (len(step_page(large)) - len(step_page(EMPTY))) / count
    assert 64_000 * per_token + len(step_page(EMPTY)) < 8e6


# A page in a folder, what else is there, and its title and links.
PLACES = {
    "another name": ("base/explanations/of 3.html", ("base/about.json",), "of 3.html", [""] * 3),
    "in the middle": (
        "base/explanations/step-000012.html",
        ("base/report.html", *(f"base/explanations/step-{n:06d}.html" for n in (1, 9, 1000000))),
        "Step 12 of base", ["../report.html#step-12", "step-000009.html", "step-1000000.html"],
    ),
    "hostile": (
        "<img onerror=x>&@DATA@/explanations/step-000012.html", (),
        "Step 12 of <img onerror=x>&@DATA@", ["", "", ""],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PLACES)
def test_title_and_links_follow_from_the_place(case, tmp_path):
    name, others, title, expected = PLACES[case]
    for other in (name, *others):
        (tmp_path / other).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / other).touch()
    explanation().write(tmp_path / name)
    page = Page((tmp_path / name).read_text())
    assert page.parts[("title",)] == page.parts[("h1",)] == title
    assert links(page) == expected

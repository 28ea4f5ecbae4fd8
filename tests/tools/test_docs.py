"""The docs' code runs, and their table says what the code does."""

import re
from pathlib import Path

import pytest

from grpo_kernels.config import _LOSSES, LOSS_TYPES, GRPOLossConfig
from tests.support.batches import OBJECTIVES, config, make_batch, run_fused

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "objectives.md").read_text()


def rows_of(heading):
    section = TEXT.split(f"## {heading}\n")[1].split("\n## ")[0]
    for line in section.splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize(
    ("page", "at_least"),
    (("objectives", 5), ("sampled_backward", 1), ("training", 1), ("integrations", 2)),
)
def test_code_runs(page, at_least):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= at_least
    exec("\n".join(blocks), {})


def test_every_loss_type_is_in_the_table():
    assert {row[0].strip("`") for row in rows_of("Loss types")} == set(LOSS_TYPES)


@pytest.mark.parametrize("row", list(rows_of("Loss types")), ids=lambda row: row[0])
def test_table(row):
    name, _, aggregation, passes, options, _ = row
    name = name.strip("`")
    needed = {"cispo": {"epsilon_high": 5.0}, "dr_grpo": {"max_completion_length": 8}}
    cfg = GRPOLossConfig(loss_type=name, **needed.get(name, {}))
    assert cfg.one_pass == (passes == "one")
    assert aggregation.strip("`¹") == cfg.effective_aggregation
    accepted = set(re.findall(r"`(\w+)`", options)) - {"max_completion_length"}
    if options.startswith("the same"):
        accepted |= _LOSSES["grpo"].options
    assert accepted == _LOSSES[name].options
    assert ("aggregation" in accepted) == aggregation.endswith("¹")


def test_every_metric_is_explained():
    explained = {name for row in rows_of("Metrics") for name in re.findall("`(.*?)`", row[0])}
    given = set()
    for options, tensors in OBJECTIVES.values():
        passed = dict.fromkeys(tensors, True)
        given |= run_fused(
            make_batch(), exact=False, config=config(**options), **passed
        ).metrics.keys()
    given |= run_fused(make_batch(), exact=False, backward="sampled").metrics.keys()
    assert given == explained

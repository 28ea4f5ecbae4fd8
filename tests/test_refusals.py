"""Every refusal of the core, of explanations and of the trainer: a row each, and none is missed."""

import pytest

from tests.refusals import check, core, explain, fits, missed, refusal_of, trainer

CORE = ("base", "loss", "head", "kernels", "reference.py", "sampler_check.py",
        "fused_grpo_loss.py", "fused_distillation.py", "__init__.py")  # fmt: skip
ROWS = [*core.TABLE, *explain.TABLE, *trainer.TABLE]
# Checks that no row passes, and the reason.
ON_RANKS = "needs several ranks: `tests/ranks/` has it"
UNREACHED = {
    "base/sequences.py: forward": ON_RANKS,
    "head/shards.py: _ask_same": ON_RANKS,
    "head/shards.py: ranks_of": ON_RANKS,
    "head/shards.py: check": ON_RANKS,
    "training/step/scoring.py: compare_roundings": "checks what the trainer itself computed",
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.message)
def test_refuses(row):
    check(row)


@pytest.mark.parametrize(
    ("rows", "places"),
    ((core.TABLE, CORE), (explain.TABLE, ["explain"]), (trainer.TABLE, ["training"])),
    ids=("core", "explain", "training"),
)
def test_every_check_is_reached(rows, places):
    expected = {x for x in UNREACHED if x.partition("/")[0] in places}
    assert missed(rows, *places).keys() == expected


def test_a_message_says_what_was_expected_or_what_to_do():
    for row in [x for x in core.TABLE if x not in core.OF_KEYWORDS]:
        text = refusal_of(row).text
        asks = any(f"{verb} " in text for verb in ("pass", "set", "use", "remove", "cut", "needs"))
        assert asks or fits("...: expected ...; got", text), text

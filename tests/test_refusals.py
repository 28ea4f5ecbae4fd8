"""Every refusal of the core, of explanations and of the trainer: a row each, and none is missed."""

import pytest

from tests.refusals import check, core, explain, trainer

CORE = ("base", "loss", "head", "kernels", "reference.py", "sampler_check.py",
        "fused_grpo_loss.py", "fused_distillation.py", "__init__.py")  # fmt: skip
# Checks that no row passes, and the reason.
ON_RANKS = "needs several ranks: `tests/ranks/` has it"
UNREACHED = {
    "base/sequences.py: forward": ON_RANKS,
    "head/shards.py: _ask_same": ON_RANKS,
    "head/shards.py: ranks_of": ON_RANKS,
    "head/shards.py: check": ON_RANKS,
    "training/step/scoring.py: compare_roundings": "checks what the trainer itself computed",
}


@pytest.mark.parametrize(
    ("rows", "places"),
    ((core.TABLE, CORE), (explain.TABLE, ["explain"]), (trainer.TABLE, ["training"])),
    ids=("core", "explain", "training"),
)
def test_every_check_refuses(rows, places):
    check(rows, places, {x for x in UNREACHED if x.partition("/")[0] in places})

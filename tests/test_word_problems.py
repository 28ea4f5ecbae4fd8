"""Word problems from templates: their answers, and what is held out."""

import re
from collections import Counter

import pytest

from examples.word_problems import KINDS, LEVELS, word_problems

STEP = re.compile(r"(\d+) ([-+*/]) (\d+) = <<\1\2\3=(\d+)>>\4")


def steps_of(row):
    """The steps of a worked solution as (left, sign, right, result)."""
    *lines, last = row["answer"].split("\n")
    steps = [STEP.fullmatch(line).groups() for line in lines]
    assert last == f"#### {steps[-1][-1]}"
    return steps


@pytest.mark.parametrize("held_out", (None, *KINDS))
def test_solutions_are_right(held_out):
    rows = word_problems(600, 0, held_out=held_out)
    signs = Counter()
    for row in rows:
        assert not set("{}_") & set(row["question"]) and row["question"].endswith("?")
        given = [*re.findall(r"\d+", row["question"]), "2"]
        for x, sign, y, result in steps_of(row):
            # Every number of a step is given, or follows from a step before.
            assert x in given and y in given, row
            assert eval(f"{x} {sign} {y}") == int(result) >= 1
            given.append(result)
            signs[sign] += 1
        assert len(steps_of(row)) == 1 + (row["level"] == 3)
    assert set(signs) == set("+-*/")
    assert Counter(row["level"] for row in rows) == {level: 200 for level in LEVELS}


def test_what_is_held_out_is_not_trained_on():
    train = {(row["template"], row["answer"]) for row in word_problems(2500, 0)}
    for seed in range(3):
        seen = word_problems(500, seed, held_out=KINDS[0])
        assert not train & {(row["template"], row["answer"]) for row in seen}
    new = {row["template"] for row in word_problems(500, 0, held_out=KINDS[1])}
    assert new and not new & {template for template, _ in train}

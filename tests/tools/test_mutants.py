"""The damages of `tests.tools.mutants` fit the sources, and the page tells of each."""

import re

import pytest

from tests.tools import mutants
from tests.tools.damages import DAMAGES
from tests.tools.kernel_damages import KERNEL_DAMAGES


def test_every_damage_fits():
    for damages in (DAMAGES, KERNEL_DAMAGES):
        mutants.check(damages)
        assert len({damage.what for damage in damages}) == len(damages) <= 40


@pytest.mark.parametrize("old", ("no such line", "return"))
def test_one_that_does_not_fit_once_is_refused(old):
    with pytest.raises(ValueError, match="once; found"):
        mutants.check([DAMAGES[0]._replace(old=old)])


def test_the_page_tells_of_each_and_none_went_unseen():
    table = (
        mutants.PAGE.read_text().split("<!-- mutants -->")[1].split("<!-- end of mutants -->")[0]
    )
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    told = {row[0] for row in rows[3:]}
    # None until `python -m tests.tools.mutants --write` has run on the sources as they are.
    assert told in (set(), {damage.what for damage in DAMAGES})
    assert not re.search(mutants.NOT_SEEN, table)


def test_a_damage_that_tests_see(monkeypatch, capsys):
    none = DAMAGES[0]._replace(new=DAMAGES[0].old, tests=("test_products",))
    monkeypatch.setattr(mutants, "DAMAGES", [DAMAGES[0], none])
    monkeypatch.setattr(mutants, "fast_tier", lambda: ["tests/test_products.py"])
    assert mutants.main(["--workers", "1"]) == 1
    told = capsys.readouterr().out
    assert "test_fused_grpo_loss.py::test_padded" in told and mutants.NOT_SEEN in told

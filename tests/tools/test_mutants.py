"""The damages of `tests.tools.mutants` fit the sources, and one that no test sees is an error."""

import pytest

from tests.tools import mutants
from tests.tools.damages import DAMAGES, KERNEL_DAMAGES


def test_every_damage_fits():
    for damages in (DAMAGES, KERNEL_DAMAGES):
        mutants.check(damages)
        assert len(set(damages)) == len(damages) <= 40


@pytest.mark.parametrize("old", ("no such line", "return"))
def test_one_that_does_not_fit_once_is_refused(old):
    with pytest.raises(ValueError, match="once; found"):
        mutants.check([DAMAGES[0]._replace(old=old)])


def test_a_damage_that_tests_see(monkeypatch, capsys):
    """Four runs of a small module, each in a process of its own: ten seconds."""
    seen = next(damage for damage in DAMAGES if damage.tests == ("test_plan",))
    monkeypatch.setattr(mutants, "DAMAGES", [seen, seen._replace(new=seen.old)])
    monkeypatch.setattr(mutants, "fast_tier", lambda: ["tests/test_plan.py"])
    assert mutants.main(["--workers", "1"]) == 1
    output = capsys.readouterr().out
    assert "test_plan.py::" in output and mutants.NOT_SEEN in output

"""The damages of `tests.tools.mutants` fit the sources, and one that no test sees is an error."""

from pathlib import Path

import pytest

from tests.tools import mutants
from tests.tools.damages import DAMAGES, KERNEL_DAMAGES


def test_every_damage_fits(monkeypatch):
    monkeypatch.chdir(mutants.ROOT)
    for damages in (DAMAGES, KERNEL_DAMAGES):
        assert len(set(damages)) == len(damages) <= 40
        for damage in damages:
            mutants.damaged(damage)
            assert all(Path(f"tests/{name}.py").exists() for name in damage.tests), damage
    for old in ("no such line", "return"):
        with pytest.raises(ValueError, match="once; found"):
            mutants.damaged(DAMAGES[0]._replace(old=old))


def test_a_damage_that_tests_see(monkeypatch, capsys):
    """Four runs of a small module, each in a process of its own: ten seconds."""
    seen = next(damage for damage in DAMAGES if damage.tests == ("test_plan",))
    monkeypatch.setattr(mutants, "DAMAGES", [seen, seen._replace(new=seen.old)])
    monkeypatch.setattr(mutants, "FAST", ["tests/test_plan.py"])
    assert mutants.main(["--workers", "1"]) == 1
    output = capsys.readouterr().out
    assert "test_plan.py::" in output and mutants.NOT_SEEN in output

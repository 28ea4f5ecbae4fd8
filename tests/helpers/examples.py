"""The examples as functions, and what `distill_served` does with a fake and with a real server."""

import runpy
from itertools import chain

import pytest
import torch

from tests.helpers.ranks import ROOT


def example(name, **replaced):
    """The functions of an example, with others in the place of some."""
    run = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))
    run["main"].__globals__.update(replaced)
    return run


def check_scores(run, address, teacher, prompts, completions, atol):
    """Both questions to the server are answered with the model's log-probs."""
    pairs = zip(prompts, completions, strict=True)
    exact = torch.cat([teacher.logps(a + b)[len(a) - 1 : -1] for a, b in pairs])
    scores = run["likeliest_of_teacher"](address, 4, prompts, completions)
    assert [*map(len, scores)] == [*map(len, completions)]
    rows, tokens = chain(*scores), chain(*completions)
    for row, logps, token in zip(rows, exact, tokens, strict=True):
        assert set(row) == {token, *logps.topk(4).indices.tolist()}
        assert row == pytest.approx({i: float(logps[i]) for i in row}, abs=atol)
    ids = (exact.topk(3).indices + 1) % exact.shape[1]
    logps = run["teacher_at"](address, prompts, completions, ids)
    torch.testing.assert_close(logps, exact.gather(1, ids), rtol=0, atol=atol)


def check_runs(run, options, model, student, *more, to):
    """The KL of a model from itself is 0, and that of a student falls to a share of the first."""
    (start,) = run["main"]([*options, "--model", str(model), "--steps", "1"])
    assert abs(start) < 1e-6
    history = run["main"]([*options, "--model", student, *more])
    assert history[0] > 0.01 and sum(history[-2:]) < to * sum(history[:2])

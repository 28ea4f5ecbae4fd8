"""Pages that explain steps of a run, and which steps those are."""

import math
import re
from itertools import count

import pytest

from grpo_kernels.explain.exports import read
from grpo_kernels.explain.steps import FIRST, ExplainedSteps
from tests.helpers.explanations import HOSTILE, explanation
from tests.helpers.trainer_runs import (
    FakeRollout,
    assert_same_weights,
    config_of,
    rows_of,
    same_for_any_ranks,
    trainer_of,
    weights_of,
)

pytestmark = pytest.mark.usefixtures("real_memory")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"beta": 0.1, "kl_estimator": "exact", "micro_batch_size": 3},
        {"loss_type": "gspo", "epochs_per_rollout": 2, "micro_batch_size": 5},
        {"is_correction": "token_truncate", "mask_truncated_completions": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_a_page_adds_up_to_the_loss_of_the_step(options, tiny_model, tmp_path):
    options = {"skip_untrained": False, "explain_every": 1, "learning_rate": 1e-3, **options}
    trainer = trainer_of(
        config_of(tiny_model, tmp_path, **options),
        rollout=lambda _: FakeRollout((6, 1, 3), logps=-5.5),
    )
    seen = []
    folder = trainer.train(lambda row, samples: seen.append((row, samples)))
    for row, samples in seen:
        page = folder / f"explanations/step-{row['step']:06d}.html"
        explanation = read(page.with_suffix(".jsonl"))
        if trainer.config.updates_per_step == 1:
            assert explanation.loss == pytest.approx(row["loss"], rel=1e-5, abs=1e-7)
        assert len(explanation.sequences) == len(samples.texts)
        rewards = [x["reward"] for x in explanation.sequences]
        assert rewards == pytest.approx(samples.rewards_total.tolist())
        assert [x["group"] for x in explanation.sequences] == samples.prompt_of
        truncated = [x["truncated"] for x in explanation.sequences]
        assert truncated == [not x.ended for x in samples.completions]
        moved = explanation.columns["moved"]
        assert moved.abs().mean() > 1e-4 and moved.isfinite().all()
        assert "<script>" in page.read_text()
    assert '"pages":[1,2]' in (folder / "report.html").read_text()


def test_a_jump_is_explained_by_itself_and_named(tiny_model, tmp_path, capsys):
    calls = count(1)

    def rewards(completions, **_):
        scale = 100.0 if next(calls) == 7 else 1.0
        return [len(text) % 3 * scale for text in completions]

    options = {"steps": 9, "learning_rate": 1e-5, "scale_rewards": "none", "rewards": ["jump"]}
    trainer = trainer_of(config_of(tiny_model, tmp_path, **options), rewards={"jump": rewards})
    folder = trainer.train()
    pages = sorted(path.name for path in (folder / "explanations").glob("*.html"))
    assert pages == ["step-000007.html"]
    assert "warning: step 7 explained (grad_norm is" in capsys.readouterr().out


def test_a_page_that_fails_does_not_end_the_run(tiny_model, tmp_path, capsys):
    config = config_of(tiny_model, tmp_path, explain_every=1)
    config.folder.mkdir(parents=True)
    (config.folder / "explanations").write_text("in the way")
    trainer = trainer_of(config)
    trainer.train()
    assert len(rows_of(config.folder)) == 2
    assert "explain failed" in capsys.readouterr().out


@pytest.mark.parametrize("loss", ({}, {"is_correction": "token_truncate"}), ids=str)
def test_a_step_that_trained_nothing_has_no_page(loss, tiny_model, tmp_path, capsys):
    calls = count()

    def equal_first(completions, **_):
        later = next(calls) > 0
        return [float(i * later) for i in range(len(completions))]

    trainer = trainer_of(
        config_of(tiny_model, tmp_path, explain_every=1, **loss), rewards={"noise": equal_first},
        rollout=lambda _: FakeRollout(logps=-5.5),
    )  # fmt: skip
    folder = trainer.train()
    out = capsys.readouterr().out
    assert [path.name for path in (folder / "explanations").glob("*.html")] == ["step-000002.html"]
    assert "failed" not in out and "warning: step 2" not in out and "step 2 explained: " in out


def test_pages_after_the_checkpoint_go(tiny_model, tmp_path):
    options = {"steps": 4, "save_every": 2, "resume": True}

    def killed(row, _):
        if row["step"] == 3:
            raise KeyboardInterrupt

    trainer = trainer_of(config_of(tiny_model, tmp_path, explain_every=1, **options))
    with pytest.raises(KeyboardInterrupt):
        trainer.train(killed)
    pages = trainer.config.folder / "explanations"
    assert len([*pages.iterdir()]) == 6
    folder = trainer_of(config_of(tiny_model, tmp_path, **options)).train()
    assert sorted({path.stem for path in pages.iterdir()}) == ["step-000001", "step-000002"]
    assert next_of(folder) == {"step-000001.html": "step-000002.html", "step-000002.html": ""}
    assert '"pages":[1,2]' in (folder / "report.html").read_text()


def test_explaining_changes_no_weight(tiny_model, tmp_path):
    runs = []
    for n in (0, 1):
        config = config_of(tiny_model, tmp_path, f"every {n}", steps=3, explain_every=n)
        runs.append(trainer_of(config, rollout=same_for_any_ranks))
        runs[-1].train()
    plain, explained = map(weights_of, runs)
    assert_same_weights(explained, plain)


def steps_of(values, **options):
    steps = ExplainedSteps("unused", **options)
    rows = ({"step": i, "grad_norm": x, "kl": 0.0} for i, x in enumerate(values, 1))
    return [row["step"] for row in rows if steps.why(row)]


def test_steps_that_are_explained():
    calm = [1.0, 1.2, 0.9, 1.1, 1.0, 1.3]
    assert steps_of([*calm, 2.0, 7.0, 6.5, 30.0, 8.0]) == [8, 10]  # 6.5 is none after 7
    assert steps_of([*calm, math.nan, 1.0]) == [7]
    assert steps_of([9.0, 1.0, 30.0]) == []  # too early to tell
    assert steps_of(calm, every=2) == [2, 4, 6]
    assert steps_of([*calm, 4.0**2, 4.0**4, 4.0**6], most=2) == [7, 8]
    assert steps_of([*calm, 1e9], factor=0) == []
    kl = ExplainedSteps("unused")
    rows = [{"step": i, "kl": x} for i, x in enumerate([1e-6] * FIRST + [1e-3])]
    assert [kl.why(row) for row in rows] == [None] * 6
    assert "kl is 0.5" in kl.why({"step": 9, "kl": 0.5})


def test_a_run_that_goes_on_compares_with_its_rows():
    steps = ExplainedSteps("unused", most=2)
    steps.open([{"step": i, "grad_norm": x} for i, x in enumerate([1.0] * 8 + [50.0])])
    assert steps.why({"step": 9, "grad_norm": 40.0}) is None  # 50 was larger
    assert "60, the median so far 1" in steps.why({"step": 10, "grad_norm": 60.0})
    assert steps.why({"step": 11, "grad_norm": 70.0}) is None  # the third
    overflow = {"step": 12, "grad_norm": math.inf, "loss_scale": 512.0}  # no spike in float16
    assert ExplainedSteps("unused").why(overflow) is None


def next_of(folder):
    """Targets of the links to the next page, by page."""
    pages = sorted((folder / "explanations").glob("*.html"))
    return {page.name: re.search(r'rel="next" href="(.*?)"', page.read_text())[1] for page in pages}


def test_a_record_of_a_step_and_links_between_pages(tmp_path):
    steps = ExplainedSteps(tmp_path, every=10)
    record = steps.write(10, "every 10 steps", explanation())
    assert record == {
        "why": "every 10 steps", "spike": False, "cause": "ratio", "text": HOSTILE,
    }  # fmt: skip
    record = steps.write(12, "kl is <3>", explanation(causes=[]))
    assert (record["spike"], record["cause"]) == (True, None)
    assert "step 12 explained (kl is <3>): no cause" in steps.message(12, record)
    assert "Explained: kl is &lt;3&gt;." in steps.page(12).read_text()
    steps.write(11, "every 11 steps", explanation())  # before what another run left
    names = [f"step-{n:06d}.html" for n in (10, 11, 12)]
    assert next_of(tmp_path) == dict(zip(names, [*names[1:], ""], strict=True))

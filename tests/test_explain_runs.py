"""The page of a run, and of several: its verdict, its numbers, its rules of curves, its cost."""

import json
import math
import shutil
import subprocess
from pathlib import Path

import pytest

from grpo_kernels.explain import runs
from tests.helpers.explanations import HOSTILE, Page

CURVES = Path(runs.__file__).with_name("curves.js").read_text()
ROW = {"reward": 0.5, "seconds": 2.0, "peak_memory_gib": 1.0, "completion_length": 8.0}


def run_of(folder, steps=3, planned=3, *, damage="", options=(), about=None, **files):
    """Writes a run's files: rows of `steps`, and those given by the name of their file."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model": "m", "dataset": "d", "steps": planned, "prompts_per_step": 2}
    config |= {"num_generations": 4, **dict(options)}
    (folder / "config.json").write_text(json.dumps(config))
    if about is not None:
        (folder / "about.json").write_text(json.dumps(about))
    for name, rows in {"metrics": [{"step": i + 1, **ROW} for i in range(steps)], **files}.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows) + damage
        (folder / f"{name}.jsonl").write_text(lines)
    return folder


def evaluation(step, right, count=20):
    low, high = max(0.0, right / count - 0.2), min(1.0, right / count + 0.2)
    return {"step": step, "accuracy": right / count, "low": low, "high": high, "problems": count}


def answers(step, right, completion="text"):
    """Rows of `answers.jsonl`. `right`: a letter per problem, "y" if it was answered right."""
    return [
        {"step": step, "prompt": f"problem {i}", "completion": completion, "answered": str(i),
         "answer": i, "correct": x == "y", "ended": True}
        for i, x in enumerate(right)
    ]  # fmt: skip


def page_of(*folders, output=None):
    output = output or folders[0] / "report.html"
    text = runs.write(folders, output)
    page = Page(output.read_text())
    page.verdict = text.splitlines()[0]
    assert page.parts[("p",)].startswith(page.verdict)
    return page


BEFORE = {"step": 0, "accuracy": 0.25, "low": 0.13, "high": 0.45, "problems": 27}
HELD_OUT = "27 problems not trained on."


@pytest.mark.parametrize(
    ("after", "text"),
    (
        ((), f"accuracy is 25.0 %, on {HELD_OUT}"),
        ((9, 0.04, 0.01, 0.12), f"fell from 25.0 % to 4.0 %, on {HELD_OUT}"),
        ((9, 0.52, 0.34, 0.69), f"rose from 25.0 % to 52.0 %, on {HELD_OUT}"),
        (
            (9, 0.50, 0.32, 0.67),
            f"from 25.0 % to 50.0 %, a difference within chance, on {HELD_OUT}",
        ),
    ),
)
def test_a_verdict_without_answers_is_by_newcombe_s_interval(tmp_path, after, text):
    last = dict(zip(("step", "accuracy", "low", "high"), after, strict=False))
    rows = [BEFORE, {**BEFORE, **last}] if after else [BEFORE]
    page = page_of(run_of(tmp_path, evaluations=rows))
    assert page.verdict.endswith(text)
    if "rose from 25.0 % to 52.0 %" in text:  # 0.27 - hypot(0.18, 0.2), 0.27 + hypot(0.17, 0.12)
        change = page.data()["runs"][0]["change"]
        assert (change["low"], change["high"]) == pytest.approx((0.0009, 0.4781), abs=1e-4)


@pytest.mark.parametrize(
    ("up", "down", "said"),
    (  # of 20 problems, 5 of them right before and after; chance by hand
        (7, 1, "went from 30.0 % to 60.0 %, a difference within chance, on"),  # 18 / 2^8 = 0.07
        (6, 0, "rose from 25.0 % to 55.0 %, on"),  # 2 / 2^6 = 0.03
        (1, 8, "fell from 65.0 % to 30.0 %, on"),
        (3, 3, "stayed at 40.0 %, on"),
    ),
)
def test_answers_of_the_same_problems_are_compared_one_by_one(tmp_path, up, down, said):
    old = "y" * 5 + "n" * up + "y" * down + "n" * (15 - up - down)
    new = "y" * 5 + "y" * up + "n" * down + "n" * (15 - up - down)
    rows = [evaluation(0, old.count("y")), evaluation(9, new.count("y"))]
    page = page_of(run_of(tmp_path, evaluations=rows, answers=answers(0, old) + answers(9, new)))
    assert f"{said} 20 problems" in page.verdict
    assert page.verdict.endswith(f": {up} turned right, {down} wrong.")
    change, n = page.data()["runs"][0]["change"], 22  # with half a problem more of each kind
    middle, spread = (up - down) / n, math.sqrt(up + down + 1 - (up - down) ** 2 / n) / n
    assert change["low"] == pytest.approx(middle - 1.96 * spread)
    assert change["high"] == pytest.approx(middle + 1.96 * spread)


OTHERS = {
    "another prompt": lambda rows: [*rows[:-1], {**rows[-1], "prompt": "another"}],
    "one less": lambda rows: rows[:-1],
    "samples": lambda rows: [{**row, "sample": 0} for row in rows],
}


@pytest.mark.parametrize("other", OTHERS)
def test_answers_of_other_problems_are_not_paired(tmp_path, other):
    rows = OTHERS[other](answers(0, "n" * 20) + answers(9, "n" * 8 + "y" * 12))
    folder = run_of(tmp_path, evaluations=[evaluation(0, 0), evaluation(9, 12)], answers=rows)
    assert page_of(folder).data()["runs"][0]["change"].keys() == {"low", "high", "beyond"}


def test_a_run_without_an_evaluation_and_one_without_a_step(tmp_path):
    page = page_of(run_of(tmp_path / "a", steps=3, planned=7))
    assert page.verdict == "No held-out problems were answered. Step 3 of 7 is done."
    (tmp_path / "b").mkdir()
    (tmp_path / "b/config.json").write_text('{"steps": 3}')
    shutil.move(tmp_path / "b", tmp_path / "b\x1b")
    text = runs.write([tmp_path / "b\x1b"], tmp_path / "b.html")
    assert text == "No step is done yet.\nb\\x1b: no step is done yet"


@pytest.mark.parametrize(
    ("rewards", "text"),
    (
        (
            [0.0, 1.0, 9.0, 1.0, 2.0],
            "5 steps, median 2 s; 25 completion tokens per second; reward 0.500 -> 1.500 (first "
            "and last 2); peak memory 1.00 GiB",
        ),
        ([None, 0.5, None], "reward 0.500 -> 0.500 (first and last 1); peak"),
        ([None], "32 completion tokens per second; peak memory 1.00 GiB"),
    ),
)
def test_the_terminal_gets_figures_of_steps_that_do_not_overlap(tmp_path, rewards, text):
    rows = [{"step": i + 1, **ROW, "reward": x} for i, x in enumerate(rewards)]
    rows[-1]["seconds"] += 3 * (len(rows) == 5)
    assert text in runs.write([run_of(tmp_path / "a", metrics=rows)], tmp_path / "r.html")


def test_several_runs_are_compared_with_the_best(tmp_path):
    ends = {"a/x": "y" * 10 + "n" * 10, "b/x": "y" * 18 + "n" * 2, "c": "y" * 17 + "n" * 3}
    folders = [
        run_of(tmp_path / name, evaluations=[evaluation(9, right.count("y"))],
               answers=answers(9, right))
        for name, right in ends.items()
    ]  # fmt: skip
    folders.append(run_of(tmp_path / "d"))
    page = page_of(*folders, output=tmp_path / "all.html")
    assert page.verdict == (
        "b/x answers 90.0 % of 20 problems not trained on, step 9; within chance of it: "
        f"{tmp_path.name}/c (85.0 %, step 9); behind by more than chance: a/x (50.0 %, step 9)."
    )
    assert page.parts[("h1",)] == "4 runs"
    found = {x["name"]: x.get("behind") for x in page.data()["runs"]}
    assert (found["a/x"]["up"], found["a/x"]["down"]) == (0, 8)
    assert found["b/x"] is None and found[f"{tmp_path.name}/d"] is None
    # Each problem is on the page once, and so is a folder that comes twice.
    assert page.data()["prompts"] == [f"problem {i}" for i in range(20)]
    assert page_of(folders[0], folders[0]).parts[("h1",)] == "x"


def test_runs_with_different_problems_are_not_ranked(tmp_path):
    folders = [
        run_of(tmp_path / name, options={"dataset": name}, evaluations=[evaluation(9, 1, n)])
        for name, n in (("a", 1), ("b", 2_000))
    ]
    page = page_of(*folders, output=tmp_path / "all.html")
    assert page.verdict == (
        "These runs have different held-out problems: a 100.0 % of 1, b 0.1 % of 2,000 were "
        "answered right."
    )
    assert not [run for run in page.data()["runs"] if "behind" in run]
    assert page_of(folders[0]).verdict.endswith("100.0 %, on 1 problem not trained on.")


SAID = {"rule": "__proto__", "text": HOSTILE}
EXPLAINED = {"why": HOSTILE, "spike": True, "cause": None, "text": "\ud83d"}


def hostile(folder):
    metrics = [{"step": i + 1, **ROW, HOSTILE: i, "__proto__": 1.5 * i, "\ud83d": None,
                "huge": 10**400, "nan": math.nan, "reward/$x$": i, "reward/_brief": -i,
                "warnings": [SAID], "explained": EXPLAINED} for i in range(5)]  # fmt: skip
    parts = [{"type": "text", "text": HOSTILE}, {"type": "image"}]
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": parts},
            {"role": "assistant", "content": None}, {"role": "user", "content": "?"}]  # fmt: skip
    shown = {"prompt": chat, "completion": f"{HOSTILE}\ud83d\0", "answer": HOSTILE, "ended": False}
    scored = {"reward": None, "advantage": 0.0}
    about = {"defaults": {"__proto__": 1}, "versions": {HOSTILE: HOSTILE},
             "metrics": {"__proto__": {"chart": HOSTILE, "unit": HOSTILE}}}  # fmt: skip
    return run_of(
        folder, damage='[]\n{"step"\n{"step": 6', options={HOSTILE: [HOSTILE], "__proto__": "x"},
        about=about, metrics=metrics, samples=[{"step": 1, **shown, **scored}],
        evaluations=[evaluation(0, 0, 1)],
        answers=[{"step": 0, **shown, "correct": False, "answered": HOSTILE}],
    )  # fmt: skip


def test_may_run_its_script_alone_and_hostile_text_adds_no_element(tmp_path):
    page = page_of(hostile(tmp_path / "<img src=x onerror=alert(1)>"))
    plain = page_of(run_of(tmp_path / "plain"))
    page.check_harmless()
    assert not [x for _, x in page.tags if "href" in x]
    assert page.tags == plain.tags and page.parts[("script",)] == plain.parts[("script",)]
    assert page.parts[("title",)] == page.parts[("h1",)] == "<img src=x onerror=alert(1)>"


def test_a_page_has_all_that_the_files_have(tmp_path):
    folder = hostile(tmp_path / "a #?")
    for name in ("step-000003.html", "step-000003.jsonl", "step-1000000.html", "step-x.html"):
        (folder / "explanations").mkdir(exist_ok=True)
        (folder / "explanations" / name).touch()
    (tmp_path / "pages").mkdir()
    (run,) = (data := page_of(folder, output=tmp_path / "pages/r.html").data())["runs"]
    assert run["steps"] == [1, 2, 3, 4, 5] and run["pages"] == [3, 1_000_000]
    assert run["up"] == "../a%20%23%3F"
    assert run["columns"]["__proto__"] == [0, 1.5, 3, 4.5, 6]
    assert run["columns"]["reward/_brief"] == [0, -1, -2, -3, -4]
    assert run["columns"].keys() >= {HOSTILE, "reward/$x$"} and "huge" not in run["columns"]
    assert run["signs"][4] == {"step": 5, "warnings": [SAID], "explained": EXPLAINED}
    assert run["options"][HOSTILE] == [HOSTILE] and run["about"]["versions"] == {HOSTILE: HOSTILE}
    assert data["prompts"] == [f"{HOSTILE}\n\n?"]
    (sample,) = run["samples"]
    assert sample["prompt"] == 0 and sample["completion"] == f"{HOSTILE}\ud83d\0"
    assert run["answers"]["0"]["0"] == [0, HOSTILE, HOSTILE, f"{HOSTILE}\ud83d\0"]


def test_a_step_that_was_taken_again_is_there_once(tmp_path):
    rows = [{"step": step, "reward": reward} for step, reward in ((1, 0.5), (2, 0.1), (2, 0.7))]
    again = [evaluation(0, 2), evaluation(9, 3), evaluation(9, 4)]
    (run,) = page_of(run_of(tmp_path, metrics=rows, evaluations=again)).data()["runs"]
    assert run["steps"] == [1, 2] and run["columns"]["reward"] == [0.5, 0.7]
    assert [x["accuracy"] for x in run["evaluations"]] == [0.1, 0.2]


def test_rows_of_another_form_are_left_out(tmp_path):
    said = {"rule": "kl_large", "text": "a"}
    odd = ({"warnings": ["text"], "explained": "yes"}, {"warnings": 3, "explained": [1]},
           {"warnings": [None, said], "explained": None})  # fmt: skip
    metrics = [{"step": i + 1, **x} for i, x in enumerate(odd)]
    samples = [{"step": 1, "prompt": "a"}, {"step": 1, "prompt": "a", "completion": "b"}]
    folder = run_of(tmp_path, metrics=metrics, samples=samples, about=[1],
                    evaluations=[{"step": 0, "problems": 3}, {**evaluation(1, 0), "problems": 0}],
                    answers=[{"step": 0, "prompt": "a", "completion": "b"}])  # fmt: skip
    (folder / "explanations").mkdir()
    (folder / "explanations/step-12 (copy).html").touch()
    (run,) = page_of(folder).data()["runs"]
    assert run["signs"] == [{"step": 3, "warnings": [said]}]
    assert run["samples"] == [{"step": 1, "prompt": 0, "completion": "b"}]
    assert not (run["evaluations"] or run["answers"] or run["about"] or run["pages"])


def test_long_texts_are_cut(tmp_path):
    samples = [{"step": i + 1, "prompt": f"{i} {'p' * 9_000}", "completion": "c" * 9_000}
               for i in range(1_000)]  # fmt: skip
    rows = answers(0, "y" * 500, "a" * 9_000) + answers(1, "y" * 500, "a" * 9_000)
    folder = run_of(tmp_path, samples=samples, answers=rows, evaluations=[evaluation(0, 500, 500)])
    page_of(folder)
    assert (folder / "report.html").stat().st_size < 7e6


@pytest.mark.skipif(not shutil.which("node"), reason="the rules of curves are JavaScript")
def test_rules_of_curves():
    rules = CURVES.split("// End of the rules.")[0]
    noise = "Array.from({ length: 100 }, (_, i) => Math.sin(i * i))"
    cases = {
        # no picture of what does not change; NaN and gaps are null
        "constant([2, null, 2 + 1e-9, 2])": True, "constant([1, 1.01])": False,
        "equal([1, null, 0], [1.00001, null, 0])": True, "equal([1, null], [1, 0])": False,
        # a spike, one decade, below 0, mostly 0
        "spansDecades([1, 1, 1, 1, 31])": True,
        "spansDecades([1, 2, 5, 10])": False, "spansDecades([-1, 1, 1, 1000])": False,
        "spansDecades([0, 0, 0, 1000])": False, "spansDecades([])": False,
        # schedules and steps are drawn as they are
        "noisy(Array.from({ length: 100 }, (_, i) => 1 / (1 + i)))": False,
        f"noisy([...{noise}.map(x => .001 * x), 1000])": True,
        # a spike is no plateau, and a point of its own; a gap stays one
        "smoothed([1, 1, 1, 9, 1, 1, 1], [0, 3, 5], 7)": [1, 1, 1],
        "smoothed([1, null, 3], [0, 1, 2], 2)": [1, None, 3],
        "outliers([1, 1.1, 9, 1, 1], [1, 1, 1, 1, 1], { at: x => x, low: 0, high: 10 })": [2],
        "thin(Array.from({ length: 5000 }, (_, i) => i === 777 ? 9 : 0), "
        "Array.from({ length: 5000 }, (_, i) => i)).includes(777)": True,
        # shares from 0, at most to 100 %; little change fills little of the picture; log in decades
        "[axis([.5, .7], '%').low, axis([.5, .7], '%').high]": [0, 1],
        "axis([0, .001], '%').high": 0.02, "axis([], '').ticks": [0, 1],
        "axis([.001, .1, 10], '', true).ticks": [0.001, 0.01, 0.1, 1, 10],
        "axis([0, .1, 10], '', true).at(0)": -1,
        "nice(0, .02, 4)": [0, 0.005, 0.01, 0.015, 0.02],
    }  # fmt: skip
    known = 'const known = x => typeof x === "number" && x === x;'
    script = f"{known}{rules}console.log(JSON.stringify([{', '.join(cases)}]))"
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout, parse_float=lambda x: round(float(x), 9))
    assert dict(zip(cases, found, strict=True)) == cases

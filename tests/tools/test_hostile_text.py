"""Texts that want more than to be read: in a browser's report, in parsers, logs and options."""

import contextlib
import http.server
import io
import json
import re
import shutil
import subprocess
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.problems import addition
from grpo_kernels.training import checkpoint, command_line, logs, report, rewards
from grpo_kernels.training.config import TrainingConfig
from tests.helpers.trainer_runs import config_of, trainer_of

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
# What asks for {url}, or changes the page, where a browser takes it for more than text.
HOSTILE = (
    "<script>document.title='TAKEN'; fetch('{url}/script')</script>",
    "</pre></td></table></body><script src='{url}/src'></script>",
    "<img src='{url}/image' onerror=\"document.title='TAKEN'\">",
    "<svg onload=\"fetch('{url}/svg'); document.title='TAKEN'\"><use href='{url}/use#a'/></svg>",
    "<iframe src='{url}/frame'></iframe><object data='{url}/object'></object>",
    "<style>@import url('{url}/style'); body {{ background: url('{url}/background') }}</style>",
    "<link rel='stylesheet' href='{url}/link'>",
    "<meta http-equiv='refresh' content='0;url={url}/meta'>",
    "\" onmouseover=\"fetch('{url}/attribute')\" style=\"background:url({url}/inline)",
    "<a href=\"javascript:alert()\" autofocus onfocus=\"document.title='TAKEN'\">x</a>",
    "<base href='{url}/'><form action='{url}/form'><input autofocus onfocus=fetch('{url}/focus')>",
    "--><![CDATA[<script>document.title='TAKEN'</script>]]><!--",
    "&lt;script&gt; &#x3c;script&#x3e; \ud800 \x00 \u202e {title} {{body}} $\\frac{{1}}$",
)  # fmt: skip


@pytest.fixture
def canary():
    """A server that nobody should ask, and what it was asked."""
    asked = []

    class Canary(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Canary) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


def hostile_run(folder, tiny_model, url):
    """A run in whose every text something hostile stands."""
    texts = [text.replace("{url}", url) for text in HOSTILE]
    run = trainer_of(config_of(tiny_model, folder, steps=2, eval_size=3, save_every=-1)).train()
    for name in ("samples.jsonl", "answers.jsonl", "metrics.jsonl"):
        rows = [json.loads(line) for line in (run / name).read_text().splitlines()]
        if name != "metrics.jsonl":
            rows = [{**rows[-1]} for _ in texts]
        for row, text in zip(rows, texts, strict=False):
            row |= {key: text for key in ("prompt", "completion", "answer", "level") if key in row}
            row |= {"warnings": texts} if name == "metrics.jsonl" else {}
        (run / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    stored = json.loads((run / "config.json").read_text())
    stored |= {"name": texts[0], "dataset": texts[2], "rewards": texts}
    (run / "config.json").write_text(json.dumps(stored))
    return run, texts


def shown(page, folder):
    """The page as a browser has it after all its scripts, if any, have run."""
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}",
        "--virtual-time-budget=4000", "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium")
@pytest.mark.usefixtures("real_memory", "curves")
def test_a_report_runs_no_script_and_asks_nobody(canary, tiny_model, tmp_path):
    url, asked = canary
    run, texts = hostile_run(tmp_path, tiny_model, url)
    dom = shown(report.write(run)[0], tmp_path / "profile")
    assert "<title>TAKEN" not in dom and "<script" not in dom and "<iframe" not in dom
    assert "<img" not in dom and "onload=" not in dom.replace("&lt;svg onload=", "")
    assert asked == []
    # The browser does ask, where it is let.
    bad = tmp_path / "bad.html"
    bad.write_text("<!doctype html>" + texts[0] + texts[2])
    assert "<title>TAKEN" in shown(bad, tmp_path / "profile")
    assert "/script" in asked and "/image" in asked


LONG = 200_000
ADVERSARIAL = (
    "<answer>" * LONG, "</answer>" * LONG, "<think>" * LONG + "<answer>1</answer>", "\x00" * LONG,
    *(f"<answer>{text}</answer>" for text in (
        "1" * LONG, "1," * LONG, "9" * 4000 + "/" + "7" * 4000, "\u0663" * LONG, "(" * 900,
        "2^" * 400 + "2", "10^10^10^10", "9**9**9**9", "factorial(10**9)",
        "\\binom{10^9}{5\\cdot 10^8}", "\\sqrt{" * 120 + "2" + "}" * 120,
    )),
    "<answer>" + " " * LONG, "<answer>-" + "\n" * LONG + "5</answer>", "<answer>\\frac{" * LONG,
    "\\boxed{" * LONG, "\\boxed{" + "{" * LONG, "}" * LONG, "#### " * LONG, "-" * LONG,
)  # fmt: skip
PARSERS = {**rewards.REWARDS, "addition": addition, "marked": None}


@pytest.mark.parametrize("name", PARSERS)
def test_parsers_are_bounded(name):
    """Seconds for texts that a model under training may well write; none of them is right."""
    for text in ADVERSARIAL:
        start = time.monotonic()
        if name == "marked":
            assert not rewards.is_marked_correct(text, "12345")
            rewards.number_of(text)
        else:
            (value,) = PARSERS[name](["p"], [text], answer=["12345"])
            assert value <= 0.8 if name == "format" else value < 0.6
        assert time.monotonic() - start < 30, text[:40]


def read_answer(text, folder):
    rewards.is_correct(text, "42")
    rewards.marked_answer(text)
    rewards.number_of(text)
    for function in (rewards.answer, rewards.format, addition):
        function(["p"], [text], answer=["42"])


def written(text, path):
    path.write_text(text, encoding="utf-8", errors="replace")
    return path


def read_log(text, folder):
    logs.read(written(text, folder / "metrics.jsonl"))
    logs.open_folder(folder, {}, 3)


def read_state(text, folder):
    """A checkpoint's: of other options, or of none."""
    given = checkpoint.state_of(written(text, folder / "state.json").parent)
    checkpoint.check_same(given, json.loads(json.dumps(vars(TrainingConfig(model="m")))), 1, {})


# What reads texts, and some that it reads as a rule.
READERS = {
    "answer": (read_answer, (
        "<think>6 * 7</think><answer>42</answer>", "so #### 1,042.50", "\\boxed{\\frac{1}{2}}",
        "<answer>-3/4</answer>", "<answer>$42.0</answer>",
    )),
    "yaml": (lambda text, folder: command_line.parse_config(
        ["--config", str(written(text, folder / "run.yaml"))]), (
        "model: m\nsteps: 3\nrewards: [answer]\nlearning_rate: 1e-6\nlora_rank: null\n",
    )),
    "arguments": (lambda text, folder: command_line.parse_config(text.split("\n")[:20]), (
        "--model\nm\n--steps\n3\n--rewards\nanswer\n--beta=0.1\n--chat",
    )),
    "log": (read_log, (
        '{"step": 1, "reward": 0.5}\n{"step": 2, "reward": NaN}\n{"step"', '{"reward": 1}\n[1]\n3',
    )),
    "state": (read_state, (
        '{"step": 1, "best": {}, "config": {"model": "m"}, "processes": 1, "watch": {}}',
    )),
}  # fmt: skip


def texts_like(seeds):
    """Other orders of what the seeds consist of, with any text between, and seeds with an edit."""
    parts = sorted({part for seed in seeds for part in re.findall(r"\w+|\W", seed)})
    places = st.integers(0, max(map(len, seeds)))
    edited = st.builds(
        lambda seed, at, gone, new: seed[:at] + new + seed[at + gone :],
        st.sampled_from(seeds), places, st.integers(0, 6),
        st.sampled_from(parts) | st.text(max_size=4),
    )  # fmt: skip
    shuffled = st.lists(st.sampled_from(parts) | st.text(max_size=8), max_size=40).map("".join)
    return shuffled | edited | st.text()


@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
def test_any_text_is_read_or_refused_in_words(name, data, tmp_path_factory):
    read, seeds = READERS[name]
    text, said = data.draw(texts_like(seeds)), io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            read(text, tmp_path_factory.getbasetemp())
    except (ValueError, TypeError) as error:
        assert str(error)
    except SystemExit as error:
        assert error.code in (0, 2) and said.getvalue()

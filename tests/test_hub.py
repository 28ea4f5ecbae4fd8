"""GSM8K and a model from a hub, end to end, with a miniature hub at a loopback address."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from examples.word_problems import word_problems
from tests.helpers.hub import COMMIT, Hub
from tests.helpers.ranks import ROOT
from tests.helpers.tiny_models import make_tokenizer

MODEL, DATA = "Qwen/Qwen2.5-0.5B-Instruct", "openai/gsm8k"
CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
---
Problems of one or two steps.
"""
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def repositories(tmp_path_factory):
    import datasets
    import transformers

    folder = tmp_path_factory.mktemp("hub")
    config = transformers.Qwen2Config(
        vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, bos_token_id=0, eos_token_id=0,
        pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    model = folder / "models" / MODEL
    transformers.Qwen2ForCausalLM(config).save_pretrained(model)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    data = folder / "datasets" / DATA
    (data / "main").mkdir(parents=True)
    (data / "README.md").write_text(CARD)
    for split, count in (("train", 40), ("test", 12)):
        rows = [{key: row[key] for key in ("question", "answer")}
                for row in word_problems(count, count)]  # fmt: skip
        table = datasets.Dataset.from_list(rows)
        table.to_parquet(str(data / "main" / f"{split}-00000-of-00001.parquet"))
    return folder


@pytest.fixture
def hub(repositories):
    served = Hub(repositories)
    yield served
    served.close()


def train(hub, home, output, *flags, data=f"{DATA}:main", **environment):
    """Runs the example; returns its status and what it printed."""
    run = subprocess.run(
        [sys.executable, "examples/train_gsm8k.py", "--dataset", data, "--model", MODEL, "--chat",
         "--steps", "1", "--prompts_per_step", "2", "--num_generations", "2",
         "--max_completion_length", "4", "--max_prompt_length", "1024", "--eval_size", "4",
         "--output", str(output), *flags],
        cwd=ROOT, capture_output=True, text=True, timeout=200,
        env={**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_TOKEN": "",
             "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", **environment},
    )  # fmt: skip
    return run.returncode, run.stdout + run.stderr


def test_the_whole_way_and_again_from_the_cache(hub, tmp_path):
    home = tmp_path / "home"
    status, told = train(hub, home, tmp_path / "first")
    assert status == 0, told
    rows = [json.loads(x) for x in (tmp_path / "first/gsm8k/answers.jsonl").open()]
    expected = word_problems(12, 12)[:4]
    assert [row["answer"] for row in rows[:4]] == [
        row["answer"].split("#### ")[1] for row in expected
    ]
    for row, problem in zip(rows, expected, strict=False):
        (message,) = row["prompt"]
        assert message["role"] == "user" and message["content"].endswith(problem["question"])
        assert "<<" not in message["content"]
    fetched = [path for command, path in hub.asked if command == "GET" and "/resolve/" in path]
    assert any(path.endswith("model.safetensors") for path in fetched)
    assert any(path.endswith("train-00000-of-00001.parquet") for path in fetched)

    # Again: nothing is fetched twice. And without a hub.
    hub.asked.clear()
    status, told = train(hub, home, tmp_path / "second")
    assert status == 0, told
    assert not [p for c, p in hub.asked if c == "GET" and p.endswith((".safetensors", ".parquet"))]
    hub.close()
    status, told = train(hub, home, tmp_path / "third", HF_HUB_OFFLINE="1")
    assert status == 0, told
    metrics = [(tmp_path / run / "gsm8k/metrics.jsonl").read_text() for run in ("first", "third")]
    first, third = (json.loads(text.splitlines()[0]) for text in metrics)
    assert first["loss"] == third["loss"] and first["grad_norm"] == third["grad_norm"]


def test_a_revision_is_pinned(hub, tmp_path):
    flags = ("--revision", "v1")
    status, told = train(hub, tmp_path / "home", tmp_path, *flags, data=f"{DATA}:main@v1")
    assert status == 0, told
    files = [path for _, path in hub.asked if "/resolve/" in path]
    assert files and all("/v1/" in path or COMMIT["v1"] in path for path in files)


@pytest.mark.parametrize(
    ("fault", "message"),
    (
        ("gated model", "model: 'Qwen/.*accept the terms on its page, then `hf auth login`"),
        ("no model", "model: 'Qwen/.*there is none of this name, or it is private"),
        ("no revision", "model: 'Qwen/.*it has no such revision"),
        ("gated data", "dataset: openai/gsm8k was neither.*accept the terms on its page"),
        (
            "no data",
            "dataset: openai/gsm8k was neither.*there is none of this name, or it is private",
        ),
        (
            "away",
            "(?s)dataset: openai/gsm8k was neither cached nor downloaded.*Without the hub: a .json",
        ),
    ),
)
def test_what_is_not_there_is_said(fault, message, hub, repositories, tmp_path):
    flags = ()
    if fault == "away":
        hub.close()
    elif fault == "no revision":
        flags = ("--revision", "v9")
    elif fault.startswith("gated"):
        hub.gated = {MODEL if fault.endswith("model") else DATA}
    else:
        kind, name = ("models", MODEL) if fault.endswith("model") else ("datasets", DATA)
        other = tmp_path / "hub"
        shutil.copytree(repositories, other)
        shutil.rmtree(other / kind / name)
        hub.folder = other
    status, told = train(hub, tmp_path / "home", tmp_path, *flags)
    assert status != 0 and re.search(message, told), told


def test_a_connection_that_drops_is_tried_again(hub, tmp_path):
    hub.drops = 1
    status, told = train(hub, tmp_path / "home", tmp_path)
    assert status == 0, told

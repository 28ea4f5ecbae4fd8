"""GSM8K and a model from a hub, end to end, with a miniature hub at a loopback address."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from examples.word_problems import word_problems
from tests.helpers.ranks import ROOT
from tests.helpers.tiny_models import make_tokenizer

MODEL, DATA = "Qwen/Qwen2.5-0.5B-Instruct", "openai/gsm8k"
COMMIT = {"main": "a" * 40, "v1": "b" * 40}
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


class Hub:
    """Serves `folder/models/OWNER/NAME` and `folder/datasets/OWNER/NAME`, same at `main` and `v1`.

    It answers what `huggingface_hub` and `datasets` ask for while they download, with the headers
    that the documentation of `huggingface_hub` names. `gated` has names of repositories that want a
    token; `drops` counts down the answers with a file that end in the middle.
    """

    def __init__(self, folder):
        self.folder, self.gated, self.drops, self.asked = folder, set(), 0, []
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(self))
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self.http.shutdown()
        self.http.server_close()

    def answer(self, path, query, body):
        """Status, headers and body."""
        api, kind, name, what, revision, rest = re.fullmatch(
            r"/(api/)?(models/|datasets/)?([^/]+/[^/]+)(?:/([^/]+)/([^/]+)(?:/(.*))?)?/?", path
        ).groups()
        base = self.folder / (kind or "models") / name
        files = {str(x.relative_to(base)): x.read_bytes() for x in base.rglob("*") if x.is_file()}
        if not files:
            return error(404, "RepoNotFound", "Repository not found")
        if name in self.gated and (not api or what == "tree"):
            text = f"Access to {name} is restricted. You must have access to it."
            return error(401, "GatedRepo", text)
        commit = COMMIT.get(revision or "main", revision)
        if commit not in COMMIT.values():
            return error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        headers = {"X-Repo-Commit": commit}
        if not api:
            if rest not in files:
                return error(404, "EntryNotFound", "Entry not found", headers)
            return 200, {**headers, "ETag": f'"{hash_of(files[rest])}"'}, files[rest]
        entries = {
            name: {"type": "file", "path": name, "size": len(data), "oid": hash_of(data)}
            for name, data in files.items()
        }
        for folder in {str(parent) for one in files for parent in Path(one).parents} - {"."}:
            oid = hash_of(folder.encode())
            entries[folder] = {"type": "directory", "path": folder, "size": 0, "oid": oid}
        if what == "tree":
            whole = query.get("recursive", ["false"])[0].lower() == "true"
            found = [
                entry for one, entry in entries.items()
                if (rest or ".") in map(str, Path(one).parents if whole else [Path(one).parent])
            ]  # fmt: skip
            return as_json(found) if found else error(404, "EntryNotFound", f"no {rest}")
        if what == "paths-info":
            wanted = parse_qs(body.decode()).get("paths", [])
            return as_json([entry for one, entry in entries.items() if one in wanted])
        return as_json({
            "_id": "0" * 24, "id": name, "sha": commit, "private": False,
            "gated": "manual" if name in self.gated else False, "disabled": False, "tags": [],
            "downloads": 0, "likes": 0, "lastModified": "2024-01-01T00:00:00.000Z",
            "createdAt": "2024-01-01T00:00:00.000Z", "siblings": [{"rfilename": f} for f in files],
        })  # fmt: skip


def hash_of(data):
    return hashlib.sha1(data).hexdigest()


def as_json(value):
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


def error(status, code, text, headers=None):
    headers = {"X-Error-Code": code, "X-Error-Message": text, **(headers or {})}
    return status, headers, json.dumps({"error": text}).encode()


def handler_of(hub):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            url = urlsplit(self.path)
            path = unquote(url.path)
            hub.asked.append((self.command, path))
            status, headers, data = hub.answer(path, parse_qs(url.query), body)
            size = len(data)
            if hub.drops and self.command == "GET" and "/resolve/" in path and status == 200:
                hub.drops -= 1
                data, self.close_connection = data[: size // 2], True
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(size)}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_HEAD = do_POST = do_GET

        def log_message(self, *_):
            pass

    return Handler


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


def train(hub, home, output, data=f"{DATA}:main", *flags, **environment):
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


@pytest.mark.nightly
def test_the_whole_way_and_again_from_the_cache(hub, tmp_path):
    home, pinned = tmp_path / "home", (f"{DATA}:main@v1", "--revision", "v1")
    hub.drops = 1  # and is tried again
    status, told = train(hub, home, tmp_path / "first", *pinned)
    assert status == 0 and hub.drops == 0, told
    rows = [json.loads(x) for x in (tmp_path / "first/gsm8k/answers.jsonl").open()]
    for row, problem in zip(rows, word_problems(12, 12)[:4], strict=False):
        assert row["answer"] == problem["answer"].split("#### ")[1]
        (message,) = row["prompt"]
        assert message["role"] == "user" and message["content"].endswith(problem["question"])
        assert "<<" not in message["content"]
    files = [path for _, path in hub.asked if "/resolve/" in path]
    assert files and all("/v1/" in path or COMMIT["v1"] in path for path in files)

    # Again: nothing is fetched twice. And without a hub.
    hub.asked.clear()
    status, told = train(hub, home, tmp_path / "second", *pinned)
    assert status == 0, told
    assert not [p for c, p in hub.asked if c == "GET" and p.endswith((".safetensors", ".parquet"))]
    hub.close()
    status, told = train(hub, home, tmp_path / "third", *pinned, HF_HUB_OFFLINE="1")
    assert status == 0, told
    metrics = [(tmp_path / run / "gsm8k/metrics.jsonl").read_text() for run in ("first", "third")]
    first, third = (json.loads(text.splitlines()[0]) for text in metrics)
    assert first["loss"] == third["loss"] and first["grad_norm"] == third["grad_norm"]


@pytest.mark.parametrize(
    ("fault", "message"),
    (
        ("gated model", "model: 'Qwen/.*accept the terms on its page, then `hf auth login`"),
        ("no model", "model: 'Qwen/.*there is none of this name, or it is private"),
        ("no revision", "model: 'Qwen/.*it has no such revision"),
        ("gated data", "dataset: openai/gsm8k was neither.*accept the terms on its page"),
        ("no data", "dataset: openai/gsm8k was neither.*there is none of this name, or it is"),
        pytest.param(  # which waits for it
            "away",
            "(?s)dataset: openai/gsm8k was neither cached.*Without the hub: a .json",
            marks=pytest.mark.nightly,
        ),
    ),
)
def test_what_is_not_there_is_said(fault, message, hub, repositories, tmp_path):
    flags = (f"{DATA}:main", "--revision", "v9") if fault == "no revision" else ()
    kind, name = ("models", MODEL) if fault.endswith("model") else ("datasets", DATA)
    if fault == "away":
        hub.close()
    elif fault.startswith("gated"):
        hub.gated = {name}
    elif fault != "no revision":
        hub.folder = shutil.copytree(repositories, tmp_path / "hub")
        shutil.rmtree(hub.folder / kind / name)
    status, told = train(hub, tmp_path / "home", tmp_path, *flags)
    assert status != 0 and re.search(message, told), told

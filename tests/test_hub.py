"""Models and datasets of a hub: what is asked for, and what is said where there is none.

The hub is a miniature at a loopback address, with the headers that `huggingface_hub` documents.
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from grpo_kernels.training import TrainingConfig, load_problems, rewards

ROOT = Path(__file__).parents[1]
COMMIT = "b" * 40
# By a part of the path.
REFUSALS = {
    "gated": (401, "GatedRepo", "Access is restricted. You must have access to it."),
    "nobody": (404, "RepoNotFound", "Repository not found"),
    "v9": (404, "RevisionNotFound", "Invalid rev id: v9"),
}
# Loads models and datasets; prints of each the number of weights or problems, or the error.
LOAD = """
import json, sys
from grpo_kernels.training import TrainingConfig, load_model, load_problems
for options in json.loads(sys.argv[1]):
    try:
        if "dataset" in options:
            print(len(load_problems(TrainingConfig(model="m", **options))[0]))
        else:
            print(sum(p.numel() for p in load_model(TrainingConfig(**options))[0].parameters()))
    except Exception as error:
        print(" ".join(f"{type(error).__name__}: {error}".split()))
"""


@pytest.fixture
def hub(tiny_model):
    """An address, what was asked there, and a list whose length is the answers to break off."""
    asked, drops = [], []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self):
            asked.append((self.command, self.path))
            status, code, text = 404, "EntryNotFound", "Entry not found"
            for part, refusal in REFUSALS.items():
                if part in self.path:
                    status, code, text = refusal
            headers, data = {"X-Error-Code": code, "X-Error-Message": text}, b""
            file = tiny_model / self.path.split("/")[-1]
            if "/resolve/" in self.path and code == "EntryNotFound" and file.is_file():
                status, data = 200, file.read_bytes()
                headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
            self.send_response(status)
            headers |= {"X-Repo-Commit": COMMIT, "Content-Length": str(len(data))}
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET" and data and drops:
                drops.pop()
                data, self.close_connection = data[: len(data) // 2], True
            if self.command == "GET":
                self.wfile.write(data)

        do_GET = do_HEAD

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked, drops
        server.shutdown()


def loaded(url, home, *options):
    """What comes of loading these, line by line, in a process of its own."""
    run = subprocess.run(
        [sys.executable, "-c", LOAD, json.dumps(options)],
        cwd=ROOT, capture_output=True, text=True, timeout=200,
        env={**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(home), "HF_TOKEN": "",
             "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


@pytest.mark.slow
def test_a_connection_that_drops_is_tried_again_and_a_revision_is_pinned(hub, tmp_path):
    url, asked, drops = hub
    drops.extend("xx")
    model = {"model": "tiny/model", "revision": "v1"}
    (weights,) = loaded(url, tmp_path, model)
    assert weights.isdigit() and not drops
    fetched = [path for command, path in asked if command == "GET" and "/resolve/" in path]
    assert any(path.endswith("model.safetensors") for path in fetched)
    assert all("/v1/" in path or COMMIT in path for path in fetched)
    asked.clear()
    assert loaded(url, tmp_path, model) == [weights]  # from the cache
    assert not [path for command, path in asked if command == "GET" and ".safetensors" in path]


@pytest.mark.slow
def test_what_is_not_there_is_said(hub, tmp_path):
    url, _, _ = hub
    cases = (
        ({"model": "gated/model"}, "accept the terms on its page, then `hf auth login`"),
        ({"model": "nobody/model"}, "there is none of this name, or it is private"),
        ({"model": "tiny/model", "revision": "v9"}, "it has no such revision"),
        ({"dataset": "gated/data:main"}, "accept the terms on its page"),
        ({"dataset": "nobody/data:main"}, "there is none of this name, or it is private"),
    )
    said = loaded(url, tmp_path, *(options for options, _ in cases))
    for line, (options, message) in zip(said, cases, strict=True):
        assert options.get("model", "data") in line and message in line, line
        assert "Without the hub: " in line


def test_without_a_hub_it_says_what_works(monkeypatch):
    import datasets

    def offline(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(ConnectionError, match=r"no route to host\. Without the hub: a \.jsonl"):
        load_problems(TrainingConfig(model="m", dataset="openai/gsm8k:main"))


def test_gsm8k_as_the_hub_has_it(monkeypatch):
    import datasets

    split = datasets.Dataset.from_list([{"question": "q", "answer": "2+2\n#### 1,234"}] * 3)
    asked = []
    monkeypatch.setattr(
        datasets, "load_dataset",
        lambda *args, **options: asked.append((args, options)) or {"train": split, "test": split},
    )  # fmt: skip
    config = TrainingConfig(model="m", dataset="openai/gsm8k:main@v1", train_size=2)
    train, test = load_problems(config)
    assert all(args == ("openai/gsm8k", "main") for args, _ in asked)
    assert asked and all(options["revision"] == "v1" for _, options in asked)
    assert len(train) == 2 and len(test) == 3 and train[0]["answer"] == "1,234"
    assert rewards.is_correct("<answer>1234</answer>", train[0]["answer"])

"""Answers of a hub without a model or dataset, or one that keeps it, in words that help.

The hub is a server at a loopback address; everything between is `huggingface_hub`, `datasets` and
`transformers`.
"""

import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.helpers.ranks import ROOT

pytestmark = pytest.mark.slow
MISSING = {
    "model: 'gated/a'.*accept the terms on its page, then `hf auth login`": {"model": "gated/a"},
    "model: 'no/a'.*there is none of this name, or it is private": {"model": "no/a"},
    "model: 'old/a@v9'.*it has no such revision": {"model": "old/a@v9"},
    "dataset: gated/b was neither.*accept the terms on its page": {"dataset": "gated/b"},
    "dataset: no/b was neither.*none of this name.*Without the hub: a .json": {"dataset": "no/b"},
    "dataset: old/b was neither": {"dataset": "old/b:main@v9"},
}
CODES = {"gated": (401, "GatedRepo"), "no": (404, "RepoNotFound"), "old": (404, "RevisionNotFound")}
ABOUT = {
    "_id": "0" * 24, "sha": "a" * 40, "private": False, "gated": "manual", "disabled": False,
    "tags": [], "downloads": 0, "likes": 0, "siblings": [],
}  # fmt: skip
ASKED = []


class Hub(BaseHTTPRequestHandler):
    def do_GET(self):
        ASKED.append(self.path)
        owner, name = re.search(r"(\w+)/([ab])\b", self.path).groups()
        status, code = CODES[owner]
        # That there is a gated dataset is no secret.
        body = {"error": code}
        if re.fullmatch("/api/datasets/gated/b(/revision/.*)?", self.path):
            status, body = 200, {**ABOUT, "id": f"{owner}/{name}"}
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(json.dumps(body).encode())

    do_HEAD = do_POST = do_GET

    def log_message(self, *_):
        pass


def test_what_is_not_there_is_said(tmp_path):
    code = (
        "from grpo_kernels.training import TrainingConfig, load_model, load_problems\n"
        f"for options in {[*MISSING.values()]}:\n"
        "    load = load_problems if 'dataset' in options else load_model\n"
        "    try: load(TrainingConfig(**{'model': 'm', **options}))\n"
        "    except OSError as error: print('REFUSED', error)\n"
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200,
            env={**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(tmp_path), "HF_TOKEN": "",
                 "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"},
        )  # fmt: skip
        server.shutdown()
    assert done.returncode == 0, done.stderr
    for message, said in zip(MISSING, done.stdout.split("REFUSED ")[1:], strict=True):
        assert re.match(message, said), said
    for name in ("old/a", "old/b"):  # the revision that is wanted
        assert any(name in path and "v9" in path for path in ASKED)

"""`Hub`: a model hub at a loopback address, for `HF_ENDPOINT`, with a tiny model and a dataset.

It answers what `huggingface_hub` and `datasets` ask for while they download: what a repository is,
which files a revision has, and the files, with the headers that the documentation of
`huggingface_hub` names (`X-Repo-Commit`, `ETag`, `X-Error-Code`).
"""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = {"main": "a" * 40, "v1": "b" * 40}
_KINDS = {"models": "", "datasets": "datasets/"}


class Hub:
    """Serves `folder/models/OWNER/NAME` and `folder/datasets/OWNER/NAME`, same at `main` and `v1`.

    `gated` has names of repositories that want a token; `drops` counts down the answers with a file
    that end in the middle.
    """

    def __init__(self, folder):
        self.folder, self.gated, self.drops, self.asked = Path(folder), set(), 0, []
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self.http.shutdown()
        self.http.server_close()

    def files(self, kind, name):
        base = self.folder / kind / name
        return {str(path.relative_to(base)): path for path in base.rglob("*") if path.is_file()}

    def find(self, path):
        """Kind and name of the repository that a path is about, and the rest of it."""
        parts = path.strip("/").split("/")
        api = parts[0] == "api"
        parts = parts[1:] if api else parts
        kind = parts.pop(0) if parts[0] in _KINDS else "models"
        return api, kind, "/".join(parts[:2]), parts[2:]

    def answer(self, path, query, body):
        """Status, headers and body."""
        api, kind, name, rest = self.find(path)
        if not self.files(kind, name):
            return _error(404, "RepoNotFound", "Repository not found")
        if name in self.gated and (not api or rest[:1] == ["tree"]):
            text = f"Access to {kind[:-1]} {name} is restricted. You must have access to it."
            return _error(401, "GatedRepo", text)
        revision = rest[1] if len(rest) > 1 else "main"
        commit = COMMIT.get(revision, revision)
        if commit not in COMMIT.values():
            return _error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = self.files(kind, name)
        if not api:
            return self.file(files, "/".join(rest[2:]), commit)
        folders = {str(parent) for one in files for parent in Path(one).parents} - {"."}
        entries = {one: _entry(one, path) for one, path in files.items()}
        entries |= {one: {"type": "directory", "path": one, "size": 0, "oid": _hash(one.encode())}
                    for one in folders}  # fmt: skip
        if rest[:1] == ["tree"]:
            inside = "/".join(rest[2:]) or "."
            found = [one for one in entries if inside in map(str, Path(one).parents)]
            if not found:
                return _error(404, "EntryNotFound", f"{inside} does not exist on {revision}")
            whole = query.get("recursive", ["false"])[0].lower() == "true"
            return _json([entries[one] for one in found
                          if whole or str(Path(one).parent) == inside])  # fmt: skip
        if rest[:1] == ["paths-info"]:
            wanted = parse_qs(body.decode()).get("paths", [])
            return _json([entries[one] for one in entries if one in wanted])
        return _json({
            "_id": "0" * 24, "id": name, "sha": commit, "private": False,
            "gated": "manual" if name in self.gated else False, "disabled": False, "tags": [],
            "downloads": 0, "likes": 0, "lastModified": "2024-01-01T00:00:00.000Z",
            "createdAt": "2024-01-01T00:00:00.000Z", "siblings": [{"rfilename": f} for f in files],
        })  # fmt: skip

    def file(self, files, name, commit):
        if name not in files:
            return _error(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": commit})
        data = files[name].read_bytes()
        return 200, {"X-Repo-Commit": commit, "ETag": f'"{_hash(data)}"'}, data


def _hash(data):
    return hashlib.sha1(data).hexdigest()


def _entry(name, path):
    data = path.read_bytes()
    return {"type": "file", "path": name, "size": len(data), "oid": _hash(data)}


def _json(value):
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


def _error(status, code, text, more=None):
    headers = {"X-Error-Code": code, "X-Error-Message": text, **(more or {})}
    return status, headers, json.dumps({"error": text}).encode()


def _handler_of(hub):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self):
            self.reply(b"")

        def do_GET(self):
            self.reply(b"")

        def do_POST(self):
            self.reply(self.rfile.read(int(self.headers["Content-Length"])))

        def reply(self, body):
            url = urlsplit(self.path)
            path, query = unquote(url.path), parse_qs(url.query)
            hub.asked.append((self.command, path))
            status, headers, data = hub.answer(path, query, body)
            size = len(data)
            if hub.drops and self.command == "GET" and "/resolve/" in path and status == 200:
                hub.drops -= 1
                data, self.close_connection = data[: size // 2], True
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(size))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, *_):
            pass

    return Handler

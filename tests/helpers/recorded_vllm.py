"""`RecordedServer`: answers over HTTP what vLLM's servers answered, and fails as they can.

`vllm_recording.json` has the answers, and `record_vllm.py` how they were got.
"""

import copy
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

from grpo_kernels.integrations import vllm as extension
from tests.helpers.record_vllm import RECORDING, without_tags

# A clock whose seconds are hundredths.
quick_time = SimpleNamespace(
    monotonic=lambda: 100 * time.monotonic(), sleep=lambda s: time.sleep(s / 100)
)
SAMPLES = ("/v1/completions", "/inference/v1/generate")


def recorded(server="default", name=None):
    """The exchanges of a server, of one name or of all."""
    exchanges = json.loads(RECORDING.read_text())["exchanges"]
    return [x for x in exchanges if x["server"] == server and name in (None, x["name"])]


class RecordedServer:
    """A server at `url`, on a port of its own, that keeps the requests it gets.

    Args:
        server: which of the recorded ones, `default` say.
        about: values of the engine in which it is another.
    """

    def __init__(self, server="default", **about):
        self.exchanges, self.changes, self.sent = recorded(server), about, ""
        self.requests, self.unknown = [], []
        self.loads = []  # of each, the shapes of the weights by their names
        self.delays = {}  # seconds until the next answers, a list by path
        self.refuses = {}  # names of exchanges whose answer is the next one, a list by path
        self.restarts = 0  # times that it is started again while it samples
        self.dies: bool  # at the next sampling, as one whose engine's process ended
        self.any_seed = False  # whether samples answer to other seeds than were recorded
        self.at_once = self.most_at_once = self.port = 0
        self.lock, self.http = threading.Lock(), None
        self.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        """Listens, at the port that it had before."""
        self.dies = False
        self.http = ThreadingHTTPServer(("127.0.0.1", self.port), handler_of(self))
        self.port = self.http.server_port
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self):
        """Ends, and with it the weights that it was sent."""
        with self.lock:
            http, self.http, self.sent = self.http, None, ""
        if http is not None:
            http.shutdown()
            http.server_close()

    def asked(self, path):
        """The bodies of the requests to a path."""
        return [body for where, body in self.requests if where == path]

    def answer(self, path, body):
        """Status and answer to a request, as recorded."""
        with self.lock:
            self.requests.append((path, body))
            if path in SAMPLES and self.sent and self.restarts:
                self.restarts, self.sent = self.restarts - 1, ""
            refusal = self.refuses[path].pop(0) if self.refuses.get(path) else None
        if path in SAMPLES and self.dies:
            self.stop()
            refusal = "engine died"
        if refusal:
            return self.said(refusal)
        if path == "/collective_rpc" and self.find("load"):
            return getattr(self, body["method"])(*body["args"])
        wanted = self.plain(body) if path in SAMPLES else None
        for one in self.exchanges:
            if one["path"] == path and wanted in (None, self.plain(one["request"])):
                return one["status"], one["answer"]
        self.unknown.append((path, body))
        return 599, "nothing was recorded for this request"

    def plain(self, request):
        """What a request is recognized by."""
        body = json.loads(without_tags(json.dumps(request)))
        for part in (body, (body or {}).get("sampling_params")) if self.any_seed else ():
            if part:
                part.pop("seed", None)
        return body

    def grpo_kernels_about(self):
        status, answer = copy.deepcopy(self.said("start", path="/collective_rpc"))
        answer["results"][0] |= {"sent": self.sent, **self.changes}
        return status, answer

    def grpo_kernels_load(self, folder, count, tag):
        loaded = {name: list(weight.shape) for name, weight in extension.read(folder)}
        self.loads.append(loaded)
        self.sent = tag if len(loaded) == int(count) else ""
        return self.said("load" if self.sent else "wrong count", path="/collective_rpc")

    def find(self, name, **wanted):
        """The first exchange of a name, or of any, with these values; None without one."""
        for one in self.exchanges:
            if name in (None, one["name"]) and all(one[k] == v for k, v in wanted.items()):
                return one
        return None

    def said(self, name, **wanted):
        one = self.find(name, **wanted)
        return one["status"], one["answer"]


def handler_of(server):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            length = int(self.headers["Content-Length"] or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            with server.lock:
                server.at_once += self.path in SAMPLES
                server.most_at_once = max(server.most_at_once, server.at_once)
                delay = server.delays.get(self.path, [])
                delay = delay.pop(0) if delay else 0
            time.sleep(delay)
            status, answer = server.answer(self.path, body)
            with server.lock:
                server.at_once -= self.path in SAMPLES
            text = answer if isinstance(answer, str) else json.dumps(answer)
            data = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, *_):
            pass

    return Handler

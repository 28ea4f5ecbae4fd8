"""`RecordedServer`: answers over HTTP what vLLM's servers answered, and fails as they can.

`vllm_recording.json` has the answers, and `record_vllm.py` how they were got.
"""

import copy
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from accelerate import Accelerator

from grpo_kernels.integrations import vllm as extension
from grpo_kernels.training import TrainingConfig, load_model
from grpo_kernels.training.rollout import SamplingParams
from grpo_kernels.training.vllm_rollout import VLLMRollout
from tests.helpers.tiny_models import make_model, make_tokenizer

RECORDING = Path(__file__).with_name("vllm_recording.json")
COMPLETIONS = "/v1/completions"
PROMPTS = ("12+34=", "7+5=", "90+1=")
SAMPLING = SamplingParams(8)
MASKED = SamplingParams(8, top_k=20, top_p=0.9, record_support=True)
MASKS = {"top_k": MASKED.top_k, "top_p": MASKED.top_p}


def make_folder(folder):
    """The tiny model in a size that vLLM has a CPU kernel for."""
    make_model("llama", head_dim=32).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def config_for(model, **options):
    """The config of a run whose requests are recorded, and replayed in tests."""
    defaults = dict(
        model=str(model), dataset="examples.problems:additions", rewards=["noise"],
        eval_size=0, prompts_per_step=4, num_generations=4, max_prompt_length=32,
        max_completion_length=8, rollout="vllm", vllm_mode="server",
    )  # fmt: skip
    return TrainingConfig(**{**defaults, **options})


def rollout_of(config):
    return VLLMRollout(config, *load_model(config), Accelerator())


def prompts_of(rollout):
    return [rollout.tokenizer(text).input_ids for text in PROMPTS]


def sample(rollout, sampling=SAMPLING, count=4):
    """Completions of the prompts, whose seeds are drawn anew."""
    torch.manual_seed(0)
    return rollout(prompts_of(rollout), count, sampling)


class RecordedServer:
    """A server at `url`, on a port of its own, that keeps the requests it gets.

    Args:
        server: which of the recorded ones, `default` or `masks`.
        about: values of the engine in which it is another.
    """

    def __init__(self, server="default", **about):
        exchanges = json.loads(RECORDING.read_text())["exchanges"]
        self.exchanges = [x for x in exchanges if x["server"] == server]
        self.about, self.sent, self.requests, self.unknown = about, "", [], []
        self.loads = []  # of each, the shapes of the weights by their names
        # Lists by path of what the next requests meet: functions of the server, which may return
        # the status and the answer to give.
        self.faults = {}
        self.at_once = self.most_at_once = self.port = 0
        self.lock = threading.Lock()
        self.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def start(self):
        """Listens, at the port that it had before."""
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

    def answer(self, path, body):
        """Status and answer to a request, as recorded."""
        with self.lock:
            self.requests.append((path, body))
            fault = self.faults[path].pop(0) if self.faults.get(path) else None
        if (refusal := fault and fault(self)) is not None:
            return refusal
        if path == "/health":
            return 200, None
        if path == "/collective_rpc" and body["method"] == "grpo_kernels_load":
            folder, count, tag = body["args"]
            self.loads.append({name: list(w.shape) for name, w in extension.read(folder)})
            self.sent = tag if len(self.loads[-1]) == int(count) else ""
            return 200, {"results": [{}]}
        for one in self.exchanges:
            if one["path"] == path and one["request"] == body:
                answer = copy.deepcopy(one["answer"])
                if path == "/collective_rpc":
                    answer["results"][0] |= {"sent": self.sent, **self.about}
                return 200, answer
        self.unknown.append((path, body))
        return 599, "nothing was recorded for this request"


def handler_of(server):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            length = int(self.headers["Content-Length"] or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            with server.lock:
                server.at_once += 1
                server.most_at_once = max(server.most_at_once, server.at_once)
            status, answer = server.answer(self.path, body)
            with server.lock:
                server.at_once -= 1
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, *_):
            pass

    return Handler

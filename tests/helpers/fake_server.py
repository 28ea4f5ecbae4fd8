"""An HTTP server that answers as `vllm serve` does, by a model of transformers.

Of vLLM's answers it has the fields that a teacher's scores are read from.
"""

import base64
import io
import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class Teacher:
    """The model. `asked` are the requests, `change` may change an answer."""

    def __init__(self, folder):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.asked, self.change, self.status = [], lambda answer: answer, 200

    def answer(self, path, body):
        self.asked.append((path, body))
        if path == "/tokenize":
            return {"tokens": self.tokenizer(body["prompt"]).input_ids}
        if path == "/v1/completions":
            top = body["prompt_logprobs"]
            rows = [self.prompt_logprobs(ids, top) for ids in body["prompt"]]
            choices = [{"index": i, "prompt_logprobs": x} for i, x in enumerate(rows)]
            return {"choices": choices[::-1]}
        assert path == "/inference/v1/generate"
        rows = self.prompt_token_id_logprobs(body["token_ids"], body["sampling_params"])
        return {"prompt_token_id_logprobs": encoded(rows)}

    @torch.no_grad()
    def logps(self, ids):
        """Log-probs `[T, V]` of what follows each of the ids."""
        return self.model(torch.tensor([ids])).logits[0].double().log_softmax(-1).float()

    def prompt_logprobs(self, ids, top):
        rows = [None]
        for token, logps in zip(ids[1:], self.logps(ids)[:-1], strict=True):
            likeliest = logps.topk(top).indices.tolist()
            rows.append({str(i): {"logprob": float(logps[i])} for i in (token, *likeliest)})
        return rows

    def prompt_token_id_logprobs(self, ids, sampling):
        start, wanted = sampling["prompt_logprob_start"], sampling["prompt_logprob_token_ids"]
        assert len(wanted) == len(ids) - 1 - start  # vLLM refuses any other number of rows
        logps, wanted = self.logps(ids)[start:-1], torch.tensor(wanted)
        return logps.gather(1, wanted.clamp(min=0)).masked_fill(wanted < 0, -torch.inf).numpy()


def encoded(array):
    """The .npy file of an array in base64."""
    with io.BytesIO() as buffer:
        np.save(buffer, array, allow_pickle=False)
        return base64.b64encode(buffer.getvalue()).decode()


def decoded(text):
    """The array of `encoded`."""
    return np.load(io.BytesIO(base64.b64decode(text)))


@contextmanager
def serving(teacher):
    """The address of a server that asks `teacher.answer`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = teacher.change(teacher.answer(self.path, body))
            self.send_response(teacher.status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_):
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128

    server = Server(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("no_proxy", "127.0.0.1")
            yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()

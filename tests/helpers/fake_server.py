"""An HTTP server that answers as `vllm serve` does, by a model of transformers.

The fields are those of vLLM 0.32's answers; `tests/vllm` compares them with a real server's.
"""

import base64
import io
import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = {
    "id": "teacher", "object": "model", "created": 0, "owned_by": "vllm", "root": "teacher",
    "parent": None, "max_model_len": 512, "permission": [],
}  # fmt: skip
USAGE = {"prompt_tokens": 0, "total_tokens": 0, "completion_tokens": 0}


class Teacher:
    """The model. `asked` are the requests, `change` may change an answer."""

    def __init__(self, folder):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.asked, self.change, self.status = [], lambda path, answer: answer, 200

    def answer(self, path, body):
        self.asked.append((path, body))
        if path == "/v1/models":
            return {"object": "list", "data": [MODEL]}
        assert body["model"] == MODEL["id"]
        if path == "/tokenize":
            tokens = self.tokenizer(body["prompt"]).input_ids
            return {
                "count": len(tokens), "max_model_len": 512, "tokens": tokens, "token_strs": None
            }  # fmt: skip
        if path == "/v1/completions":
            choices = [
                {"index": i, "text": "", "logprobs": None, "finish_reason": "length",
                 "stop_reason": None, "token_ids": None, "prompt_token_ids": None,
                 "prompt_logprobs": self.prompt_logprobs(ids, body["prompt_logprobs"])}
                for i, ids in enumerate(body["prompt"])
            ]  # fmt: skip
            return {
                "id": "cmpl-0", "object": "text_completion", "created": 0, "model": MODEL["id"],
                "choices": choices, "usage": USAGE,
            }  # fmt: skip
        assert path == "/inference/v1/generate"
        rows = self.prompt_token_id_logprobs(body["token_ids"], body["sampling_params"])
        return {"request_id": "0", "choices": [], "prompt_token_id_logprobs": encoded(rows)}

    @torch.no_grad()
    def logps(self, ids):
        """Log-probs `[T, V]` of what follows each of the ids."""
        return self.model(torch.tensor([ids])).logits[0].double().log_softmax(-1).float()

    def prompt_logprobs(self, ids, top):
        rows = [None]
        for token, logps in zip(ids[1:], self.logps(ids)[:-1], strict=True):
            order = logps.argsort(descending=True).tolist()
            rows.append({
                str(i): {"logprob": float(logps[i]), "rank": order.index(i) + 1,
                         "decoded_token": self.tokenizer.decode(i)}
                for i in (token, *order[:top])
            })  # fmt: skip
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


@contextmanager
def serving(teacher):
    """The address of a server that asks `teacher.answer`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply(None)

        def do_POST(self):
            self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def reply(self, body):
            answer = teacher.change(self.path, teacher.answer(self.path, body))
            self.send_response(teacher.status)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()

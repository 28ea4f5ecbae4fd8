"""On-policy distillation from a teacher that a vLLM server runs, in one loop to read.

    vllm serve TEACHER --max-logprobs 16        # in one terminal
    python distill_served.py --model STUDENT    # in another: a model with the teacher's tokenizer

The student samples, the server scores these tokens, and the loss is a KL over K ids per token, in
which all other ids count as one more. The ids are the teacher's likeliest or the student's:

    --ids teacher    KL(teacher || student), by `prompt_logprobs`, which every vLLM has
    --ids student    KL(student || teacher), by `prompt_logprob_token_ids`: vLLM 0.32 or newer on a
                     GPU, started with --enable-scale-out
    --columns FILE   KL(teacher || student) without a server: each line of the JSONL file has
                     `prompt_ids [P]`, `completion_ids [T]`, and for each token of the completion
                     ids and the teacher's log-probs, `teacher_ids` and `teacher_logps [T][K]`

The server scores prompts at temperature 1, so the student samples and is scored at 1. Task and
sampling are those of `distill.py`: the teacher sees answered questions, the student a question
alone. A better teacher needs no answers: set `SHOWN = ""`.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import torch
from distill import BATCH, HELD_OUT, SHOWN, SUM, SUMS, accuracy, completions_of, loaded
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo_kernels import LMHead, linear_logprobs, topk_kl
from grpo_kernels.integrations.hf_head import head_of
from grpo_kernels.reference import linear_logits

Ids = Sequence[list[int]]
Scores = list[dict[int, float]]  # for each token of a completion, log-probs by id
START = (
    "Start the teacher by `vllm serve TEACHER --max-logprobs K`, K as in --top, and pass its "
    "address as --server. --ids student needs vLLM 0.32 or newer on a GPU, and --enable-scale-out."
)
COLUMNS = ("prompt_ids", "completion_ids", "teacher_ids", "teacher_logps")


def ask(address: str, path: str, **body: Any) -> dict[str, Any]:
    """The server's answer to a request in JSON."""
    url, data = address.rstrip("/").removesuffix("/v1") + path, json.dumps(body).encode()
    try:
        request = Request(url, data, {"Content-Type": "application/json"})
        with urlopen(request, timeout=600) as answer:
            content = json.load(answer)
            if not isinstance(content, dict):
                raise ValueError(f"expected a JSON object; got {content!r}")
            return content
    except (OSError, HTTPException, ValueError) as error:  # of the network, HTTP, URL or JSON
        said = error.read().decode(errors="replace") if isinstance(error, HTTPError) else ""
        raise ConnectionError(f"{url}: {error!r} {said}\n{START}") from None


def likeliest_of_teacher(address: str, top: int, prompts: Ids, completions: Ids) -> list[Scores]:
    """The likeliest ids of each token of the completions: `top`, or one more."""
    both = [a + b for a, b in zip(prompts, completions, strict=True)]
    answer = ask(address, "/v1/completions", prompt=both, max_tokens=1, prompt_logprobs=top)
    rows_of = {x["index"]: x.get("prompt_logprobs") or [] for x in answer.get("choices") or []}
    scores = []
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        # None for the prompt's first token; for each other one a dict of the likeliest ids and of
        # the token itself, whether or not it is among them.
        rows = rows_of.get(i, [])[len(prompt) :]
        scored = [str(token) in row for token, row in zip(completion, rows, strict=False)]
        if len(rows) != len(completion) or not all(scored):
            raise ValueError(f"{address} has not scored the tokens that it was sent. {START}")
        scores.append([{int(i): x["logprob"] for i, x in row.items()} for row in rows])
    return scores


def teacher_at(address: str, prompts: Ids, completions: Ids, ids: Tensor) -> Tensor:
    """The teacher's log-probs `[N, K]` of these ids of the completions' N tokens."""

    def one(prompt: list[int], completion: list[int], ids: Tensor) -> Tensor:
        # Row i is for the token at `prompt_logprob_start + i + 1`.
        start, wanted = len(prompt) - 1, ids.tolist()
        sampling = dict(prompt_logprob_start=start, prompt_logprob_token_ids=wanted, max_tokens=1)
        body = dict(token_ids=prompt + completion, sampling_params=sampling)
        answer = ask(address, "/inference/v1/generate", **body).get("prompt_token_id_logprobs")
        scores = np.load(io.BytesIO(base64.b64decode(answer))) if answer else np.empty(0)  # float32
        if scores.shape != tuple(ids.shape):
            raise ValueError(f"{address} ignores prompt_logprob_token_ids. {START}")
        return torch.from_numpy(scores)

    # A request has one prompt: the server makes a batch of those that it gets together.
    with ThreadPoolExecutor(BATCH) as pool:
        rows = ids.split([len(x) for x in completions])
        return torch.cat([*pool.map(one, prompts, completions, rows)])


def read_columns(path: str) -> list[tuple[list[int], list[int], Scores]]:
    """The prompt, the completion and its scores, for each line of the file."""
    rows = []
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                prompt, completion, ids, logps = map(json.loads(line).__getitem__, COLUMNS)
                pairs = zip(completion, ids, logps, strict=True)
                scores = [dict(zip(a, map(float, b), strict=True)) for _, a, b in pairs]
                if not (prompt and completion and all(scores)):
                    raise ValueError("an empty list")
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                where = f"{path}, line {number}: {error!r}"
                raise ValueError(f"{where}; expected the columns {COLUMNS}") from None
            rows.append((prompt, completion, scores))
    if not rows:
        raise ValueError(f"{path} is empty")
    return rows


def as_tensors(scores: Sequence[Scores]) -> tuple[Tensor, Tensor]:
    """Ids and log-probs `[N, K]`; -inf where a token has fewer ids than others."""
    tokens = [token for of_completion in scores for token in of_completion]
    ids = [torch.tensor([*token]) for token in tokens]
    logps = [torch.tensor([*token.values()]) for token in tokens]
    return pad_sequence(ids, True), pad_sequence(logps, True, -torch.inf)


def states_of(model: Any, prompts: Ids, completions: Ids) -> Tensor:
    """The hidden states `[N, H]` that predict the completions' N tokens."""
    both = [torch.tensor(a + b) for a, b in zip(prompts, completions, strict=True)]
    # Padding is behind the tokens, which do not see it.
    states = model.base_model(pad_sequence(both, True).to(model.device)).last_hidden_state
    rows = zip(states, prompts, completions, strict=True)
    return torch.cat([x[len(a) - 1 : len(a + b) - 1] for x, a, b in rows])


def kl_of(states: Tensor, head: LMHead, ids: Tensor, of_teacher: Tensor, direction: str) -> Tensor:
    """The KL `[N]` over K ids and the rest, from the student's states `[N, H]`."""
    mass = of_teacher.exp().sum(-1)
    if not (mass < 1.001).all():  # finds logits, unless all of them are far below 0
        raise ValueError(
            f"the teacher's probabilities of a token add up to {mass.max():.4g}: its numbers are "
            "not log-probs at temperature 1 (start vLLM without --logprobs-mode raw_logits)"
        )
    logps = linear_logprobs(states, head, ids).logps  # of the softmax over the whole vocabulary
    # Ids without a number of the teacher's are part of the rest, for both.
    logps = logps.masked_fill(of_teacher.isneginf(), -torch.inf)
    return topk_kl(logps, of_teacher, direction=direction)


def main(argv: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--server", default="http://localhost:8000")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--ids", choices=("teacher", "student"), default="teacher")
    source.add_argument("--columns", metavar="FILE")
    parser.add_argument("--top", type=int, default=16, metavar="K", help="ids per token")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    tokenizer, student, optimizer = loaded(args.model, args.learning_rate)
    if args.columns:
        stored = read_columns(args.columns)
    elif ask(args.server, "/tokenize", prompt=SUM).get("tokens") != tokenizer.encode(SUM):
        raise ValueError(f"the teacher at {args.server} has another tokenizer than {args.model}")
    else:
        print(f"  0  held-out accuracy {accuracy(student, tokenizer, HELD_OUT):.0%}")
    direction = "reverse" if args.ids == "student" else "forward"
    history, draw = [], random.Random(args.seed)

    for step in range(1, args.steps + 1):
        start = time.perf_counter()
        if args.columns:
            rows = draw.choices(stored, k=BATCH)
            prompts, completions, scores = map(list, zip(*rows, strict=True))
        else:
            batch = draw.choices(SUMS, k=BATCH)
            texts = [SUM.format(a, b) for a, b in batch]
            prompts, shown = (tokenizer([x + y for y in texts]).input_ids for x in ("", SHOWN))
            tokens, mask = completions_of(student, tokenizer, batch, sample=True)
            completions = [x[kept].tolist() for x, kept in zip(tokens, mask, strict=True)]
            if args.ids == "teacher":
                scores = likeliest_of_teacher(args.server, args.top, shown, completions)
        states = states_of(student, prompts, completions)  # [N, H]
        head = head_of(student).at(states)  # with its bias, scale and softcap
        if args.ids == "student":
            with torch.no_grad():  # logits of 256 tokens at a time
                parts = [(x, head_of(student).at(x)) for x in states.split(256)]
                ids = torch.cat([linear_logits(*part).topk(args.top).indices for part in parts])
            of_teacher = teacher_at(args.server, shown, completions, ids)
        else:
            ids, of_teacher = as_tensors(scores)
        device = states.device
        kl = kl_of(states, head, ids.to(device), of_teacher.to(device), direction).mean()
        kl.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        history.append(kl.item())
        print(f"{step:3d}  KL {history[-1]:.4f}  {time.perf_counter() - start:.1f} s")
    if not args.columns:
        print(f"{args.steps:3d}  held-out accuracy {accuracy(student, tokenizer, HELD_OUT):.0%}")
    return history


if __name__ == "__main__":
    main()

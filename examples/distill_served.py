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
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import torch
from distill import BATCH, SHOWN, SUM, accuracy, completions_of
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_kernels import linear_logprobs, topk_kl

Ids = Sequence[list[int]]
Scores = list[dict[int, float]]  # for each token, log-probs by id
START = (
    "Start the teacher by `vllm serve TEACHER --max-logprobs K`, K as in --top, and pass its "
    "address as --server. --ids student needs vLLM 0.32 or newer on a GPU, and --enable-scale-out."
)
COLUMNS = ("prompt_ids", "completion_ids", "teacher_ids", "teacher_logps")


def ask(address: str, path: str, **body: Any) -> dict[str, Any]:
    """The server's answer to a request in JSON."""
    data = json.dumps(body).encode()
    request = Request(address.rstrip("/") + path, data, {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=600) as answer:
            return json.load(answer)
    except HTTPError as error:
        said = error.read().decode(errors="replace")
        raise ValueError(f"{request.full_url}: {error.code} {said}\n{START}") from None
    except OSError as error:
        raise ConnectionError(f"{address} does not answer ({error}). {START}") from None


def likeliest_of_teacher(address: str, top: int, prompts: Ids, completions: Ids) -> Scores:
    """The likeliest ids of each of the completions' N tokens: `top`, or one more."""
    both = [a + b for a, b in zip(prompts, completions, strict=True)]
    answer = ask(address, "/v1/completions", prompt=both, max_tokens=1, prompt_logprobs=top)
    choices = sorted(answer["choices"], key=lambda x: x["index"])
    scores: Scores = []
    for choice, completion in zip(choices, completions, strict=True):
        # None for the prompt's first token; for each other one a dict of the likeliest ids and of
        # the token itself, whether or not it is among them.
        rows = (choice.get("prompt_logprobs") or [])[-len(completion) :]
        scored = [str(i) in row for i, row in zip(completion, rows, strict=False)]
        if scored != [True] * len(completion):
            raise ValueError(f"{address} has not scored the tokens that it was sent. {START}")
        scores += [{int(i): x["logprob"] for i, x in row.items()} for row in rows]
    return scores


def teacher_at(address: str, prompts: Ids, completions: Ids, ids: Tensor) -> Tensor:
    """The teacher's log-probs `[N, K]` of these ids of the completions' N tokens."""

    def one(prompt: list[int], completion: list[int], ids: Tensor) -> Tensor:
        # Row i is for the token at `prompt_logprob_start + i + 1`.
        sampling = {
            "prompt_logprob_token_ids": ids.tolist(), "prompt_logprob_start": len(prompt) - 1,
            "max_tokens": 1,
        }  # fmt: skip
        answer = ask(
            address, "/inference/v1/generate", token_ids=prompt + completion,
            sampling_params=sampling,
        ).get("prompt_token_id_logprobs")  # fmt: skip
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
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        try:
            prompt, completion, ids, logps = map(json.loads(line).__getitem__, COLUMNS)
            pairs = zip(completion, ids, logps, strict=True)
            scores = [dict(zip(a, b, strict=True)) for _, a, b in pairs]
            if [*map(len, scores)] != [*map(len, ids)]:
                raise ValueError("a token has an id twice")
        except (KeyError, TypeError, ValueError) as error:
            expected = f"expected the columns {', '.join(COLUMNS)}"
            raise ValueError(f"{path}, line {number}: {error!r}; {expected}") from None
        rows.append((prompt, completion, scores))
    return rows


def as_tensors(scores: Scores) -> tuple[Tensor, Tensor]:
    """Ids and log-probs `[N, K]`; -inf where a token has fewer ids than others."""
    ids = [torch.tensor([*token]) for token in scores]
    logps = [torch.tensor([*token.values()]) for token in scores]
    return pad_sequence(ids, True), pad_sequence(logps, True, -torch.inf)


def states_of(model: Any, prompts: Ids, completions: Ids) -> Tensor:
    """The hidden states `[N, H]` that predict the completions' N tokens."""
    both = [torch.tensor(a + b) for a, b in zip(prompts, completions, strict=True)]
    # Padding is behind the tokens, which do not see it.
    states = model.base_model(pad_sequence(both, True).to(model.device)).last_hidden_state
    starts, counts = ([len(x) for x in some] for some in (prompts, completions))
    return torch.cat([x[a - 1 : a - 1 + n] for x, a, n in zip(states, starts, counts, strict=True)])


@torch.no_grad()
def top_ids(states: Tensor, head: Tensor, top: int) -> Tensor:
    """The student's likeliest ids `[N, K]`, from the logits of 256 tokens at a time."""
    return torch.cat([(x @ head.T).topk(top).indices for x in states.split(256)])


def kl_of(states: Tensor, head: Tensor, ids: Tensor, of_teacher: Tensor, direction: str) -> Tensor:
    """The KL `[N]` over K ids and the rest, from the student's states `[N, H]`."""
    if ids.min() < 0 or ids.max() >= len(head):
        raise ValueError(
            f"an id is outside of the student's vocabulary of {len(head):,}: teacher and student "
            "need one tokenizer"
        )
    mass = of_teacher.exp().sum(-1)
    if not (mass < 1.001).all():
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
    parser.add_argument("--ids", choices=("teacher", "student"), default="teacher")
    parser.add_argument("--columns", metavar="FILE")
    parser.add_argument("--top", type=int, default=16, metavar="K", help="ids per token")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    student = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    student, head = student.to(device).eval(), student.get_output_embeddings().weight
    optimizer = torch.optim.AdamW(student.parameters(), lr=args.learning_rate, weight_decay=0.0)
    if args.columns:
        stored = read_columns(args.columns)
    elif ask(args.server, "/tokenize", prompt=SUM)["tokens"] != tokenizer.encode(SUM):
        raise ValueError(f"the teacher at {args.server} has another tokenizer than {args.model}")
    sums = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    random.Random(0).shuffle(sums)
    held_out, sums, draw = sums[:27], sums[27:], random.Random(args.seed)
    history: list[float] = []

    for step in range(1, args.steps + 1):
        start, direction = time.perf_counter(), "forward"
        if args.columns:
            rows = draw.choices(stored, k=BATCH)
            prompts, completions = [row[0] for row in rows], [row[1] for row in rows]
            states = states_of(student, prompts, completions)
            ids, of_teacher = as_tensors([token for row in rows for token in row[2]])
        else:
            batch = draw.choices(sums, k=BATCH)
            texts = [SUM.format(a, b) for a, b in batch]
            prompts, shown = (tokenizer([x + y for y in texts]).input_ids for x in ("", SHOWN))
            tokens, mask = completions_of(student, tokenizer, batch, sample=True)
            completions = [x[kept].tolist() for x, kept in zip(tokens, mask, strict=True)]
            states = states_of(student, prompts, completions)  # [N, H]
            if args.ids == "teacher":
                scores = likeliest_of_teacher(args.server, args.top, shown, completions)
                ids, of_teacher = as_tensors(scores)
            else:
                ids, direction = top_ids(states, head, args.top), "reverse"
                of_teacher = teacher_at(args.server, shown, completions, ids)
        kl = kl_of(states, head, ids.to(device), of_teacher.to(device), direction).mean()
        kl.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        history.append(kl.item())
        print(f"{step:3d}  KL {history[-1]:.4f}  {time.perf_counter() - start:.1f} s")
    print(f"held-out accuracy {accuracy(student, tokenizer, held_out):.0%}")
    return history


if __name__ == "__main__":
    main()

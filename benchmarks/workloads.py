"""What the benchmarks run on: hidden states, a head, and tokens to score."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path

import torch
from torch import Tensor

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


Device = str | torch.device


@dataclass
class Workload:
    """A batch of `B x T` positions, of which those of `mask` count (None: all)."""

    name: str
    hidden: Tensor  # [B, T, H]
    weight: Tensor  # [V, H]
    targets: Tensor  # [B, T]
    advantages: Tensor  # [B]
    old_logps: Tensor  # [B, T]
    mask: Tensor | None = None  # [B, T], bool

    @property
    def tokens(self) -> int:
        """How many count."""
        return self.targets.numel() if self.mask is None else int(self.mask.sum())

    def describe(self) -> str:
        (B, T, H), V = self.hidden.shape, self.weight.shape[0]
        dtype = str(self.hidden.dtype).removeprefix("torch.")
        counted = "" if self.mask is None else f" of {B * T:,} positions"
        return f"{self.name}: N = {self.tokens:,}{counted}, V = {V:,}, H = {H:,}, {dtype}"

    def to(self, dtype: torch.dtype) -> Workload:
        """With states and head in another dtype."""
        return replace(self, hidden=self.hidden.to(dtype), weight=self.weight.to(dtype))

    def each(self, change: Callable[[Tensor], Tensor]) -> Workload:
        """With every tensor changed."""
        tensors = {k: change(v) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return Workload(**{**vars(self), **tensors})

    def sequences(self, which: slice | Tensor) -> Workload:
        """Some of them, with the whole head."""
        weight = self.weight
        return self.each(lambda x: x if x is weight else x[which])

    def first(self, T: int) -> Workload:
        """The first positions of each, with the whole head."""
        weight = self.weight
        return self.each(lambda x: x if x is weight or x.ndim == 1 else x[:, :T])


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

    from grpo_kernels.training import resolve_model

    folder = resolve_model("smollm2-135m")
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


# Of word frequencies; with it 128 rows share their words as 128 of the demo model's samples do.
ZIPF = 1.1


def synthetic(
    name: str, N: int, V: int, H: int, device: Device = "cpu", T: int = 64, seed: int = 0
) -> Workload:
    """Random states and head whose softmax has the profile of the demo model's own samples.

    Words come in clusters of some 200 that share half of their direction, W_v = (u_c + e_v) / 2^.5;
    a state leans towards one word by 2 to 10, towards its cluster by 10 and by ln V beyond the
    demo's vocabulary, so that the other clusters together keep a few percent, and has noise of 1.2
    to 2.6. Which word follows Zipf's law, and words of similar frequency share a cluster: so rows
    have words in common as real ones do. Targets are drawn from the softmax, as a sampler does.

    `python -m benchmarks.workloads` prints the profile of this and of the real one: mean entropy
    2.9 and 2.8, 147 and 142 words a row above 2^-12, 4 % and 6 % of the probability below, and 12 %
    and 10 % of the vocabulary above it in 128 rows.
    """
    g = torch.Generator(device).manual_seed(seed)
    clusters = max(1, V // 200)
    rank = torch.arange(V, device=device)
    of = rank * clusters // V
    shared, own = (torch.randn(n, H, generator=g, device=device) for n in (clusters, V))
    words = torch.multinomial((rank + 1.0) ** -ZIPF, N, replacement=True, generator=g)
    lean, noise = (
        low + span * torch.rand(N, 1, generator=g, device=device)
        for low, span in ((2, 8), (1.2, 1.4))
    )
    pull = 10 + math.log(V / 49_152)
    hidden = (pull * shared[of[words]] + lean * own[words]) / (H / 2) ** 0.5
    hidden += noise * torch.randn(N, H, generator=g, device=device)
    weight = own.add_(shared[of]).mul_((0.5 / H) ** 0.5)
    return _sampled(name, hidden.view(N // T, T, H), weight, seed)


def flat(
    name: str, N: int, V: int, H: int, device: Device = "cpu", T: int = 64, seed: int = 0
) -> Workload:
    """Random states and weight, a nearly uniform softmax: the worst case for whoever samples it."""
    g = torch.Generator(device).manual_seed(seed)
    hidden = torch.randn(N // T, T, H, generator=g, device=device)
    weight = torch.randn(V, H, generator=g, device=device).mul_(H**-0.5)
    return _sampled(name, hidden, weight, seed)


def rollout(
    name: str, N: int, V: int, H: int, device: Device = "cpu", T: int = 256, seed: int = 0
) -> Workload:
    """What a GRPO step looks like: groups of 8 completions of one prompt, at least two of them.

    Lengths are long-tailed (log-normal, cut at T), some 40 % of the positions padding; half of the
    groups have equal rewards, so advantage 0; in a quarter of the sequences a tool spoke for an
    eighth of T.
    """
    T = min(T, N // 16)
    w = synthetic(name, N, V, H, device, T, seed)
    B, g = N // T, torch.Generator().manual_seed(seed)
    lengths = (0.55 * T * torch.exp(0.6 * torch.randn(B, generator=g))).clamp(4, T).long()
    position = torch.arange(T)
    mask = position < lengths[:, None]
    begin = torch.randint(0, T // 2, (B, 1), generator=g)
    spoke = (torch.rand(B, 1, generator=g) < 0.25) & (position >= begin)
    w.mask = (mask & ~(spoke & (position < begin + T // 8))).to(device)
    equal = torch.arange(B) // 8 % 2 == 1
    w.advantages = w.advantages.masked_fill(equal.to(device), 0.0)
    return w


@torch.no_grad()
def _sampled(name: str, hidden: Tensor, weight: Tensor, seed: int) -> Workload:
    g = torch.Generator(hidden.device).manual_seed(seed)
    rows = hidden.flatten(0, 1).split(256)
    drawn = [torch.multinomial((h @ weight.T).softmax(-1), 1, generator=g) for h in rows]
    targets = torch.cat(drawn).view(hidden.shape[:2])
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
        "advantages": torch.randn(targets.shape[0], generator=g).to(logps.device),
        "old_logps": logps + 0.1 * torch.randn(logps.shape, generator=g).to(logps.device),
    }


DEMO_V, DEMO_H, QWEN_V = 49_152, 576, 151_936
# name: how it is made, and its (N, V, H) unless another is asked for
SYNTHETIC: dict[str, tuple[Callable[..., Workload], tuple[int, int, int]]] = {
    "dense": (synthetic, (2048, DEMO_V, DEMO_H)),
    "rollout": (rollout, (4096, DEMO_V, DEMO_H)),
    "flat": (flat, (2048, DEMO_V, DEMO_H)),
    "qwen05": (synthetic, (4096, QWEN_V, 896)),
    "qwen15": (synthetic, (4096, QWEN_V, 1536)),
    "qwen7": (synthetic, (4096, QWEN_V, 3584)),
    "qwen14": (synthetic, (4096, QWEN_V, 5120)),
}
WORKLOADS = ("smollm", *SYNTHETIC)
MOST_MADE = 4096


def make(name: str, shape: tuple[int, int, int] | None = None, device: Device = "cpu") -> Workload:
    """The workload of this name, float32, the synthetic ones in any `shape` (N, V, H).

    Beyond 4,096 tokens the same sequences come again: to make them takes as long as to score them.
    """
    if name == "smollm":
        if shape is not None:
            raise ValueError("shape: expected None for smollm, whose samples are what they are")
        return smollm_samples().each(lambda x: x.to(device))
    maker, default = SYNTHETIC[name]
    N, V, H = shape or default
    T = signature(maker).parameters["T"].default
    if N % T:
        raise ValueError(f"shape: expected a multiple of {T} tokens for {name}; got {N:,}")
    w = maker(name, min(N, MOST_MADE), V, H, device)
    if N <= MOST_MADE:
        return w
    B, T = w.targets.shape
    return w.sequences(torch.arange(N // T, device=device) % B)


@torch.no_grad()
def profile(w: Workload) -> str:
    """How the softmax of every eighth token is spread, and how that of 128 in a row together."""
    states = w.hidden.flatten(0, 1)
    rows = states[::8].split(256)
    log_p = torch.cat([(h @ w.weight.T).log_softmax(-1) for h in rows])
    p = log_p.exp()
    blocks = states[: 8 * 128].split(128)
    used = [((h @ w.weight.T).softmax(-1) > 2**-12).any(0).float().mean() for h in blocks]
    entropy = -(p * log_p).sum(1)
    tenths = torch.quantile(entropy, torch.tensor([0.1, 0.5, 0.9])).tolist()
    large = p > 2**-12
    return (
        f"{w.name:8} entropy {entropy.mean():.2f} (tenth, half, nine tenths of the tokens below "
        f"{', '.join(f'{x:.2f}' for x in tenths)}); {large.sum(1).float().mean():.0f} words a row "
        f"above 2^-12, {(p * ~large).sum(1).mean():.3f} of the probability below; largest "
        f"{p.amax(1).mean():.2f}; {sum(used) / len(used):.1%} of the words above it in 128 rows"
    )


if __name__ == "__main__":
    for name in ("smollm", "dense", "flat"):
        print(profile(make(name)))
    print(profile(make("qwen05", (1024, QWEN_V, 896))))

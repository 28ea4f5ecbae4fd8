"""Makes the inputs of the benchmarks: hidden states, a head, and tokens to score.

`python -m benchmarks.workloads` prints how their softmax is spread.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from grpo_kernels import Support, batch_support, linear_logprobs

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


class Teacher(NamedTuple):
    """Another model on the same tokens."""

    hidden: Tensor  # [B, T, H]
    head: Tensor  # [V, H]


# Files of workloads have these in them.
torch.serialization.add_safe_globals([Support, Teacher])


@dataclass
class Workload:
    """A batch of `B x T` positions, of which those in `mask` count (None: all)."""

    name: str
    hidden: Tensor  # [B, T, H]
    weight: Tensor  # [V, H]
    targets: Tensor  # [B, T]
    advantages: Tensor  # [B]
    old_logps: Tensor | None  # [B, T]
    mask: Tensor | None = None  # [B, T], bool
    support: Support | None = None  # what sampling kept for each token
    frozen: bool = False  # the head takes no gradient
    teacher: Teacher | None = None  # the loss is then the reverse KL from it

    @property
    def tokens(self) -> int:
        """The number of positions that count."""
        return self.targets.numel() if self.mask is None else int(self.mask.sum())

    def describe(self) -> str:
        (B, T, H), V = self.hidden.shape, self.weight.shape[0]
        dtype = str(self.hidden.dtype).removeprefix("torch.")
        counted = "" if self.mask is None else f" of {B * T:,} positions"
        about = f"{self.name}: N = {self.tokens:,}{counted}, V = {V:,}, H = {H:,}, {dtype}"
        about += ", head frozen" * self.frozen + ", KL from a teacher" * (self.teacher is not None)
        return about if self.support is None else f"{about}, {_sizes(self.support)}"

    def to(self, dtype: torch.dtype) -> Workload:
        """Returns the workload with hidden states and head in another dtype."""
        teacher = self.teacher and Teacher(*(x.to(dtype) for x in self.teacher))
        states, weight = self.hidden.to(dtype), self.weight.to(dtype)
        return replace(self, hidden=states, weight=weight, teacher=teacher)

    def each(self, change: Callable[[Tensor], Tensor]) -> Workload:
        """Returns the workload with `change` applied to every tensor."""
        changed: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, tuple):
                changed[name] = type(value)(*map(change, value))
            else:
                changed[name] = change(value) if isinstance(value, Tensor) else value
        return Workload(**changed)

    def sequences(self, which: slice | Tensor) -> Workload:
        """Returns some of the sequences, with the whole head."""
        heads, support = [self.weight, *(self.teacher or ())[1:]], self.support
        part = replace(self, support=None).each(
            lambda x: x if any(x is head for head in heads) else x[which]
        )
        if support is not None:
            numbers = torch.arange(self.targets.numel()).view_as(self.targets)
            part.support = _support_of(support, numbers[which].flatten().tolist())
        return part

    def tiny(self) -> Workload:
        """Returns copies of the first sequence and of 64 rows of the head, for a warm-up."""
        tiny = self.sequences(slice(1)).each(Tensor.detach)
        tiny.weight, tiny.targets = self.weight.detach()[:64], tiny.targets % 64
        if tiny.teacher is not None:
            tiny.teacher = Teacher(tiny.teacher.hidden, tiny.teacher.head[:64])
        if self.support is not None:
            ids = torch.stack([tiny.targets, (tiny.targets + 1) % 64], -1).flatten()
            tiny.support = Support(ids, torch.arange(0, len(ids) + 1, 2, device=ids.device))
        return tiny.each(torch.clone)


def _support_of(support: Support, tokens: list[int]) -> Support:
    sizes = support.offsets.diff()
    sets = support.token_ids.split(sizes.tolist())
    offsets = F.pad(sizes[tokens].cumsum(0), (1, 0))
    return Support(torch.cat([sets[i] for i in tokens]), offsets)


def _sizes(support: Support) -> str:
    sizes = support.offsets.diff().float()
    median, p99 = torch.quantile(sizes, sizes.new_tensor([0.5, 0.99])).tolist()
    return (
        f"entries per token: mean {sizes.mean():.1f}, median {median:.0f}, p99 {p99:,.0f}, "
        f"largest {sizes.max():,.0f}, one entry {(sizes == 1).float().mean():.0%}"
    )


def smollm_samples() -> Workload:
    """Samples from the demo model: 16 prompts, 2 completions of 64 tokens each, N = 2,048.

    Hidden states, head and tokens are the model's. They are made once and kept in the cache folder.
    """
    return Workload(name="smollm", **_cached("smollm-samples-v1", _sample_smollm))


# Truncations of the demo model's sampling, for workloads with a support.
TRUNCATED: dict[str, dict[str, Any]] = {
    "top-p 0.8": {"top_p": 0.8},
    "top-p 0.9": {"top_p": 0.9},
    "top-p 0.95": {"top_p": 0.95},
    "top-k 20": {"top_k": 20},
    "top-k 50": {"top_k": 50},
    "min-p 0.05": {"min_p": 0.05},
}


def truncated_samples(name: str) -> Workload:
    """Samples like those of `smollm`, with truncation, and the ids that it kept for each token.

    They are made once and kept in the cache folder, beside the head.
    """
    file = f"smollm-{name.replace(' ', '-')}-v1"
    sampled = _cached(file, partial(_sample_smollm, **TRUNCATED[name]))
    return Workload(name=name, weight=smollm_samples().weight, **sampled)


def _cached(name: str, sample: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(base) / "grpo_kernels" / f"{name}.pt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f"{name}.{os.getpid()}.tmp")
        torch.save(sample(), scratch)
        scratch.rename(path)
    return torch.load(path, weights_only=True)


@torch.no_grad()
def _sample_smollm(**truncation: Any) -> dict[str, Any]:
    """Samples and scores; with truncation, the support takes the place of the head."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from examples.demo_model import model_path
    from grpo_kernels.integrations.generation import SupportRecorder

    folder = model_path()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    torch.manual_seed(0)
    inputs = tokenizer([p for p in PROMPTS for _ in range(2)], return_tensors="pt", padding=True)
    T = 64
    recorder = SupportRecorder(**truncation)
    sampling = {**recorder.generate_options(), "max_new_tokens": T, "min_new_tokens": T}
    output = model.generate(**inputs, **sampling, logits_processor=[recorder] if truncation else [])
    attention_mask = torch.cat([inputs.attention_mask, torch.ones(len(output), T).long()], 1)
    states = model.base_model(output, attention_mask=attention_mask).last_hidden_state
    hidden, targets = states[:, -T - 1 : -1].clone(), output[:, -T:].clone()
    weight = model.get_output_embeddings().weight.detach().clone()
    support = batch_support(recorder.supports([T] * len(output)), T) if truncation else None
    return {
        "hidden": hidden,
        "targets": targets,
        **({"support": support} if truncation else {"weight": weight}),
        **_policy_inputs(hidden, weight, targets, support),
    }


# The exponent of token frequencies. With this one, 128 rows have as many tokens in common as 128
# rows of the demo model's samples.
ZIPF = 1.1


def synthetic(name: str, N: int, V: int, H: int, device: Device = "cpu", T: int = 64) -> Workload:
    """Makes random states and a head whose softmax is spread like that of real samples.

    Tokens come in clusters of some 200 whose rows of the head share half of their direction,
    W_v = (u_c + e_v) / sqrt(2). A hidden state has three parts: 2 to 10 along one token, noise of
    1.2 to 2.6, and 10 along the token's cluster; the last grows with ln V beyond the demo's
    vocabulary, so that the other clusters together keep a few percent of the probability. Tokens
    follow Zipf's law, and tokens of similar frequency share a cluster, so that rows have tokens in
    common as real ones do. Targets are drawn from the softmax.

    Compared with the demo model's samples (`python -m benchmarks.workloads` prints both): mean
    entropy 2.9 (theirs 2.8); 147 (142) tokens per row above 2^-12, the others together with 4 %
    (6 %) of the probability; 12 % (10 %) of the vocabulary above 2^-12 somewhere in 128 rows.
    """
    g = torch.Generator(device).manual_seed(0)
    clusters = max(1, V // 200)
    rank = torch.arange(V, device=device)
    of = rank * clusters // V
    shared, embedding = (torch.randn(n, H, generator=g, device=device) for n in (clusters, V))
    tokens = torch.multinomial((rank + 1.0) ** -ZIPF, N, replacement=True, generator=g)
    lean, noise = (
        low + span * torch.rand(N, 1, generator=g, device=device)
        for low, span in ((2, 8), (1.2, 1.4))
    )
    pull = 10 + math.log(V / 49_152)
    hidden = (pull * shared[of[tokens]] + lean * embedding[tokens]) / (H / 2) ** 0.5
    hidden += noise * torch.randn(N, H, generator=g, device=device)
    weight = embedding.add_(shared[of]).mul_((0.5 / H) ** 0.5)
    return _sampled(name, hidden.view(N // T, T, H), weight)


def rollout(name: str, N: int, V: int, H: int, device: Device = "cpu", T: int = 256) -> Workload:
    """Makes the batch of a GRPO step: at least two groups of 8 completions of one prompt.

    Lengths are long-tailed (log-normal, truncated at T), which makes some 40 % of the positions
    padding. Half of the groups have equal rewards, hence advantage 0. In a quarter of the
    sequences, tool output (masked) takes an eighth of T.
    """
    T = min(T, N // 16)
    w = synthetic(name, N, V, H, device, T)
    B, g = N // T, torch.Generator().manual_seed(0)
    lengths = (0.55 * T * torch.exp(0.6 * torch.randn(B, generator=g))).clamp(4, T).long()
    position = torch.arange(T)
    mask = position < lengths[:, None]
    begin = torch.randint(0, T // 2, (B, 1), generator=g)
    tool = (torch.rand(B, 1, generator=g) < 0.25) & (position >= begin)
    w.mask = (mask & ~(tool & (position < begin + T // 8))).to(device)
    equal = torch.arange(B) // 8 % 2 == 1
    w.advantages = w.advantages.masked_fill(equal.to(device), 0.0)
    return w


def frozen(*shape: Any, **options: Any) -> Workload:
    """Makes what `synthetic` does, with a head that takes no gradient."""
    return replace(synthetic(*shape, **options), frozen=True)


def two_heads(*shape: Any, **options: Any) -> Workload:
    """Makes what `synthetic` does, and a teacher whose states are near the model's."""
    w = synthetic(*shape, **options)
    g = torch.Generator(w.hidden.device).manual_seed(1)
    noise = torch.randn(w.hidden.shape, generator=g, device=w.hidden.device)
    return replace(w, teacher=Teacher(w.hidden + 1.5 * noise, w.weight.clone()))


@torch.no_grad()
def nucleus(name: str, N: int, V: int, H: int, device: Device = "cpu", T: int = 64) -> Workload:
    """Makes what `synthetic` does, sampled with top-p 0.9 from the 1,024 likeliest tokens."""
    w = synthetic(name, N, V, H, device, T)
    g = torch.Generator(device).manual_seed(0)
    targets, ids, sizes = [], [], []
    for states in w.hidden.flatten(0, 1).split(256):
        p, order = (states @ w.weight.T).softmax(-1).topk(min(1024, V))
        in_nucleus = p.cumsum(-1) - p < 0.9
        targets.append(order.gather(1, torch.multinomial(p * in_nucleus, 1, generator=g)))
        ids.append(order[in_nucleus])
        sizes.append(in_nucleus.sum(-1))
    w.targets = torch.cat(targets).view_as(w.targets)
    w.support = Support(torch.cat(ids), F.pad(torch.cat(sizes).cumsum(0), (1, 0)))
    return replace(w, **_policy_inputs(w.hidden, w.weight, w.targets, w.support))


@torch.no_grad()
def _sampled(name: str, hidden: Tensor, weight: Tensor) -> Workload:
    g = torch.Generator(hidden.device).manual_seed(0)
    rows = hidden.flatten(0, 1).split(256)
    drawn = [torch.multinomial((h @ weight.T).softmax(-1), 1, generator=g) for h in rows]
    targets = torch.cat(drawn).view(hidden.shape[:2])
    return Workload(name, hidden, weight, targets, **_policy_inputs(hidden, weight, targets))


def _policy_inputs(
    hidden: Tensor, weight: Tensor, targets: Tensor, support: Support | None = None
) -> dict[str, Any]:
    """Makes advantages of both signs, none 0, and old log-probs near the policy's own."""
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        logps = linear_logprobs(hidden, weight, targets, support=support).logps
    return {
        "advantages": torch.randn(targets.shape[0], generator=g).to(logps.device),
        "old_logps": logps + 0.1 * torch.randn(logps.shape, generator=g).to(logps.device),
    }


DEMO_V, DEMO_H, QWEN_V = 49_152, 576, 151_936
# name: the function that makes it, and its default (N, V, H)
SYNTHETIC: dict[str, tuple[Callable[..., Workload], tuple[int, int, int]]] = {
    "dense": (synthetic, (2048, DEMO_V, DEMO_H)),
    "rollout": (rollout, (4096, DEMO_V, DEMO_H)),
    "frozen": (frozen, (2048, DEMO_V, DEMO_H)),
    "nucleus": (nucleus, (2048, DEMO_V, DEMO_H)),
    "two-heads": (two_heads, (2048, DEMO_V, DEMO_H)),
    "qwen05": (synthetic, (4096, QWEN_V, 896)),
    "qwen7": (synthetic, (4096, QWEN_V, 3584)),
}
WORKLOADS = ("smollm", *SYNTHETIC, *TRUNCATED)
MOST_MADE = 4096


def make(name: str, shape: tuple[int, int, int] | None = None, device: Device = "cpu") -> Workload:
    """Makes the workload of this name in float32, the synthetic ones in any `shape` (N, V, H).

    Beyond 4,096 tokens the sequences repeat, as making one takes as long as scoring it.
    """
    if name not in SYNTHETIC:
        if shape is not None:
            raise ValueError(f"shape: expected None for {name}, whose samples have a fixed shape")
        samples = truncated_samples(name) if name in TRUNCATED else smollm_samples()
        return samples.each(lambda x: x.to(device))
    maker, default = SYNTHETIC[name]
    N, V, H = shape or default
    T = 256 if maker is rollout else 64
    if N % T:
        raise ValueError(f"shape: expected a multiple of {T} tokens for {name}; got {N:,}")
    w = maker(name, min(N, MOST_MADE), V, H, device)
    if N <= MOST_MADE:
        return w
    B, T = w.targets.shape
    return w.sequences(torch.arange(N // T, device=device) % B)


@torch.no_grad()
def profile(w: Workload) -> str:
    """Describes the softmax of every eighth token, and that of 128 successive tokens together."""
    states = w.hidden.flatten(0, 1)
    rows = states[::8].split(256)
    log_p = torch.cat([(h @ w.weight.T).log_softmax(-1) for h in rows])
    p = log_p.exp()
    blocks = states[: 8 * 128].split(128)
    used = [((h @ w.weight.T).softmax(-1) > 2**-12).any(0).float().mean() for h in blocks]
    large = p > 2**-12
    return (
        f"{w.name:8} entropy {-(p * log_p).sum(1).mean():.2f}; "
        f"{large.sum(1).float().mean():.0f} tokens per row above 2^-12, "
        f"{(p * ~large).sum(1).mean():.3f} of the probability below; "
        f"{sum(used) / len(used):.1%} of the vocabulary above 2^-12 in 128 rows"
    )


if __name__ == "__main__":
    for name in ("smollm", "dense"):
        print(profile(make(name)))

"""Trains a language model with GRPO to add two numbers and to put the sum in <answer> tags.

    python -m examples.train_additions [--steps 30] [--model smollm2-135m]

The whole loop is here: sample prompts, generate a group of completions for each, score them,
turn scores into advantages within each group, and take a gradient step on `fused_grpo_loss`, which
goes from the model's last hidden states to the loss without making the logits. Runs on one device
or, through `accelerate launch -m examples.train_additions`, on several.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.memory import PeakMemory
from examples import smollm
from grpo_kernels import (
    GRPOLossConfig,
    GRPOLossOutput,
    fused_grpo_loss,
    group_advantages,
    linear_logprobs,
)

EXAMPLE = "Question: What is 31 + 45?\n<answer>76</answer>\n\n"
ANSWER = re.compile(r"\s*<answer>\s*(-?\d+)\s*</answer>")

Problem = tuple[str, int]  # prompt, answer


@dataclass
class Rollout:
    """Prompts with their completions, `B` rows, prompts padded on the left to `P` tokens."""

    input_ids: Tensor  # [B, P + T]
    attention_mask: Tensor  # [B, P + T]
    mask: Tensor  # [B, T]: 1 up to and including the first end-of-sequence token
    rewards: Tensor  # [B]
    correct: Tensor  # [B]
    texts: list[str]


def make_problems() -> tuple[list[Problem], list[Problem]]:
    """All sums of two digits from 1 to 9, two thirds to train on and a third held out."""
    digits = range(1, 10)
    problems = [(f"{EXAMPLE}Question: What is {a} + {b}?\n", a + b) for a in digits for b in digits]
    random.Random(0).shuffle(problems)
    return problems[27:], problems[:27]


def score(text: str, answer: int) -> tuple[float, bool]:
    """0.2 for each tag used once, 0.1 for a number between them, 0.5 more for the right one."""
    reward = 0.2 * (text.count("<answer>") == 1) + 0.2 * (text.count("</answer>") == 1)
    match = ANSWER.match(text)
    correct = match is not None and int(match[1]) == answer
    return reward + 0.1 * (match is not None) + 0.5 * correct, correct


class PolicyWithLoss(nn.Module):
    """The model and its loss in one forward, so that DDP sees every gradient, the head's too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, rollout: Rollout, advantages: Tensor, **options: Any
    ) -> tuple[GRPOLossOutput, int | None]:
        hidden, targets = self._hidden(rollout)
        with PeakMemory(hidden.device) as memory:
            out = fused_grpo_loss(
                hidden, self._head(), targets, advantages, rollout.mask, softcap=self._softcap(),
                **options,
            )  # fmt: skip
        return out, memory.extra_bytes

    @torch.no_grad()
    def logps(self, rollout: Rollout, temperature: float) -> Tensor:
        hidden, targets = self._hidden(rollout)
        return linear_logprobs(
            hidden, self._head(), targets, mask=rollout.mask, temperature=temperature,
            softcap=self._softcap(),
        ).logps  # fmt: skip

    def _hidden(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """The states that predict the completion's tokens `[B, T, H]`, and the tokens `[B, T]`."""
        T = rollout.mask.shape[1]
        states = self.model.base_model(  # type: ignore[operator]
            input_ids=rollout.input_ids, attention_mask=rollout.attention_mask, use_cache=False
        ).last_hidden_state
        return states[:, -T - 1 : -1], rollout.input_ids[:, -T:]

    def _head(self) -> Tensor:
        return self.model.get_output_embeddings().weight  # type: ignore[operator]

    def _softcap(self) -> float | None:
        return getattr(self.model.config, "final_logit_softcapping", None)


@torch.no_grad()
def generate(
    model: Any,
    tokenizer: Any,
    problems: list[Problem],
    max_new_tokens: int,
    **sampling: Any,
) -> Rollout:
    """One completion for each problem, scored."""
    inputs = tokenizer([prompt for prompt, _ in problems], return_tensors="pt", padding=True)
    inputs = inputs.to(model.device)
    model.eval()
    output = model.generate(
        **inputs, max_new_tokens=max_new_tokens, pad_token_id=tokenizer.pad_token_id,
        # A model's own default may differ; then the samples would not be the policy's.
        repetition_penalty=1.0, **sampling,
    )  # fmt: skip
    model.train()
    prompt_length = inputs.input_ids.shape[1]
    completions = output[:, prompt_length:]
    # A model may stop at any of several tokens, and padding may be one of them: what counts is
    # what comes up to the first.
    eos = torch.tensor(model.generation_config.eos_token_id, device=completions.device)
    ended = torch.isin(completions, eos).long()
    mask = ended.cumsum(1) - ended == 0
    texts = [
        tokenizer.decode(ids[keep], skip_special_tokens=True)
        for ids, keep in zip(completions, mask, strict=True)
    ]
    scores = [score(text, answer) for text, (_, answer) in zip(texts, problems, strict=True)]
    rewards, correct = torch.tensor(scores, device=model.device).float().unbind(1)
    attention_mask = torch.cat([inputs.attention_mask, mask.long()], dim=1)
    return Rollout(output, attention_mask, mask, rewards, correct, texts)


def load(name: str) -> tuple[Any, Any]:
    path = str(smollm.model_path()) if name == smollm.MODEL else name
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def freeze_lower_half(model: Any, *, train_head: bool = False) -> list[nn.Parameter]:
    """Trains the upper half of the layers and the final norm: enough here, and half the time."""
    model.requires_grad_(False)
    body = model.base_model
    for layer in body.layers[len(body.layers) // 2 :]:
        layer.requires_grad_(True)
    body.norm.requires_grad_(True)
    model.get_output_embeddings().requires_grad_(train_head)
    return [p for p in model.parameters() if p.requires_grad]


def evaluate(
    model: Any, tokenizer: Any, problems: list[Problem], args: argparse.Namespace
) -> tuple[float, float]:
    """Mean reward and share of right answers of greedy completions."""
    rollout = generate(model, tokenizer, problems, args.max_new_tokens, do_sample=False)
    return rollout.rewards.mean().item(), rollout.correct.mean().item()


def train(args: argparse.Namespace) -> Path:
    use_bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    accelerator = Accelerator(mixed_precision="bf16" if use_bf16 else "no")
    set_seed(args.seed, device_specific=True)
    rng = random.Random(args.seed * 1000 + accelerator.process_index)
    model, tokenizer = load(args.model)
    reference = None
    if args.beta:
        reference = PolicyWithLoss(load(args.model)[0].eval().requires_grad_(False))
        reference.to(accelerator.device)
    trained = freeze_lower_half(model, train_head=args.train_head)
    optimizer = torch.optim.AdamW(trained, lr=args.learning_rate, weight_decay=0.0)
    policy, optimizer = accelerator.prepare(PolicyWithLoss(model), optimizer)
    config = GRPOLossConfig(loss_type="dapo", beta=args.beta, temperature=args.temperature)
    backward = (
        {} if args.tolerance is None else {"backward": "sampled", "tolerance": args.tolerance}
    )

    folder = Path(args.output) / args.name
    main = accelerator.is_main_process
    if main:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.jsonl").write_text("")
    train_problems, held_out = make_problems()
    if main:
        count = sum(p.numel() for p in trained)
        print(f"{args.model} on {accelerator.device}, {count / 1e6:.0f}M parameters trained")
    before = evaluate(model, tokenizer, held_out, args)
    history: list[dict[str, Any]] = []
    G = args.group_size
    progress = tqdm(range(1, args.steps + 1), desc="GRPO", disable=not main, dynamic_ncols=True)
    for step in progress:
        start = time.perf_counter()
        problems = [p for p in rng.choices(train_problems, k=args.prompts) for _ in range(G)]
        rollout = generate(
            model, tokenizer, problems, args.max_new_tokens,
            do_sample=True, temperature=args.temperature, top_k=0, top_p=1.0,
        )  # fmt: skip
        advantages = group_advantages(rollout.rewards, G)
        with accelerator.autocast():
            ref_logps = reference.logps(rollout, args.temperature) if reference else None
            # Each rank's gradient is averaged with the others': the denominator is, too.
            num_items = accelerator.reduce(rollout.mask.sum().float(), reduction="mean")
            out, head_bytes = policy(
                rollout, advantages, ref_logps=ref_logps, config=config, num_items=num_items,
                **backward,
            )  # fmt: skip
        accelerator.backward(out.loss)
        grad_norm = accelerator.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

        local = {
            "reward": rollout.rewards.mean(),
            "correct": rollout.correct.mean(),
            "loss": out.loss.detach(),
            "grad_norm": grad_norm,
            "completion_length": rollout.mask.sum(1).float().mean(),
            **out.metrics,
        }
        row: dict[str, Any] = {"step": step}
        for name, value in local.items():
            row[name] = accelerator.reduce(value.float(), reduction="mean").item()
        row["seconds"] = time.perf_counter() - start
        row["head_mib"] = None if head_bytes is None else head_bytes / 2**20
        history.append(row)
        if main:
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            _show(progress, row, args, problems, rollout)
    after = evaluate(model, tokenizer, held_out, args)
    if main:
        plot(history, folder / "reward.png")
        if args.save:
            model.save_pretrained(folder / "model")
            tokenizer.save_pretrained(folder / "model")
        print(
            f"{len(held_out)} held-out problems, greedy: reward {before[0]:.2f} -> "
            f"{after[0]:.2f}, right answers {before[1]:.0%} -> {after[1]:.0%}\n"
            f"Metrics and plot in {folder}/ (metrics.jsonl, reward.png)"
        )
    accelerator.end_training()
    return folder


def _show(
    progress: Any, row: dict[str, Any], args: argparse.Namespace,
    problems: list[Problem], rollout: Rollout,
) -> None:  # fmt: skip
    head = "n/a" if row["head_mib"] is None else f"{row['head_mib']:.0f} MiB"
    line = (
        f"reward {row['reward']:.2f}  right {row['correct']:.0%}  loss {row['loss']:+.4f}  "
        f"kl {row.get('kl', 0.0):.4f}  entropy {row['entropy']:.2f}  "
        f"length {row['completion_length']:.1f}  {row['seconds']:.1f} s  "
        f"head {head}"
    )
    progress.set_postfix_str(line)
    # A terminal may be too narrow for the bar's line, and the bar forgets.
    tqdm.write(f"{row['step']:4d}  {line}")
    if row["step"] == 1 or row["step"] % args.show_every == 0:
        best = int(rollout.rewards.argmax())
        for i in sorted({0, best}):
            question = problems[i][0].rsplit("Question: ", 1)[1].strip()
            text, reward = rollout.texts[i], rollout.rewards[i]
            tqdm.write(f"      {question} -> {text!r}  reward {reward:.1f}")


def plot(history: list[dict[str, Any]], path: Path) -> None:
    """Reward and right answers over the steps, each with its mean over five steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = [row["step"] for row in history]
    figure, axes = plt.subplots(figsize=(7, 4), constrained_layout=True)
    for name, label in (("reward", "reward"), ("correct", "share of right answers")):
        values = [row[name] for row in history]
        window = [values[max(0, i - 4) : i + 1] for i in range(len(values))]
        (line,) = axes.plot(steps, [sum(w) / len(w) for w in window], label=label)
        axes.plot(steps, values, ".", color=line.get_color(), alpha=0.4)
    axes.set(xlabel="step", ylabel="mean over the step's completions", ylim=(0, 1.02))
    axes.set_title("GRPO on additions: lines are means over five steps, dots single steps")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--model", default=smollm.MODEL, help=f"{smollm.MODEL}, a hub name, or a folder")
    add("--name", default="demo", help="name of the run")
    add("--output", default="runs", help="where runs are written")
    add("--steps", type=int, default=30)
    add("--prompts", type=int, default=4, help="prompts a step and process")
    add("--group-size", type=int, default=8, help="completions for each prompt")
    add("--max-new-tokens", type=int, default=16)
    add("--temperature", type=float, default=1.0)
    add("--learning-rate", type=float, default=2e-5)
    add("--beta", type=float, default=0.01, help="weight of the KL to the initial model")
    add("--tolerance", type=float, help="gradient noise of a sampled backward; not given: exact")
    add("--train-head", action="store_true", help="and what is tied to it")
    add("--show-every", type=int, default=5, help="steps between printed completions")
    add("--seed", type=int, default=0)
    add("--save", action="store_true", help="write the trained model to the run's folder")
    args = parser.parse_args(argv)
    for name in ("steps", "prompts", "max_new_tokens", "show_every"):
        if getattr(args, name) < 1:
            flag = "--" + name.replace("_", "-")
            parser.error(f"{flag}: expected at least 1; got {getattr(args, name)}")
    if args.group_size < 2:
        parser.error(
            f"--group-size: expected at least 2, as advantages compare the completions of a group; "
            f"got {args.group_size}"
        )
    return args


if __name__ == "__main__":
    train(parse_args())

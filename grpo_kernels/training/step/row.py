"""The row of a step: metrics of its rollout, of its updates and of its time.

One call of the loss, on the log-probs of all processes, makes the metrics of an update. They do not
depend on micro-batches and the number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from ... import grpo_loss
from ...base.layout import to_device
from ...base.sequences import masked_quantile
from ..config import TrainingConfig
from ..run import ranks
from ..run.interruptions import StepError
from ..run.metrics import Metrics, peak_memory
from ..run.run import Run
from .samples import Samples, Scores, call_loss, loss_config


def step_row(
    samples: Samples, labels: Sequence[str], updates: Iterable[Mapping[str, float]], run: Run
) -> dict[str, Any]:
    """Makes a step's row of metrics, over all processes; `labels` are the reward functions'."""
    add_samples(run.metrics, samples, labels, run.config)
    row = {"step": run.step, **run.metrics.take(run.accelerator)}
    if samples.replay_support:
        row |= support_metrics(ranks.reduce(run.accelerator, samples.support_sizes, torch.cat))
    row |= run.metrics.merge_updates(updates)
    if run.micro_batch_size < run.config.micro_batch_size:  # memory has run out
        row["micro_batch_size"] = run.micro_batch_size
    if run.bad_updates:
        row["bad_updates"] = run.bad_updates
    seconds = run.clock.seconds
    row["seconds"] = sum(seconds.values())
    seconds = seconds | {"head": run.clock.head_seconds, "page": run.seconds_of_page()}
    row |= {f"seconds/{name}": value for name, value in seconds.items()}
    return row | {"peak_memory_gib": peak_memory(run.accelerator.device) / 2**30}


def add_samples(
    metrics: Metrics, samples: Samples, labels: Sequence[str], config: TrainingConfig
) -> None:
    """Adds the metrics of a rollout before its updates.

    Completions that no function scored are in no metric.
    """
    groups = samples.rewards_total.view(-1, config.num_generations)
    squares = ((groups - groups.nanmean(1, keepdim=True)) ** 2).nansum(1)
    std = (squares / (groups.isfinite().sum(1) - 1).clamp(min=0)).sqrt()  # NaN of fewer than 2
    metrics.add_own("reward", samples.rewards_total)
    metrics.add_own("reward_std", std)
    for label, column in zip(labels, samples.rewards.T, strict=True):
        metrics.add_own(f"reward/{label}", column)
    largest, smallest = groups.nan_to_num(-math.inf).amax(1), groups.nan_to_num(math.inf).amin(1)
    metrics.add_own("groups_equal", largest <= smallest)
    metrics.add_own("completion_length", [sum(c.sampled_flags) for c in samples.completions])
    metrics.add_own("truncated", [not c.ended for c in samples.completions])
    if samples.correct:
        metrics.add_own("accuracy", samples.correct)
    if samples.timed_out:
        metrics.add_own("answers_timed_out", [samples.timed_out])


def support_metrics(sizes: Tensor) -> dict[str, float]:
    """Metrics of the supports of a rollout, from the sizes of its kept sets."""
    if not len(sizes):
        return {}
    sizes = sizes.cpu().double()
    return {
        "support/mean": float(sizes.mean()),
        "support/p99": float(masked_quantile(sizes, torch.ones_like(sizes), 0.99)),
        "support/singletons": float((sizes == 1).double().mean()),
    }


def update_metrics(
    samples: Samples, scores: Scores, rows: Sequence[int], policy: Mapping[str, Tensor],
    config: TrainingConfig, accelerator: Accelerator,
) -> dict[str, float]:  # fmt: skip
    """Computes the metrics of an update's loss, over all processes; each makes this call.

    `rows`: this process's completions in the update. `policy`: its `logps`, `entropy` and, with an
    exact KL, `kl`, `[B, T]`.
    """
    values = _gather_update_tokens(samples, scores, rows, policy, accelerator)
    kl, has_set = values.pop("kl", None), values.pop("has_set", None)
    # The call refuses -inf. The metric `zero_gradient` needs gradients.
    logps = values.pop("logps").clamp(min=torch.finfo(torch.float32).min).requires_grad_()
    values["entropy"].requires_grad_()
    advantages = values.pop("advantages")[:, 0]
    loss = loss_config(config, scores)
    if loss.exact_kl:  # its values are known, and a call would need the reference to make them
        loss = replace(loss, beta=0.0, kl_estimator="k3")
    options: dict[str, Any] = {"config": loss, **values}
    with ranks.raise_on_all_ranks(accelerator, StepError):
        out = call_loss(config, partial(grpo_loss, logps, advantages, **options))
    metrics = dict(out.metrics)
    chosen = values["mask"] != 0
    if kl is not None and chosen.any():
        metrics |= {"kl": kl[chosen].mean(), "kl_max": kl[chosen].max()}
    if has_set is not None:
        metrics["support/gathered"] = has_set[chosen].mean()
    numbers = torch.stack([x.double() for x in metrics.values()]).tolist()
    row = dict(zip(metrics, numbers, strict=True))
    # The mean over cross-entropy tokens is undefined without any.
    if not row.pop("ce_tokens", 0.0):
        row.pop("ce_nll", None)
    row.pop("ce_loss", None)
    return row if row["tokens"] else {k: row[k] for k in ("tokens", "ce_nll") if k in row}


def _gather_update_tokens(
    samples: Samples, scores: Scores, rows: Sequence[int], policy: Mapping[str, Tensor],
    accelerator: Accelerator,
) -> dict[str, Tensor]:  # fmt: skip
    """The values `[B, T]` of an update's tokens in all processes, by name."""
    mask = samples.mask
    local: dict[str, Tensor | None] = {
        **policy, "mask": mask, "advantages": samples.advantages[:, None].expand(mask.shape),
        "old_logps": scores.old_logps, "ref_logps": scores.ref_logps,
        "sampling_logps": samples.sampling_logps, "ce_weights": samples.ce_weights,
        "has_set": samples.has_set,
    }  # fmt: skip
    # A rollout may report some values in some processes only.
    here = {name for name, x in local.items() if x is not None}
    reported = ranks.reduce(accelerator, here, lambda everywhere: set[str]().union(*everywhere))
    unknown = {"sampling_logps": math.nan}  # 0 for the others
    where = to_device(torch.tensor(rows, dtype=torch.int64, device="cpu"), mask.device)
    planes = {
        name: torch.full_like(policy["logps"], unknown.get(name, 0.0)) if x is None else x.float()
        for name, x in local.items() if name in reported
    }  # fmt: skip
    stacked = torch.stack([*planes.values()])[:, where]
    return dict(zip(planes, ranks.join(accelerator, stacked).unbind(), strict=True))

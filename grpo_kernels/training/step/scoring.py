"""Log-probs of a rollout before its updates, and the micro-batches of every forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ... import check_sampler
from ...base.sequences import masked_quantile
from ...head.lm_head import LOGITS_DTYPES, Reference
from ..run import ranks
from ..run.run import Run
from ..sampling.completions import RolloutError
from .micro_batches import Plan, pad_plan, plan_micro_batches
from .policy import Batch
from .reference_model import ReferenceModel
from .samples import Samples, Scores

# By the sampler's dtype: a mean gap to its log-probs below the first is always rounding, above the
# second never. Between the two a gap may be this many times the first step's.
GAPS = {"float32": (1e-4, 0.03), "float16": (0.02, 0.1), "bfloat16": (0.1, 0.3)}
TIMES_THE_FIRST_GAP = 4.0


class Scorer:
    """Scores the completions of a process by the policy, wrapped, and the reference of a KL."""

    def __init__(
        self, policy: Any, reference: ReferenceModel | None, run: Run, pad_id: int
    ) -> None:
        self.policy, self.reference, self.run, self.pad_id = policy, reference, run, pad_id
        self.config, self.accelerator = run.config, run.accelerator

    def plan(self, samples: Samples, rows: Sequence[int]) -> Plan:
        """Splits rows into micro-batches, equally many in every process."""
        shared = self.accelerator.unwrap_model(self.policy).shares_prompts
        plan = plan_micro_batches(
            rows, self.run.micro_batch_size, samples.prompt_of, list(map(len, samples.prompts)),
            samples.lengths, shared=shared,
        )  # fmt: skip
        return pad_plan(plan, ranks.reduce(self.accelerator, len(plan), max))

    def trainable_rows(
        self, samples: Samples, rows: Sequence[int], *, first_update: bool
    ) -> list[int]:
        """Returns the completions of `rows` that an update does not skip."""
        c = self.config
        if not (c.skip_untrained and c.loss_config().gradient_needs_advantage):
            return list(rows)
        trainable = [i for i in rows if samples.may_train[i]]
        if first_update and samples.sampling_logps is not None and not trainable:
            # A few rows with gradient 0, to measure the gap to the sampler.
            return [i for i in rows if samples.token_counts[i]][: c.micro_batch_size]
        return trainable

    def score(self, samples: Samples, minibatches: Plan) -> Scores:
        """Computes the log-probs and the threshold that updates on `minibatches` compare with."""
        config, scores = self.config, Scores()
        plan = self.plan(samples, range(len(samples.texts)))
        quantile_of_rollout = config.top_entropy_quantile < 1 and config.entropy_threshold is None
        # In a rollout's first update the policy is the one that sampled, and the ratio is 1.
        if config.minibatches > 1:  # in the update's parts, so that states have the same bits
            parts = [
                part for i, rows in enumerate(minibatches)
                for part in self.plan(
                    samples, self.trainable_rows(samples, rows, first_update=i == 0)
                )
            ]  # fmt: skip
        with self.run.interruptions.guard():
            if config.minibatches > 1:
                scores = replace(scores, old_logps=self._logps(self.policy, samples, parts)[0])
            if quantile_of_rollout:
                _, entropy = self._logps(self.policy, samples, plan, entropy=True)
            if self.reference is not None and not config.loss_config().exact_kl:
                with self.reference.active(self.policy) as reference:
                    scores = replace(scores, ref_logps=self._logps(reference, samples, plan)[0])
        if quantile_of_rollout:
            sampled = entropy[samples.mask != 0].cpu()
            sampled = ranks.reduce(self.accelerator, sampled, torch.cat)
            quantile = 1 - config.top_entropy_quantile
            threshold = masked_quantile(sampled, torch.ones_like(sampled), quantile)
            scores = replace(scores, entropy_threshold=float(threshold))
        return scores

    def logps(self, samples: Samples) -> Tensor:
        """The current policy's log-probs of all completions, `[B, T]`."""
        plan = self.plan(samples, range(len(samples.texts)))
        return self._logps(self.policy, samples, plan)[0]

    def reference_of(self, batch: Batch) -> Reference | None:
        """Returns the reference's states of a micro-batch and its head, if the KL is exact."""
        if self.reference is None or not self.config.loss_config().exact_kl:
            return None
        with self.reference.active(self.policy) as reference:
            return reference("as_reference", batch)

    def compare_roundings(self, samples: Samples) -> None:
        """Warns if the sampler rounds its logits, as the policy does not."""
        if samples.sampling_logps is None or ranks.gemm_dtype(self.config) == "float32":
            return
        part, *_ = self.plan(samples, range(len(samples.texts)))
        with self.run.interruptions.guard():
            by_policy = [
                self._logps(self.policy, samples, [part], logits_dtype=x)[0] for x in LOGITS_DTYPES
            ]
        tensors = (samples.sampling_logps, *by_policy, samples.mask)
        sampled, fp32, model, mask = (x[part] for x in tensors)
        check = check_sampler(sampled, fp32, model, mask) if mask.any() else None
        if check is not None and check.closer == "model":
            self.run.warn(
                f"{str(check).removesuffix(check.advice)}the sampler rounds its logits and the "
                "policy does not: set is_correction to token_truncate, or give a sampler of your "
                "own a head in float32"
            )

    def _logps(
        self, policy: Any, samples: Samples, plan: Plan, entropy: bool = False,
        logits_dtype: str = "fp32",
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Computes `[B, T]` log-probs under the policy, and entropies (0 unless asked for)."""
        logps, entropies = torch.zeros(
            2, *samples.mask.shape, dtype=torch.float32, device=samples.mask.device
        )
        for part in plan:
            batch, where = samples.batch(part, self.pad_id)
            with self.accelerator.autocast():
                part_logps, part_entropy = policy(
                    "logps", batch, entropy, logits_dtype=logits_dtype
                )
            if part:
                logps[where, : part_logps.shape[1]] = part_logps
            if part and entropy:
                entropies[where, : part_logps.shape[1]] = part_entropy
        return logps, entropies


def checked_gap(row: Mapping[str, float], dtype: str | None, run: Run) -> dict[str, float]:
    """Returns the gap between the log-probs of sampler and policy, before the first update.

    `row`: metrics of the loss. `dtype`: its rounding explains a gap; None: any gap is explained.

    Raises:
        RolloutError: the gap is larger than the dtype explains.
    """
    mean, largest = (row.get(f"sampling/sampling_logp_difference/{x}") for x in ("mean", "max"))
    if mean is None or largest is None:
        return {}
    if dtype is not None:
        always, never = GAPS[dtype]
        first = run.keep_first_gap(mean)
        limit = min(never, max(always, TIMES_THE_FIRST_GAP * first))
        if not mean <= limit:
            raise RolloutError(
                f"sampler_gap: log-probs of sampler and policy differ by {mean:.2g} on average, "
                f"{largest:.2g} at most; {dtype} explains {limit:.2g} (first step: "
                f"{first:.2g}). The sampler has other weights, another model or another "
                "precision. Nothing was trained on these samples"
            )
    return {"sampler_gap": mean, "sampler_gap_max": largest}

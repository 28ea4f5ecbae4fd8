"""Explains steps of TRL's trainer with this library's head, token by token.

trainer = FusedGRPOTrainer(...)
trainer.add_callback(ExplainCallback(trainer, every=100))
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import TrainerCallback

from ...base.outputs import GRPOLossOutput
from ...explain import Explanation, explain, join
from ...explain.steps import ExplainedSteps
from ..transformers import Objective
from .state import state_of

_INPUTS = (
    "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "sampling_per_token_logps",
    "importance_sampling_ratio",
)  # fmt: skip
_NO_BOUND = torch.finfo(torch.float32).max


@contextmanager
def _harmless(consequence: str) -> Iterator[None]:
    """Turns errors into warnings: an explanation that fails never ends a run."""
    try:
        yield
    except Exception as error:
        warnings.warn(f"{consequence}: {error}", stacklevel=3)


class ExplainCallback(TrainerCallback):
    """Writes pages that show which tokens a step's loss and gradient come from.

    A page shows the completions of the main process. The callback sees logged steps only: with
    `logging_steps` above 1 it misses spikes between two logs.

    Args:
        trainer: a `FusedGRPOTrainer`, or a trainer constructed under `patch_trl`.
        folder: the folder of `explanations/`; None: the trainer's `output_dir`.
        every, factor, most: as in `grpo_kernels.explain.steps.ExplainedSteps`.

    Raises:
        ValueError: another trainer.
    """

    def __init__(
        self, trainer: Any, *, folder: str | None = None, every: int = 0, factor: float = 5.0,
        most: int = 5,
    ) -> None:  # fmt: skip
        state = state_of(trainer)
        if state is None:
            raise ValueError(
                "trainer: expected a FusedGRPOTrainer, or one constructed under patch_trl; got "
                f"{type(trainer).__name__}"
            )
        self.steps = ExplainedSteps(
            folder or trainer.args.output_dir, every=every, factor=factor, most=most
        )
        self.trainer, self.parts = trainer, list[tuple[Callable[[], Explanation], Any]]()
        self.groups: dict[str, int] = {}  # by the prompt
        state.explainer = self

    def add(
        self, inputs: dict[str, Any], out: Any, loss: torch.Tensor, objective: Objective, scale: Any
    ) -> None:
        """Stores the inputs and results of a micro-batch's loss until the next step begins."""
        if self.trainer.model.training and self.trainer.accelerator.is_main_process:
            logps, entropy = out.logps.detach(), out.entropy.detach()
            values = GRPOLossOutput(loss.detach() / scale, {}, logps, entropy, kl=out.kl)
            seen = {name: inputs[name] for name in _INPUTS if name in inputs}
            self.parts.append((partial(self._explain, seen, values, objective), scale))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer.accelerator.is_main_process:
            with _harmless("the steps before are not known to explanations"):
                self.steps.open(state.log_history)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.parts.clear()
        self.groups.clear()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not self.parts or "grad_norm" not in (logs or {}):  # of an evaluation, say
            return
        why = self.steps.why({**logs, "step": state.global_step})
        if why is None:
            return
        with _harmless(f"step {state.global_step} is not explained"):
            parts, scales = zip(*self.parts, strict=True)
            explanation = join([part() for part in parts], list(map(float, scales)))
            record = self.steps.write(state.global_step, why, explanation)
            message = self.steps.message(state.global_step, record)
            print("warning: " * record["spike"] + message)

    def _explain(
        self, inputs: dict[str, Any], out: GRPOLossOutput, objective: Objective
    ) -> Explanation:
        trainer, ids, options = self.trainer, inputs["completion_ids"], objective.loss_arguments
        assert objective.advantages is not None
        names = ("old_logps", "ref_logps", "num_items")
        sampling = inputs.get("sampling_per_token_logps")
        more = {
            "off_policy_threshold": trainer.off_policy_mask_threshold,
            "top_entropy_quantile": trainer.top_entropy_quantile,
        }
        if trainer.loss_type == "vespo" and "importance_sampling_ratio" in inputs:
            # The log-probs of a sampler with TRL's weights, which are bounded already.
            assert out.logps is not None
            old_logps = options.get("old_logps", out.logps)
            sampling = old_logps - inputs["importance_sampling_ratio"].log()
            more |= {"is_correction": "token_truncate", "is_clip_max": _NO_BOUND}
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        rows = zip(inputs["prompt_ids"], inputs["prompt_mask"].bool(), strict=True)
        prompts = [tokenizer.decode(row[mask]) for row, mask in rows]
        ends = getattr(trainer, "eos_token_ids", None) or [trainer.eos_token_id]
        ended = torch.isin(ids, ids.new_tensor(ends)) & inputs["completion_mask"].bool()
        return explain(
            out, ids, objective.advantages, objective.mask, sampling_logps=sampling,
            config=replace(objective.config, **more),
            groups=[self.groups.setdefault(x, len(self.groups)) for x in prompts],
            truncated=~ended.any(1), prompts=prompts, tokenizer=tokenizer,
            **{name: options[name] for name in names if name in options},
        )  # fmt: skip

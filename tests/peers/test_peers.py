"""Loss, metrics, gradients of log-probs, and advantages equal TRL's, run in its own code.

Liger's are in `test_liger.py`; those of hidden states follow, as the fast tier compares.
"""

import inspect
import textwrap
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from grpo_kernels import group_advantages, grpo_loss, reference
from tests.helpers.batches import Batch, Result, clean, config, make_batch, relative_error

pytest.importorskip("trl", reason="needs the extra 'test'")
from trl.trainer import grpo_trainer
from trl.trainer.grpo_trainer import GRPOTrainer

SHARED = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
CORRECTIONS = {
    "none": {},
    "token_truncate": {"is_correction": "token_truncate", "is_clip_max": 1.1, "is_clip_min": 0.8},
    "token_mask": {"is_correction": "token_mask", "is_clip_max": 1.1},
    "sequence_truncate": {"is_correction": "sequence_truncate", "is_clip_max": 1.2},
    "sequence_mask": {"is_correction": "sequence_mask", "is_clip_max": 3.0, "is_clip_min": 0.9},
    "off_policy": {"off_policy_threshold": 0.02},
    "top_entropy": {"top_entropy_quantile": 0.4},
    "entropy_bonus": {"entropy_coef": 0.1},
    "all": {"is_correction": "token_truncate", "is_clip_max": 1.1, "off_policy_threshold": 0.02,
            "top_entropy_quantile": 0.6, "entropy_coef": 0.1},
}  # fmt: skip


def batch_of(seed=5) -> Batch:
    """Sixteen sequences of different lengths, one of them all masked, one with a hole."""
    batch, g = make_batch(B=16, T=13, seed=seed), torch.Generator().manual_seed(seed)
    # Whole sequences have moved, too, so that their ratios are clipped.
    noise = 0.3 * torch.randn(16, 13, generator=g) + 0.25 * torch.randn(16, 1, generator=g)
    batch.old_logps, batch.sampling_logps = batch.old_logps + noise, batch.sampling_logps + noise
    return batch


def options_of(loss_type, level, delta, beta, correction):
    """The config's options, or None where the combination is refused."""
    correction = CORRECTIONS[correction]
    sequence_weights = correction.get("is_correction", "").startswith("sequence")
    if (
        (level == "sequence" and loss_type in ("sapo", "vespo"))
        or (delta is not None and loss_type not in CLIPPED)
        or (loss_type == "vespo" and sequence_weights)
    ):
        return None
    options = {"loss_type": loss_type, "importance_sampling_level": level, **correction}
    if loss_type not in ("sapo", "vespo"):
        options["epsilon_high"] = 1.15 if loss_type == "cispo" else 0.28
    return {**options, "delta": delta, "beta": beta}


# The part of an accelerator that TRL's loss asks for.
ONE_PROCESS = SimpleNamespace(
    num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x,
    pad_across_processes=lambda x, dim, pad_index: x,
)  # fmt: skip


def by_trl(cfg, batch, num_items=None) -> Result:
    """Runs `GRPOTrainer._compute_loss` on chosen log-probs and entropies; gradients are theirs."""
    leaves, mask = log_prob_leaves(batch), batch.mask
    old, ref, sampling = (
        clean(x, mask) for x in (batch.old_logps, batch.ref_logps, batch.sampling_logps)
    )
    options = vars(cfg)
    args = {k: x for k, x in options.items() if k.startswith(("sapo_", "vespo_"))}
    trainer = SimpleNamespace(
        **options | {
            "epsilon_low": cfg.epsilon,
            "epsilon_high": cfg.epsilon if cfg.epsilon_high is None else cfg.epsilon_high,
        },
        off_policy_mask_threshold=cfg.off_policy_threshold,
        _entropy_bonus_enabled=cfg.entropy_coef != 0, use_adaptive_entropy=False,
        aux_loss_enabled=False, use_vllm=cfg.is_correction != "none",
        vllm_importance_sampling_correction=True, current_gradient_accumulation_steps=1,
        accelerator=ONE_PROCESS, model=SimpleNamespace(training=False),
        args=SimpleNamespace(
            steps_per_generation=1, delta=cfg.delta,
            use_bias_correction_kl=cfg.use_bias_correction_kl, **args,
        ),
        _metrics={"eval": defaultdict(list)},
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *_, **__: (leaves["l"], leaves["e"], None),
    )  # fmt: skip
    trainer.get_high_entropy_mask = GRPOTrainer.get_high_entropy_mask.__get__(trainer)
    inputs = {
        "prompt_ids": torch.zeros(len(mask), 1), "prompt_mask": torch.zeros(len(mask), 1),
        "completion_ids": mask.long(), "completion_mask": mask.double(),
        "advantages": batch.advantages.double(), "old_per_token_logps": old,
        "ref_per_token_logps": ref, "sampling_per_token_logps": sampling,
        "num_items_in_batch": torch.tensor(float(mask.sum() if num_items is None else num_items)),
    }  # fmt: skip
    if trainer.use_vllm:
        limits = {"clip_min": cfg.is_clip_min, "clip_max": cfg.is_clip_max}
        options = {"mode": cfg.is_correction, **limits}
        inputs["importance_sampling_ratio"] = trl_lines(
            "per_token_logps_diff = ", "# Compute the per-token log probabilities for the ref",
            {f"vllm_importance_sampling_{name}": x for name, x in options.items()},
            old_per_token_logps=old, sampling_per_token_logps=sampling, mask=mask,
        )["vllm_importance_sampling_ratio"]  # fmt: skip
    loss = GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
    loss.backward()
    metrics = {name: values[0] for name, values in trainer._metrics["eval"].items()}
    grads = {k: x.grad for k, x in leaves.items()}
    return Result(loss.detach(), metrics, leaves["l"].detach(), grads)


def trl_lines(begin, end, trainer, **names):
    """Runs lines of TRL's generation step, which make inputs of the loss, on names."""
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    start = source.rindex("\n", 0, source.index(begin)) + 1
    stop = source.rindex("\n", 0, source.index(end, start))
    scope = {**vars(grpo_trainer), "self": SimpleNamespace(**trainer), **names}
    exec(textwrap.dedent(source[start:stop]), scope)
    return scope


def log_prob_leaves(batch, dtype=torch.float64):
    g = torch.Generator().manual_seed(1)
    noise = (0.4 * torch.randn(2, *batch.mask.shape, generator=g)).double()
    shift = 0.25 * torch.randn(len(batch.mask), 1, generator=g)
    logps = clean(batch.old_logps, batch.mask) + noise[0] + shift
    return {x: y.to(dtype).requires_grad_() for x, y in (("l", logps), ("e", 2 + noise[1]))}


def by_us(cfg, batch, call=grpo_loss, num_items=None, dtype=torch.float32) -> Result:
    kwargs = {"old_logps": batch.old_logps, "ref_logps": batch.ref_logps}
    if cfg.is_correction != "none" or cfg.off_policy_threshold is not None:
        kwargs["sampling_logps"] = batch.sampling_logps
    kwargs = {k: x.to(dtype) for k, x in kwargs.items()}
    leaves = log_prob_leaves(batch, dtype)
    out = call(
        leaves["l"], batch.advantages, batch.mask, entropy=leaves["e"], config=cfg,
        num_items=num_items, **kwargs,
    )  # fmt: skip
    out.loss.backward()
    return Result(out.loss.detach(), out.metrics, out.logps, {k: x.grad for k, x in leaves.items()})


def assert_same_as_trl(cfg, batch, num_items=None):
    """The reference in TRL's dtype, but for the order of additions; ours in float32."""
    theirs = by_trl(cfg, batch, num_items)
    assert theirs.gradients["l"].norm() > 0
    # TRL rounds the two temperatures of sapo to float32.
    exact = 1e-6 if cfg.loss_type == "sapo" else 1e-9
    for call, dtype, tolerance in (
        (grpo_loss, torch.float32, 1e-5), (reference.grpo_loss, torch.float64, exact)
    ):  # fmt: skip
        ours = by_us(cfg, batch, call, num_items, dtype)
        # The terms of a loss are of the order of 1, and what is left of them may be little.
        assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=tolerance, abs=tolerance)
        for name, expected in theirs.gradients.items():
            grad = ours.gradients[name]
            if expected is None:
                assert grad is None or not grad.any(), name
                continue
            assert grad is not None and relative_error(grad, expected) <= tolerance, name


CASES = [
    case
    for loss_type in SHARED
    for level in ("token", "sequence")
    for delta, beta in ((None, 0.1), (1.35, 0.0))
    for name in CORRECTIONS
    if options_of(*(case := (loss_type, level, delta, beta, name)))
]


@pytest.mark.parametrize(("loss_type", "level", "delta", "beta", "correction"), CASES)
def test_trl(loss_type, level, delta, beta, correction):
    cfg = config(**options_of(loss_type, level, delta, beta, correction))
    batch = batch_of()
    assert_same_as_trl(cfg, batch, 37 if cfg.effective_aggregation == "dapo" else None)
    # TRL counts a sequence of no tokens as one that was not clipped, of weight 1.
    keep = batch.mask.any(1)
    per_row = {k: x[keep] for k, x in vars(batch).items() if x is not None and len(x) == len(keep)}
    batch = replace(batch, **per_row)
    metrics, ours = by_trl(cfg, batch).metrics, by_us(cfg, batch).metrics
    assert metrics.keys() - {"policy_loss", "entropy_coef"} <= ours.keys()
    assert {"entropy", *(["kl"] if beta else [])} <= metrics.keys()
    for name, value in metrics.items():
        if name in ours:
            assert ours[name].item() == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("loss_type", ("grpo", "dapo", "vespo"))
def test_advantages_per_token(loss_type):
    cfg, batch = config(loss_type=loss_type, use_bias_correction_kl=False), batch_of()
    g = torch.Generator().manual_seed(0)
    batch.advantages = torch.randn(batch.mask.shape, generator=g)
    assert_same_as_trl(cfg, batch)


@pytest.mark.parametrize("missing", (False, True))
@pytest.mark.parametrize("group_size", (1, 2, 4))
@pytest.mark.parametrize("scale", ("group", "batch", "none", "normalize_then_sum"))
def test_trl_advantages(scale, group_size, missing):
    g = torch.Generator().manual_seed(group_size)
    rewards = torch.rand(16, 3, generator=g, dtype=torch.float64)
    rewards[8:12] = 0.5  # a group of equal rewards, but for group_size 1
    if missing:
        rewards[torch.rand(16, 3, generator=g) < 0.3] = float("nan")
        rewards[2] = float("nan")
    weights, aggregation = [1.0, 0.5, 2.0], "sum_then_normalize"
    if scale == "normalize_then_sum":
        scale, aggregation = "group", scale
    theirs = trl_lines(
        "unscorable_mask = ", "# Slice to keep only the local part",
        {"multi_objective_aggregation": aggregation, "scale_rewards": scale,
         "reward_weights": torch.tensor(weights, dtype=rewards.dtype), "reward_funcs": weights},
        rewards_per_func=rewards, device="cpu", num_generations=group_size,
    )["advantages"]  # fmt: skip
    ours = group_advantages(
        rewards, group_size, scale=scale, weights=weights, aggregation=aggregation
    )
    torch.testing.assert_close(ours, theirs.float(), rtol=1e-5, atol=1e-6)
    assert group_size == 1 or ours.abs().sum() > 1

"""Loss and gradients equal TRL's and Liger's, theirs run in their own code on the same batch.

Where a peer is wrong the test says so, and compares with the definition.
"""

import inspect
import textwrap
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from grpo_kernels import group_advantages, grpo_loss
from tests.helpers.batches import Batch, Result, clean, config, make_batch, relative_error

pytest.importorskip("trl", reason="needs the extra 'test'")
pytest.importorskip("liger_kernel", reason="needs the extra 'test'")
from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss
from trl.trainer import grpo_trainer
from trl.trainer.grpo_trainer import GRPOTrainer

from tests.helpers.flat_calls import fused_grpo_loss, reference

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
    "all": {
        "is_correction": "token_truncate",
        "is_clip_max": 1.1,
        "off_policy_threshold": 0.02,
        "top_entropy_quantile": 0.6,
        "entropy_coef": 0.1,
    },
}


def batch_of(seed=5) -> Batch:
    """Sixteen sequences of different lengths, one of them all masked, one with a hole."""
    batch, g = make_batch(B=16, T=13, seed=seed), torch.Generator().manual_seed(seed)
    # Whole sequences have moved, too, so that their ratios are clipped.
    noise = 0.3 * torch.randn(16, 13, generator=g) + 0.25 * torch.randn(16, 1, generator=g)
    batch.old_logps, batch.sampling_logps = batch.old_logps + noise, batch.sampling_logps + noise
    return batch


def options_of(loss_type, level, delta, beta, correction):
    """The config's options, or None where the combination is refused."""
    options = {"loss_type": loss_type, "importance_sampling_level": level, **correction}
    if level == "sequence" and loss_type in ("sapo", "vespo"):
        return None
    if delta is not None and loss_type not in CLIPPED:
        return None
    if loss_type == "vespo" and str(correction.get("is_correction")).startswith("sequence"):
        return None
    if loss_type != "sapo" and loss_type != "vespo":
        options["epsilon_high"] = 1.15 if loss_type == "cispo" else 0.28
    return {**options, "delta": delta, "beta": beta}


class OneProcess:
    """The part of an accelerator that TRL's loss asks for."""

    num_processes = 1

    def reduce(self, x, reduction):
        return x

    def gather(self, x):
        return x

    def pad_across_processes(self, x, dim, pad_index):
        return x


def trl_loss(cfg, batch, logps, entropy, num_items):
    """`GRPOTrainer._compute_loss` of chosen log-probs and entropies, and what it logs."""
    mask = batch.mask
    old, ref = clean(batch.old_logps, mask), clean(batch.ref_logps, mask)
    sampling = clean(batch.sampling_logps, mask)
    trainer = SimpleNamespace(
        loss_type=cfg.loss_type,
        beta=cfg.beta,
        epsilon_low=cfg.epsilon,
        epsilon_high=(cfg.epsilon if cfg.epsilon_high is None else cfg.epsilon_high),
        importance_sampling_level=cfg.importance_sampling_level,
        max_completion_length=cfg.max_completion_length,
        top_entropy_quantile=cfg.top_entropy_quantile,
        off_policy_mask_threshold=cfg.off_policy_threshold,
        entropy_coef=cfg.entropy_coef,
        _entropy_bonus_enabled=cfg.entropy_coef != 0,
        use_adaptive_entropy=False,
        aux_loss_enabled=False,
        use_vllm=cfg.is_correction != "none",
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        accelerator=OneProcess(),
        model=SimpleNamespace(training=False),
        args=SimpleNamespace(
            delta=cfg.delta,
            use_bias_correction_kl=cfg.use_bias_correction_kl,
            steps_per_generation=1,
            **{
                name: getattr(cfg, name)
                for name in vars(cfg)
                if name.startswith(("sapo_", "vespo_"))
            },
        ),
        _metrics={"eval": defaultdict(list)},
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (logps, entropy, None),
    )
    trainer.get_high_entropy_mask = GRPOTrainer.get_high_entropy_mask.__get__(trainer)
    count = torch.tensor(float(mask.sum() if num_items is None else num_items))
    inputs = {
        "prompt_ids": torch.zeros(len(mask), 1),
        "prompt_mask": torch.zeros(len(mask), 1),
        "completion_ids": mask.long(),
        "completion_mask": mask.double(),
        "advantages": batch.advantages.double(),
        "old_per_token_logps": old,
        "ref_per_token_logps": ref,
        "sampling_per_token_logps": sampling,
        "num_items_in_batch": count,
    }
    if cfg.is_correction != "none":
        inputs["importance_sampling_ratio"] = importance_weights(cfg, old, sampling, mask)
    loss = GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
    return loss, {name: values[0] for name, values in trainer._metrics["eval"].items()}


def trl_lines(begin, end):
    """Lines of TRL's generation step, which makes some of the loss's inputs on its way."""
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    start = source.rindex("\n", 0, source.index(begin)) + 1
    stop = source.index(end, start)
    return textwrap.dedent(source[start : source.rindex("\n", 0, stop)])


def importance_weights(cfg, old, sampling, mask):
    """The inputs that TRL's generation step hands to its loss: [B, T] or [B, 1]."""
    trainer = SimpleNamespace(
        vllm_importance_sampling_mode=cfg.is_correction,
        vllm_importance_sampling_clip_min=cfg.is_clip_min,
        vllm_importance_sampling_clip_max=cfg.is_clip_max,
    )
    scope = {
        **vars(grpo_trainer), "self": trainer, "old_per_token_logps": old, "mask": mask,
        "sampling_per_token_logps": sampling,
    }  # fmt: skip
    exec(
        trl_lines(
            "per_token_logps_diff = ", "# Compute the per-token log probabilities for the reference"
        ),
        scope,
    )
    return scope["vllm_importance_sampling_ratio"]


def by_trl(cfg, batch, num_items=None, *, head=False) -> Result:
    """Runs TRL with gradients for log-probs and entropy, or with `head` for hidden and weight."""
    if head:
        leaves = {
            name: getattr(batch, name).double().nan_to_num().requires_grad_()
            for name in ("hidden", "weight")
        }
        out = reference.linear_logprobs(
            leaves["hidden"], leaves["weight"], batch.targets, mask=batch.mask
        )
        logps, entropy = out.logps, out.entropy
    else:
        leaves = log_prob_leaves(batch)
        logps, entropy = leaves.values()
    loss, metrics = trl_loss(cfg, batch, logps, entropy, num_items)
    loss.backward()
    return Result(loss.detach(), metrics, logps.detach(), {k: x.grad for k, x in leaves.items()})


def log_prob_leaves(batch, dtype=torch.float64):
    g = torch.Generator().manual_seed(1)
    noise = (0.4 * torch.randn(2, *batch.mask.shape, generator=g)).double()
    shift = 0.25 * torch.randn(len(batch.mask), 1, generator=g)
    logps = clean(batch.old_logps, batch.mask) + noise[0] + shift
    return {x: y.to(dtype).requires_grad_() for x, y in (("l", logps), ("e", 2 + noise[1]))}


def by_us(cfg, batch, call, num_items=None, dtype=torch.float32) -> Result:
    given = {"old_logps": batch.old_logps, "ref_logps": batch.ref_logps}
    if cfg.is_correction != "none" or cfg.off_policy_threshold is not None:
        given["sampling_logps"] = batch.sampling_logps
    given = {k: x.to(dtype) for k, x in given.items()}
    options = {"config": cfg, "num_items": num_items, **given}
    if call is fused_grpo_loss:
        leaves = {n: getattr(batch, n).clone().requires_grad_() for n in ("hidden", "weight")}
        out = call(*leaves.values(), batch.targets, batch.advantages, batch.mask, **options)
    else:
        leaves = log_prob_leaves(batch, dtype)
        out = call(leaves["l"], batch.advantages, batch.mask, entropy=leaves["e"], **options)
    out.loss.backward()
    return Result(out.loss.detach(), out.metrics, out.logps, {k: x.grad for k, x in leaves.items()})


def assert_same(ours, theirs, tolerance):
    # The terms of a loss are of the order of 1, and what is left of them may be little.
    assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=tolerance, abs=tolerance)
    for name, expected in theirs.gradients.items():
        mine = ours.gradients[name]
        if expected is None:
            assert mine is None or not mine.any(), name
            continue
        assert mine is not None and relative_error(mine, expected) <= tolerance, name


def test_the_batch_has_everything():
    """Padding, an all-masked row, a hole, every sign, tokens clipped on either side or not."""
    batch = batch_of()
    lengths = batch.mask.sum(1)
    assert (lengths == 0).any() and len(lengths.unique()) > 3
    assert batch.mask[0].diff().int().abs().sum() >= 2 and batch.sampling_logps[0, 0].isnan()
    for sign in (-1, 0, 1):
        assert (batch.advantages.sign() == sign).any()
    for level in ("token", "sequence"):
        for call in (grpo_loss, fused_grpo_loss):
            cfg = config(loss_type="grpo", importance_sampling_level=level, epsilon_high=0.28)
            metrics = by_us(cfg, batch, call).metrics
            assert metrics["clip_low"] > 0 and metrics["clip_high"] > 0
            assert metrics["clip_low"] + metrics["clip_high"] < 0.7
            assert metrics["ratio_max"] > 1.35


CASES = [
    (loss_type, level, delta, beta, name)
    for loss_type in SHARED
    for level in ("token", "sequence")
    for delta in (None, 1.35)
    for beta in (0.0, 0.1)
    for name in CORRECTIONS
    if options_of(loss_type, level, delta, beta, CORRECTIONS[name])
]


@pytest.mark.parametrize(("loss_type", "level", "delta", "beta", "correction"), CASES)
def test_trl(loss_type, level, delta, beta, correction):
    cfg = config(**options_of(loss_type, level, delta, beta, CORRECTIONS[correction]))
    batch = batch_of()
    num_items = 37 if cfg.effective_aggregation == "dapo" else None
    theirs = by_trl(cfg, batch, num_items)
    assert theirs.gradients["l"].norm() > 0
    assert_same(by_us(cfg, batch, grpo_loss, num_items), theirs, 1e-5)
    # In one dtype the two are the same but for the order of additions; TRL rounds the two
    # temperatures of sapo to float32, however.
    tolerance = 1e-6 if loss_type == "sapo" else 1e-9
    ours = by_us(cfg, batch, reference.grpo_loss, num_items, torch.float64)
    assert_same(ours, theirs, tolerance)


# The corrections are those of test_trl: `fused_grpo_loss` is `grpo_loss` of the head's log-probs,
# which the fast tier compares.
HEAD_CASES = [
    (loss_type, level, name)
    for loss_type in SHARED
    for level in ("token", "sequence")
    for name in ("none", "all")
    if options_of(loss_type, level, None, 0.1, CORRECTIONS[name])
]


@pytest.mark.parametrize(("loss_type", "level", "correction"), HEAD_CASES)
def test_trl_from_hidden_states(loss_type, level, correction):
    cfg = config(**options_of(loss_type, level, None, 0.1, CORRECTIONS[correction]))
    batch = batch_of()
    num_items = 37 if cfg.effective_aggregation == "dapo" else None
    theirs = by_trl(cfg, batch, num_items, head=True)
    assert_same(by_us(cfg, batch, fused_grpo_loss, num_items), theirs, 1e-5)


@pytest.mark.parametrize("level", ("token", "sequence"))
@pytest.mark.parametrize("correction", ("none", "off_policy", "top_entropy"))
@pytest.mark.parametrize("loss_type", SHARED)
def test_trl_metrics(loss_type, level, correction):
    options = options_of(loss_type, level, None, 0.1, CORRECTIONS[correction])
    if options is None:
        pytest.skip("refused")
    batch = batch_of()
    if level == "sequence" or loss_type == "vespo":
        # TRL counts a sequence of no tokens as one that was not clipped, of weight 1.
        keep = batch.mask.any(1)
        batch = Batch(
            **{k: x if x is None or k in ("weight", "bias") else x[keep]
               for k, x in vars(batch).items()}
        )  # fmt: skip
    cfg = config(**options)
    theirs = by_trl(cfg, batch).metrics
    ours = by_us(cfg, batch, grpo_loss).metrics
    assert theirs.keys() - {"policy_loss", "entropy_coef"} <= ours.keys()
    for name, value in theirs.items():
        assert ours[name].item() == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert {"kl", "entropy"} <= theirs.keys()


LIGER_CORRECTIONS = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
LIGER_CASES = [
    (loss_type, level, delta, beta, name)
    for loss_type in SHARED
    for level in ("token", "sequence")
    for delta in (None, 1.35)
    for beta in (0.0, 0.1)
    for name in LIGER_CORRECTIONS
    if options_of(loss_type, level, delta, beta, CORRECTIONS[name])
    and (loss_type, level) != ("cispo", "sequence")
]


def by_liger(cfg, batch, num_items=None, chunk_size=1) -> Result:
    mask = batch.mask
    liger = LigerFusedLinearGRPOLoss(
        compiled=False,
        chunk_size=chunk_size,
        use_ref_model=cfg.beta != 0,
        beta=cfg.beta,
        epsilon_low=cfg.epsilon,
        epsilon_high=(cfg.epsilon if cfg.epsilon_high is None else cfg.epsilon_high),
        loss_type=cfg.loss_type,
        max_completion_length=cfg.max_completion_length,
        importance_sampling_level=cfg.importance_sampling_level,
        delta=cfg.delta,
        use_bias_correction_kl=cfg.use_bias_correction_kl,
    )
    leaves = {n: getattr(batch, n).nan_to_num().requires_grad_() for n in ("hidden", "weight")}
    old, ref, sampling = (
        clean(x, mask).float() for x in (batch.old_logps, batch.ref_logps, batch.sampling_logps)
    )
    weights = None
    if cfg.is_correction != "none":
        weights = importance_weights(cfg, old, sampling, mask)
    loss, _ = liger(
        leaves["hidden"], leaves["weight"], batch.targets.clamp(min=0), mask.float(),
        batch.advantages,
        ref_per_token_logps=ref if cfg.beta else None, old_per_token_logps=old,
        vllm_is_ratio=weights, num_items_in_batch=num_items,
    )  # fmt: skip
    loss.backward()
    return Result(loss.detach(), {}, old, {k: x.grad for k, x in leaves.items()})


@pytest.mark.parametrize(("loss_type", "level", "delta", "beta", "correction"), LIGER_CASES)
def test_liger(loss_type, level, delta, beta, correction):
    options = options_of(loss_type, level, delta, beta, CORRECTIONS[correction])
    batch = batch_of()
    # Its own default, and TRL's.
    for bias_correction in (False, True)[: 2 if beta else 1]:
        cfg = config(**options, use_bias_correction_kl=bias_correction)
        num_items = 37 if cfg.effective_aggregation == "dapo" else None
        theirs, ours = (
            by_liger(cfg, batch, num_items),
            by_us(cfg, batch, fused_grpo_loss, num_items),
        )
        if loss_type == "luspo" and (level == "token" or beta or correction.startswith("token")):
            # Liger sums padded positions as well, so that theirs is wrong: TRL's is the definition.
            assert relative_error(ours.gradients["weight"], theirs.gradients["weight"]) > 1e-4
            theirs = by_trl(cfg, batch, num_items, head=True)
        assert_same(ours, theirs, 1e-5)


@pytest.mark.parametrize("loss_type", ("grpo", "dapo", "vespo"))
def test_advantages_per_token(loss_type):
    """TRL and the definition agree; Liger is right for one sequence at a time, except vespo."""
    cfg, batch = config(loss_type=loss_type, use_bias_correction_kl=False), batch_of()
    g = torch.Generator().manual_seed(0)
    batch.advantages = torch.randn(batch.mask.shape, generator=g)
    ours = by_us(cfg, batch, fused_grpo_loss)
    assert_same(ours, by_trl(cfg, batch, head=True), 1e-5)
    exact = by_us(cfg, batch, reference.grpo_loss, None, torch.float64)
    assert_same(exact, by_trl(cfg, batch), 1e-9)
    for chunk_size, right in ((1, loss_type != "vespo"), (2, False)):
        if loss_type == "vespo" and chunk_size == 2:
            continue  # an error about shapes
        theirs = by_liger(cfg, batch, chunk_size=chunk_size)
        error = relative_error(theirs.gradients["weight"], ours.gradients["weight"])
        assert error <= 1e-5 if right else error > 0.1


def trl_advantages(rewards, group_size, weights, scale, aggregation):
    """TRL makes them in the middle of its generation step; those lines of it, run alone."""
    trainer = SimpleNamespace(
        multi_objective_aggregation=aggregation,
        reward_weights=torch.tensor(weights, dtype=rewards.dtype),
        scale_rewards=scale,
        reward_funcs=list(weights),
    )
    scope = {
        **vars(grpo_trainer), "self": trainer, "rewards_per_func": rewards, "device": "cpu",
        "num_generations": group_size,
    }  # fmt: skip
    exec(trl_lines("unscorable_mask = ", "# Slice to keep only the local part"), scope)
    return scope["advantages"]


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
    weights = [1.0, 0.5, 2.0]
    aggregation = "sum_then_normalize" if scale != "normalize_then_sum" else scale
    scale = scale if aggregation == "sum_then_normalize" else "group"
    theirs = trl_advantages(rewards, group_size, weights, scale, aggregation)
    ours = group_advantages(
        rewards, group_size, scale=scale, weights=weights, aggregation=aggregation
    )
    torch.testing.assert_close(ours, theirs.float(), rtol=1e-5, atol=1e-6)
    assert group_size == 1 or ours.abs().sum() > 1

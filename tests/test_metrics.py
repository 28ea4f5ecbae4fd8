"""Metrics by hand; against TRL's they are in test_peers, between the calls everywhere."""

import copy
import importlib
import io
import math
import pickle
from collections.abc import Mapping

import pytest
import torch

from grpo_kernels import Reference, fused_distillation_loss, fused_grpo_loss, grpo_loss
from tests.helpers.batches import OBJECTIVES, config, make_batch, run_fused, with_cross_entropy

e, NAN = math.e, math.nan
DIFFERENCE = "sampling/sampling_logp_difference"
WEIGHT = "sampling/importance_sampling_ratio"


def metrics_of(logps, advantages, mask=None, **kwargs):
    tensors = {k: torch.tensor(kwargs.pop(k)) for k in [*kwargs]
             if k.endswith("logps") or k == "entropy"}  # fmt: skip
    logps = torch.tensor(logps, requires_grad=True)
    mask = None if mask is None else torch.tensor(mask)
    out = grpo_loss(logps, torch.tensor(advantages), mask, config=config(**kwargs), **tensors)
    return {k: v.item() for k, v in out.metrics.items()}


ZEROS = [[0.0, 0.0], [0.0, 0.0]]
CLIPPED = {
    "logps": [[0.5, -0.5, 0.5, -0.5, 0.0, 9.0], [0.5, 0.5, 0.0, 0.0, 9.0, 9.0]],
    "advantages": [[1.0, 1.0, -1.0, -1.0, 1.0, 1.0], [1.0] * 6],
    "mask": [[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]],
    "old_logps": [[0.0] * 6] * 2,
}
# A sequence of three tokens that is cut off, and one of one token that is not.
SEQUENCES = {
    "logps": [[0.5, 0.5, 0.5], [0.0, 9.0, 9.0]], "advantages": [1.0, 1.0],
    "mask": [[1, 1, 1], [1, 0, 0]], "old_logps": [[0.0] * 3] * 2,
}  # fmt: skip
# Two sequences of three tokens and of one; one token the sampler did not score.
SAMPLED = {
    "logps": [[0.0] * 3] * 2, "advantages": [1.0, 1.0], "mask": [[1, 1, 1], [1, 0, 0]],
    "old_logps": [[0.0, 0.0, 0.0], [-1.0, 7.0, 7.0]],
    "sampling_logps": [[0.1, -0.3, NAN], [0.0, 7.0, 7.0]],
}  # fmt: skip
SPIKE = {
    "logps": [[0.0, 0.0, 3.0, 0.0]], "advantages": [1.0], "old_logps": [[0.0] * 4],
    "ref_logps": [[0.0, 5.0, 3.0, 0.0]], "use_bias_correction_kl": False,
}  # fmt: skip
CASES = {
    "clip ratios": (
        CLIPPED,
        {"clip_high": 3 / 9, "clip_ratio/high_mean": 3 / 9, "clip_low": 1 / 9, "tokens": 9,
         "clip_ratio/low_mean": 1 / 9, "clip_ratio/region_mean": 4 / 9,
         "clip_ratio/high_max": 2 / 4, "clip_ratio/low_min": 0, "ratio_max": e**0.5},
    ),
    "a sequence counts once, however long: gspo": (
        {**SEQUENCES, "loss_type": "gspo"},
        {"clip_high": 1 / 2, "clip_ratio/high_mean": 1 / 2, "clip_ratio/region_mean": 1 / 2,
         "ratio_mean": (3 * e**0.5 + 1) / 4},
    ),
    "a sequence counts once, however long: cispo": (
        {**SEQUENCES, "loss_type": "cispo", "importance_sampling_level": "sequence"},
        {"clip_high": 1 / 2, "cispo_clip_ratio": 1 / 2, "ratio_mean": (3 * e**0.5 + 1) / 4},
    ),
    "spikes have a cause": (
        SPIKE,
        {"ratio_max": e**3, "ess": (3 + e**3) ** 2 / (4 * (3 + e**6)), "kl_max": e**5 - 6,
         "kl": (e**5 - 6) / 4, "zero_gradient": 1 / 4},
    ),
    **{
        f"effective sample size at e^{shift}": (
            {"logps": [[shift, shift + 1]], "advantages": [1.0], "old_logps": [[0.0, 0.0]]},
            {"ess": (1 + e) ** 2 / (2 * (1 + e * e))},
        )
        for shift in (60.0, -60.0)
    },
    "zero gradient": ({"logps": ZEROS, "advantages": [1.0, 0.0]}, {"zero_gradient": 1 / 2}),
    "the entropy's gradient counts": (
        {"logps": ZEROS, "advantages": [1.0, 0.0], "entropy": ZEROS, "entropy_coef": 0.1},
        {"zero_gradient": 0},
    ),
    "sampler": (
        {**SAMPLED, "is_correction": "token_truncate", "is_clip_max": 1.2},
        {f"{DIFFERENCE}/mean": (0.1 + 0.3 + 1.0) / 3, f"{DIFFERENCE}/max": 1.0,
         f"{WEIGHT}/mean": (e**-0.1 + 1.2 + 1.0 + e**-1) / 4, f"{WEIGHT}/min": e**-1,
         f"{WEIGHT}/max": 1.2},
    ),
    "sampler, a sequence counts once": (
        {**SAMPLED, "is_correction": "sequence_mask", "is_clip_min": 0.5},
        {f"{WEIGHT}/mean": e**0.2 / 2, f"{WEIGHT}/min": 0, f"{WEIGHT}/max": e**0.2},
    ),
    "sampler, a log-prob that rounds above 0": (
        {"logps": [[0.0]], "advantages": [1.0], "old_logps": [[1e-7]], "sampling_logps": [[-1.0]],
         "is_correction": "token_mask", "is_gate": "binary_kl", "is_clip_max": 1.0},
        {f"{WEIGHT}/mean": 0},
    ),
    "off-policy mask": (
        {"logps": ZEROS, "advantages": [-1.0, -1.0], "off_policy_threshold": 0.2,
         "old_logps": ZEROS, "sampling_logps": [[0.0, 0.0], [0.5, 0.5]]},
        {"off_policy_dropped": 1 / 2},
    ),
    "high-entropy mask": (
        {"logps": ZEROS, "advantages": [1.0, 1.0], "entropy": [[1.0, 2.0], [3.0, 4.0]],
         "top_entropy_quantile": 0.25},
        {"entropy_kept": 1 / 4, "entropy": 2.5},
    ),
    "cispo clips above only": (
        {"logps": [[1.0]], "advantages": [1.0], "old_logps": [[0.0]], "loss_type": "cispo",
         "epsilon_high": 2.0},
        {"cispo_clip_ratio": 1, "clip_high": 1, "clip_low": 0},
    ),
    "reinforce clips nothing": (
        {"logps": [[0.0]], "advantages": [1.0], "loss_type": "reinforce"},
        {"clip_high": 0, "clip_low": 0},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "expected"), CASES.values(), ids=CASES)
def test_by_hand(arguments, expected):
    metrics = metrics_of(**arguments)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    two_bounds = arguments.get("loss_type", "dapo") not in ("cispo", "reinforce")
    assert any("clip_ratio/" in name for name in metrics) == two_bounds


def test_absent_where_it_does_not_apply():
    metrics = grpo_loss(torch.zeros(2, 3), torch.ones(2)).metrics
    absent = {"kl", "kl_max", "entropy", "zero_gradient", "off_policy_dropped", "entropy_kept"}
    assert not absent & set(metrics)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_nothing_counted_is_zero_not_nan(objective):
    options, names = OBJECTIVES[objective]
    batch = make_batch()
    batch.mask = torch.zeros_like(batch.mask)
    out = run_fused(batch, exact=False, config=config(**options), **dict.fromkeys(names, True))
    assert out.loss == 0
    assert all(v.isfinite() for v in out.metrics.values())
    assert all(v.ndim == 0 and v.dtype == torch.float32 for v in out.metrics.values())


# When they are computed

TENSORS = ("advantages", "mask", "old_logps", "ref_logps", "sampling_logps", "ce_weights")


def call_of(kind):
    """The result of a call, and all of its tensors that its metrics may depend on."""
    batch = with_cross_entropy(make_batch())
    batch.advantages = batch.advantages[:, None].repeat(1, 9)  # no copy is made of them
    tensors = {name: getattr(batch, name) for name in TENSORS}
    hidden, weight = batch.hidden.requires_grad_(), batch.weight.requires_grad_()
    if kind == "fused_distillation_loss":
        teacher = Reference(hidden.detach().nan_to_num(), weight.detach() * 1.1)
        return fused_distillation_loss(hidden, weight, teacher, batch.mask), [batch.mask]
    options = {"epsilon": 0.1, "is_correction": "token_truncate"}
    if kind == "grpo_loss":
        logps = batch.old_logps.nan_to_num().add_(0.2).requires_grad_()
        tensors |= {"entropy": torch.linspace(0, 3, 36).view(4, 9)}
        out = grpo_loss(logps, **tensors, config=config(**options))
    else:
        options |= {"exact KL": {"beta": 0.1, "kl_estimator": "exact"}}.get(kind, {})
        options |= {"two passes": {"loss_type": "gspo"}}.get(kind, {})
        if kind == "exact KL":
            del tensors["ref_logps"]
            states = hidden.detach().nan_to_num()
            reference = Reference(states, weight.detach() * 1.1)
            tensors |= {"reference": reference}
        out = fused_grpo_loss(hidden, weight, batch.targets, **tensors, config=config(**options))
    return out, [x for x in tensors.values() if not isinstance(x, Reference)]


KINDS = ("one pass", "exact KL", "two passes", "grpo_loss", "fused_distillation_loss")


@pytest.mark.parametrize("kind", KINDS)
def test_what_changes_after_the_call_does_not_change_them(kind):
    """Arguments and results are filled in place, and a backward scales what is stored."""
    (expected, _), (out, tensors) = call_of(kind), call_of(kind)
    expected = dict(expected.metrics)
    assert len(expected) > 5
    out.loss.backward()
    for x in [
        *tensors,
        *(x for name, x in out._asdict().items() if name not in ("metrics", "loss")),
    ]:
        if x is not None:
            x.logical_not_() if x.dtype == torch.bool else x.detach().fill_(0.7)
    torch.testing.assert_close(dict(out.metrics), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("call", "module", "name"),
    (
        ("one pass", "grpo_kernels.loss.metrics", "loss_metrics"),
        ("grpo_loss", "grpo_kernels.loss.metrics", "loss_metrics"),
        ("fused_distillation_loss", "grpo_kernels.fused_distillation", "_metrics"),
    ),
)
def test_computed_once_when_they_are_read(call, module, name, monkeypatch):
    compute, calls = getattr(importlib.import_module(module), name), []
    monkeypatch.setattr(f"{module}.{name}", lambda *args: calls.append(1) or compute(*args))
    with torch.inference_mode():
        other, _ = call_of(call)
    out, _ = call_of(call)
    out.loss.backward()
    assert not calls
    assert out.metrics["tokens"] > 0 and "entropy" in out.metrics
    assert len(out.metrics) > 5 and out.metrics.get("none") is None and len(calls) == 1
    assert other.metrics.keys() <= out.metrics.keys() and len(calls) == 2


def test_a_mapping_that_joins_and_copies_as_a_dict():
    def fresh():
        return grpo_loss(torch.zeros(2, 3), torch.ones(2)).metrics

    expected = dict(fresh())
    assert isinstance(fresh(), Mapping) and [*fresh()] == [*expected] and len(fresh()) > 5
    assert fresh() == {**fresh()} == expected and repr(fresh()) == repr(expected)
    assert fresh() | {"x": 1} == expected | {"x": 1} and {"x": 1} | fresh() == {"x": 1} | expected
    assert fresh() | fresh() == expected and fresh() | {"tokens": 0} != expected
    saved = io.BytesIO()
    torch.save(fresh(), saved)
    saved.seek(0)
    copies = copy.copy(fresh()), copy.deepcopy(fresh()), pickle.loads(pickle.dumps(fresh()))
    for x in (*copies, torch.load(saved)):
        assert isinstance(x, dict) and x == expected

"""Columns of an explanation, against the call that they are of and float64."""

import inspect
import math
import re
from dataclasses import replace

import pytest
import torch

from grpo_kernels import (
    GRPOLossConfig,
    Reference,
    fused_grpo_loss,
    grpo_loss,
    linear_logprobs,
    reference,
)
from grpo_kernels.explain import explain, join
from tests.helpers.batches import (
    OBJECTIVES,
    config,
    make_batch,
    packed,
    relative_error,
    with_cross_entropy,
)
from tests.helpers.supports import make_support
from tests.test_own_objective import Dro, entropy_scaled, saying, sequence_clipped

TENSORS = ("old_logps", "ref_logps", "sampling_logps")


def batch_of(layout, ce=False):
    batch = make_batch(B=6, T=11)
    batch = with_cross_entropy(batch) if ce else batch
    return packed(batch) if layout == "packed" else batch


def shown(batch):
    """The tokens that an explanation has."""
    return batch.mask if batch.ce_weights is None else batch.mask | (batch.ce_weights != 0)


def other_model(batch):
    noise = torch.randn(batch.hidden.shape, generator=torch.Generator().manual_seed(1))
    return Reference(batch.hidden + 0.1 * noise, batch.weight)


# The loss of a call, the log-probs that it takes, and what else.
GRPO = config(loss_type="grpo", beta=0.2)
OWN = {
    "own class": Dro(tau=0.7), "own function": sequence_clipped,
    "own entropy": saying(entropy_scaled, token_local=True, entropy_gradient=True),
}  # fmt: skip
CALLS = {
    **{name: (config(**options), names, {}) for name, (options, names) in OBJECTIVES.items()},
    **{name: (GRPOLossConfig(loss_type=x, beta=0.1), TENSORS, {}) for name, x in OWN.items()},
    "num_items": (GRPO, TENSORS, {"num_items": lambda _: 17.0}),
    "support": (GRPO, TENSORS, {"support": lambda b: make_support(replace(b, mask=shown(b)))}),
    "reference": (GRPO, TENSORS[:1], {"reference": other_model}),
    "exact KL": (config(beta=0.2, kl_estimator="exact"), TENSORS[:1], {"reference": other_model}),
}  # fmt: skip
# Metrics of a call, the column of each, and what it is of the tokens of the policy.
METRICS = {
    "tokens": ("loss", len), "ratio_mean": ("ratio", torch.mean), "ratio_max": ("ratio", torch.max),
    "kl": ("kl", torch.mean), "kl_max": ("kl", torch.max), "entropy": ("entropy", torch.mean),
    "sampling/importance_sampling_ratio/max": ("importance_weight", torch.max),
    "sampling/importance_sampling_ratio/min": ("importance_weight", torch.min),
    "sampling/sampling_logp_difference/mean": ("sampler_gap", lambda x: x[x == x].abs().mean()),
    "sampling/sampling_logp_difference/max": ("sampler_gap", lambda x: x[x == x].abs().max()),
}  # fmt: skip


@pytest.mark.parametrize(("layout", "ce"), (("padded", False), ("packed", True)))
@pytest.mark.parametrize("call", CALLS)
def test_columns_add_up_to_the_call(call, layout, ce):
    """Loss and metrics are the call's, gradients by log-probs and entropy are float64's."""
    (loss, names, more), batch = CALLS[call], batch_of(layout, ce)
    more = {name: make(batch) for name, make in more.items()}
    num_items = {name: more.pop(name) for name in ("num_items",) if name in more}
    kwargs = {name: getattr(batch, name) for name in (*names, "ce_weights", "cu_seqlens")}
    kwargs |= {"config": loss, **num_items}
    args = batch.targets, batch.advantages, batch.mask
    hidden = batch.hidden.clone().requires_grad_()
    out = fused_grpo_loss(hidden, batch.weight, *args, **kwargs, **more)
    out.loss.backward()
    explanation = explain(out, *args, **kwargs)
    columns = explanation.columns

    assert explanation.loss == out.loss.item()
    total = columns["loss"].double().sum().item()
    assert total == pytest.approx(out.loss.item(), rel=1e-5, abs=1e-6)
    parts = [columns[x] for x in ("policy", "kl_loss", "ce_loss", "entropy_loss") if x in columns]
    torch.testing.assert_close(sum(parts), columns["loss"], rtol=1e-5, atol=1e-7)
    in_policy = ~columns["advantage"].isnan()
    metrics = {
        name: float(reduce(columns[column][in_policy]))
        for name, (column, reduce) in METRICS.items()
        if column in columns
    }
    expected = {name: out.metrics[name].item() for name in metrics}
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-5)

    if "reference" in more and not loss.exact_kl:
        kwargs["ref_logps"] = out.ref_logps
    kwargs |= {} if out.kl is None else {"kl": out.kl}
    tensors = {k: x for k, x in kwargs.items() if isinstance(x, torch.Tensor)}
    tensors = {k: x.double() for k, x in tensors.items() if x.is_floating_point()}
    logps, entropy = (x.double().requires_grad_() for x in (out.logps, out.entropy))
    exact = reference.grpo_loss(
        logps, batch.advantages.double(), batch.mask, entropy=entropy, **kwargs | tensors
    )
    exact.loss.backward()
    rows = shown(batch)
    assert relative_error(columns["gradient"], logps.grad[rows]) < 1e-5
    assert ("entropy_gradient" in columns) == (entropy.grad is not None)
    if entropy.grad is not None:
        assert relative_error(columns["entropy_gradient"], entropy.grad[rows]) < 1e-5
    if loss.exact_kl:  # whose gradient is no function of these
        return
    # What the call sends back is the chain rule from these columns.
    d_hidden, hidden.grad = hidden.grad, None
    how = {"entropy": True, "support": more.get("support")}
    scored = linear_logprobs(hidden, batch.weight, batch.targets, rows, **how)
    again = (columns["gradient"] * scored.logps[rows]).sum()
    if "entropy_gradient" in columns:
        again = again + (columns["entropy_gradient"] * scored.entropy[rows]).sum()
    again.backward()
    assert relative_error(hidden.grad, d_hidden) < 2e-5


# Options, the tokens that a column says they concern, and their share by the call's metrics.
CLIPPED = OBJECTIVES["clip_asymmetric"][0]
MARKED = {
    "clip_low": (CLIPPED, "clip", -1, lambda metrics: metrics["clip_low"]),
    "clip_high": (CLIPPED, "clip", 1, lambda metrics: metrics["clip_high"]),
    "off_policy": ({"off_policy_threshold": 0.2}, "dropped", 1,
                   lambda metrics: metrics["off_policy_dropped"]),
    "entropy": ({"top_entropy_quantile": 0.4}, "dropped", 1,
                lambda metrics: 1 - metrics["entropy_kept"]),
    "importance": ({"is_correction": "token_mask", "is_clip_max": 0.6}, "dropped", 1, None),
}  # fmt: skip


@pytest.mark.parametrize("option", MARKED)
def test_clipped_and_dropped_tokens_are_marked(option):
    options, name, value, share = MARKED[option]
    batch, loss = batch_of("padded"), config(**options)
    tensors = {"old_logps": batch.old_logps, "sampling_logps": batch.sampling_logps + 0.5}
    args = batch.targets, batch.advantages, batch.mask
    out = fused_grpo_loss(batch.hidden, batch.weight, *args, config=loss, **tensors)
    columns = explain(out, *args, config=loss, **tensors).columns
    marked = columns[name] == value
    if share is None:
        assert torch.equal(marked, columns["importance_weight"] == 0) and marked.any()
    else:
        expected = share(out.metrics).item()
        assert 0 < marked.float().mean().item() == pytest.approx(expected)
    assert ("dropped" in columns) == (name == "dropped")
    if name == "dropped":
        assert not columns["gradient"][marked].any()


def arguments(layout="padded", **more):
    """The arguments of an explanation of log-probs, with facts of the sequences."""
    batch = batch_of(layout)
    kwargs = {name: getattr(batch, name) for name in (*TENSORS, "cu_seqlens")} | {"config": GRPO}
    logps = batch.old_logps + 0.1
    out = grpo_loss(logps, batch.advantages, batch.mask, entropy=logps * 0 + 2.0, **kwargs)
    return {
        "out": out, "targets": batch.targets, "advantages": batch.advantages, "mask": batch.mask,
        "groups": 3, "rewards": [1.0, 0.0, 0.5, 0.25, 0.25, 1.0],
        "truncated": torch.tensor([0, 0, 1, 0, 0, 0], dtype=torch.bool),
        "prompts": ["a", "a", "a", "b", "b", "b"], **kwargs, **more,
    }  # fmt: skip


def test_sequences_and_groups():
    padded, flat = explain(**arguments()), explain(**arguments("packed"))
    mask = batch_of("padded").mask
    assert torch.equal(torch.stack([padded.sequence, padded.position]), mask.nonzero().T)
    assert torch.equal(flat.position, padded.position)
    assert torch.equal(flat.sequence, padded.sequence)
    for name, x in padded.columns.items():
        torch.testing.assert_close(flat.columns[name], x, equal_nan=True, msg=name)
    for column in ("gradient", "loss", "kl"):
        name = f"{column}_share"
        rows = [row[name] for row in padded.sequences]
        size = padded.columns[column].abs() / padded.columns[column].abs().sum()
        assert rows == pytest.approx([size[padded.sequence == b].sum().item() for b in range(6)])
        groups = [group[name] for group in padded.groups]
        assert groups == pytest.approx([sum(rows[:3]), sum(rows[3:])])
    assert padded.sequences[2]["truncated"] is True and padded.sequences[3]["prompt"] == "b"
    assert padded.groups[0]["sequences"] == [0, 1, 2] and padded.groups[0]["reward"] == 0.5
    assert padded.groups[1]["reward_std"] == pytest.approx(math.sqrt(0.125))
    assert "advantage" not in padded.sequences[1]  # it has no token


def test_groups_in_any_order_and_rewards_that_are_not_finite():
    """An infinite reward has no spread; a missing one does not count."""
    groups, rewards = torch.tensor([7, 2, 7, 2, 9, 7]), [math.inf, math.nan, 0.0, 2.0, 4.0, 1.0]
    seven, two, nine = explain(**arguments(groups=groups, rewards=rewards)).groups
    assert [x["group"] for x in (seven, two, nine)] == [7, 2, 9]
    assert [x["sequences"] for x in (seven, two, nine)] == [[0, 2, 5], [1, 3], [4]]
    assert seven["reward"] == math.inf and math.isnan(seven["reward_std"])
    assert (two["reward"], two["reward_std"], nine["reward"]) == (2.0, 0.0, 4.0)


def test_two_calls_of_a_step_are_one():
    g = torch.Generator().manual_seed(4)
    logps, old = torch.rand(2, 6, 9, generator=g).sub(2.0)
    advantages, groups = torch.randn(6, generator=g), [0, 0, 1, 1, 0, 1]
    loss = config(loss_type="grpo")

    def explained(rows):
        tensors = {"old_logps": old[rows], "config": loss}
        out = grpo_loss(logps[rows], advantages[rows], **tensors)
        return explain(out, None, advantages[rows], groups=groups[rows], **tensors)

    whole = explained(slice(None))
    parts = [explained(slice(0, 2)), explained(slice(2, 6))]
    joined = join(parts, [2 / 6, 4 / 6])  # means over sequences
    assert joined.loss == pytest.approx(whole.loss, rel=1e-5)
    for name, column in whole.columns.items():
        torch.testing.assert_close(joined.columns[name], column)
    assert torch.equal(joined.sequence, whole.sequence)
    shares = [[row["gradient_share"] for row in x.sequences] for x in (joined, whole)]
    assert shares[0] == pytest.approx(shares[1], rel=1e-5)
    assert [x["sequences"] for x in joined.groups] == [[0, 1, 4], [2, 3, 5]]


def test_what_came_beside_the_call():
    batch = batch_of("padded")
    d_hidden = torch.rand(6, 11, 5, dtype=torch.float64)
    next_logps = batch.old_logps + 0.35
    columns = explain(**arguments(d_hidden=d_hidden, next_logps=next_logps)).columns
    norms = d_hidden[batch.mask].norm(dim=-1).float()
    torch.testing.assert_close(columns["d_hidden"], norms)
    torch.testing.assert_close(columns["gradient_share"], norms / norms.sum())
    torch.testing.assert_close(columns["moved"], torch.full_like(norms, 0.25))
    torch.testing.assert_close(columns["log_ratio"], torch.full_like(norms, 0.1))
    gap = (batch.old_logps - batch.sampling_logps)[batch.mask]  # NaN where there was none
    assert gap.isnan().any()
    torch.testing.assert_close(columns["sampler_gap"], gap, equal_nan=True)


class Bytes:
    """A tokenizer of bytes, which drops a space that nothing precedes."""

    def decode(self, ids):
        return bytes(ids).decode(errors="replace").removeprefix(" ")


def test_texts():
    every = [[f"{b}.{t}" for t in range(11)] for b in range(6)]
    actual = explain(**arguments(texts=every)).texts
    assert actual[0] == [every[0][t] for t in (0, 1, 2, 3, 4, 7, 8, 9, 10)]  # with its hole
    text = "h é 日!".encode()
    logps, targets = torch.zeros(1, len(text)), torch.tensor([list(text)])
    out = grpo_loss(logps, torch.ones(1))
    decoded = explain(out, targets, torch.ones(1), tokenizer=Bytes()).texts
    missing = "\N{REPLACEMENT CHARACTER}"
    assert decoded == [["h", " ", missing, "é", " ", missing, missing, "日", "!"]]


def test_a_cause_shows_its_tokens():
    """With their text escaped and cut, the number, the place and the limit."""
    logps, old = torch.zeros(2, 50), torch.zeros(2, 50)
    old[1, 7] = -5.0
    texts = [["a"] * 50, [*["b"] * 7, "\x1b[2J" + "c" * 30, *["b"] * 42]]
    advantages = torch.tensor([1.0, -1.0])
    out = grpo_loss(logps, advantages, old_logps=old)
    explanation = explain(out, None, advantages, old_logps=old, texts=texts)
    cause = explanation.causes[0]
    assert (cause.name, cause.tokens) == ("ratio", [(1, 7)]) and "dual_clip" in cause.remedy
    assert r"sequence 1 token 7 '\x1b[2Jcccccccccccccccc' 148" in cause.text
    assert "limit 5 %" in cause.text and f"{100 * cause.share:.1f} % beyond" in cause.text
    shown = str(explanation).splitlines()
    assert shown[0].startswith(" 59 %  ratio: the ratio of 1 token is above 2")


def test_the_example_runs(capsys):
    example = re.search(r"\n\n((?:    .*\n)+)\n", inspect.getdoc(explain))[1]
    names = {"torch": torch, "fused_grpo_loss": fused_grpo_loss, "explain": explain}
    exec(inspect.cleandoc(example), names)
    assert capsys.readouterr().out

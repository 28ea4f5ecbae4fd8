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
from grpo_kernels.explain import Thresholds, explain, join
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

SHOWN = ("old_logps", "ref_logps", "sampling_logps")


def batch_of(layout, ce=False):
    batch = make_batch(B=6, T=11)
    batch = with_cross_entropy(batch) if ce else batch
    return packed(batch) if layout == "packed" else batch


def call_and_explanation(batch, loss, names=(), **options):
    """A fused call, the gradient of its states, and the explanation."""
    more = {k: options.pop(k) for k in ("support", "reference") if k in options}
    kwargs = {name: getattr(batch, name) for name in (*names, "ce_weights", "cu_seqlens")}
    kwargs |= {"config": loss, **options}
    hidden = batch.hidden.clone().requires_grad_()
    out = fused_grpo_loss(
        hidden, batch.weight, batch.targets, batch.advantages, batch.mask, **kwargs, **more
    )
    out.loss.backward()
    return out, hidden.grad, explain(out, batch.targets, batch.advantages, batch.mask, **kwargs)


def check_sums(out, explanation):
    columns, in_policy = explanation.columns, ~explanation.columns["advantage"].isnan()
    total = columns["loss"].double().sum().item()
    assert total == pytest.approx(out.loss.item(), rel=1e-5, abs=1e-6)
    parts = [columns[x] for x in ("policy", "kl_loss", "ce_loss", "entropy_loss") if x in columns]
    torch.testing.assert_close(sum(parts), columns["loss"], rtol=1e-5, atol=1e-7)
    assert explanation.loss == out.loss.item()
    metrics = {name: x.item() for name, x in out.metrics.items()}
    expected = {}
    for name, (column, reduce) in {
        "tokens": ("loss", len), "ratio_mean": ("ratio", torch.mean),
        "ratio_max": ("ratio", torch.max), "kl": ("kl", torch.mean), "kl_max": ("kl", torch.max),
        "entropy": ("entropy", torch.mean),
        "sampling/importance_sampling_ratio/max": ("importance_weight", torch.max),
        "sampling/importance_sampling_ratio/min": ("importance_weight", torch.min),
        "sampling/sampling_logp_difference/mean":
            ("sampler_gap", lambda x: x[~x.isnan()].abs().mean()),
        "sampling/sampling_logp_difference/max":
            ("sampler_gap", lambda x: x[~x.isnan()].abs().max()),
    }.items():  # fmt: skip
        if column in columns:
            expected[name] = float(reduce(columns[column][in_policy]))
    assert set(expected) <= set(metrics)
    actual = {name: metrics[name] for name in expected}
    assert expected == pytest.approx(actual, rel=1e-4, abs=1e-5)


def check_gradient(out, explanation, batch, loss, names=(), **options):
    """Against autograd's in float64, by log-probs and entropy."""
    shown = batch.mask if batch.ce_weights is None else batch.mask | (batch.ce_weights != 0)
    logps, entropy = (x.double().requires_grad_() for x in (out.logps, out.entropy))
    kwargs = {name: getattr(batch, name) for name in (*names, "ce_weights", "cu_seqlens")}
    if out.kl is not None:
        options["kl"] = out.kl.double()
    kwargs |= {name: x.double() for name, x in kwargs.items()
               if x is not None and x.is_floating_point()}  # fmt: skip
    exact = reference.grpo_loss(
        logps, batch.advantages.double(), batch.mask, entropy=entropy, config=loss,
        **kwargs, **options,
    )  # fmt: skip
    exact.loss.backward()
    assert relative_error(explanation.columns["gradient"], logps.grad[shown]) < 1e-5
    expected = entropy.grad
    assert ("entropy_gradient" in explanation.columns) == (expected is not None)
    if expected is not None:
        assert relative_error(explanation.columns["entropy_gradient"], expected[shown]) < 1e-5


@pytest.mark.parametrize("layout", ("padded", "packed"))
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective(objective, layout):
    options, names = OBJECTIVES[objective]
    loss = config(**options)
    for ce in (False, True):
        batch = batch_of(layout, ce)
        out, d_hidden, explanation = call_and_explanation(batch, loss, names)
        check_sums(out, explanation)
        check_gradient(out, explanation, batch, loss, names)
        # What the call sends back is the chain rule from these columns.
        hidden = batch.hidden.clone().requires_grad_()
        shown = batch.mask if batch.ce_weights is None else batch.mask | (batch.ce_weights != 0)
        scored = linear_logprobs(hidden, batch.weight, batch.targets, shown, entropy=True)
        columns = explanation.columns
        again = (columns["gradient"] * scored.logps[shown]).sum()
        if "entropy_gradient" in columns:
            again = again + (columns["entropy_gradient"] * scored.entropy[shown]).sum()
        again.backward()
        assert relative_error(hidden.grad, d_hidden) < 2e-5


OWN = {
    "class": Dro(tau=0.7), "callable": sequence_clipped,
    "entropy": saying(entropy_scaled, token_local=True, entropy_gradient=True),
}  # fmt: skip


@pytest.mark.parametrize("layout", ("padded", "packed"))
@pytest.mark.parametrize("loss_type", OWN)
def test_own_losses(loss_type, layout):
    batch, loss = batch_of(layout), GRPOLossConfig(loss_type=OWN[loss_type], beta=0.1)
    out, _, explanation = call_and_explanation(batch, loss, SHOWN)
    check_sums(out, explanation)
    check_gradient(out, explanation, batch, loss, SHOWN)


@pytest.mark.parametrize("case", ("num_items", "support", "reference", "exact"))
def test_other_calls(case):
    batch, names, options = batch_of("padded", case == "num_items"), SHOWN, {}
    loss, exact = config(loss_type="grpo", beta=0.2), {}
    match case:
        case "num_items":
            options = exact = {"num_items": 17.0}
        case "support":
            options["support"] = make_support(batch)
        case _:
            names = ("old_logps",)
            g = torch.Generator().manual_seed(1)
            states = batch.hidden + 0.1 * torch.randn(batch.hidden.shape, generator=g)
            options["reference"] = Reference(states, batch.weight)
    if case == "exact":
        loss = config(beta=0.2, kl_estimator="exact")
    out, _, explanation = call_and_explanation(batch, loss, names, **options)
    check_sums(out, explanation)
    if case == "reference":
        batch, names = replace(batch, ref_logps=out.ref_logps), ("old_logps", "ref_logps")
    check_gradient(out, explanation, batch, loss, names, **exact)


def test_clips():
    options, names = OBJECTIVES["clip_asymmetric"]
    out, _, explanation = call_and_explanation(batch_of("padded"), config(**options), names)
    for name, bound in (("clip_low", -1), ("clip_high", 1)):
        share = (explanation.columns["clip"] == bound).float().mean().item()
        assert 0 < share == pytest.approx(out.metrics[name].item())
    assert "dropped" not in explanation.columns


@pytest.mark.parametrize(
    ("options", "share"),
    (
        ({"off_policy_threshold": 0.2}, lambda metrics, _: metrics["off_policy_dropped"]),
        ({"top_entropy_quantile": 0.4}, lambda metrics, _: 1 - metrics["entropy_kept"]),
        ({"is_correction": "token_mask", "is_clip_max": 0.6},
         lambda _, columns: (columns["importance_weight"] == 0).float().mean()),
    ),
    ids=("off_policy", "entropy", "importance"),
)  # fmt: skip
def test_masks(options, share):
    batch = batch_of("padded")
    batch.sampling_logps = batch.sampling_logps + 0.5
    names = ("old_logps", "sampling_logps")
    out, _, explanation = call_and_explanation(batch, config(**options), names)
    dropped = explanation.columns["dropped"]
    assert 0 < dropped.mean().item() == pytest.approx(share(out.metrics, explanation.columns))
    assert not explanation.columns["gradient"][dropped == 1].any()


def facts(**more):
    return {
        "groups": 3, "rewards": [1.0, 0.0, 0.5, 0.25, 0.25, 1.0],
        "truncated": torch.tensor([0, 0, 1, 0, 0, 0], dtype=torch.bool),
        "prompts": ["a", "a", "a", "b", "b", "b"], **more,
    }  # fmt: skip


def arguments(layout="padded", **more):
    """The arguments of an explanation, of log-probs at hand."""
    batch, loss = batch_of(layout), config(loss_type="grpo", beta=0.1)
    kwargs = {name: getattr(batch, name) for name in (*SHOWN, "cu_seqlens")} | {"config": loss}
    logps = batch.old_logps + 0.1
    entropy = logps * 0 + 2.0
    out = grpo_loss(logps, batch.advantages, batch.mask, entropy=entropy, **kwargs)
    positional = {"out": out, "targets": batch.targets, "advantages": batch.advantages,
                  "mask": batch.mask}  # fmt: skip
    return positional | kwargs | facts() | more


def test_sequences_and_groups():
    padded, flat = explain(**arguments()), explain(**arguments("packed"))
    mask = batch_of("padded").mask
    assert torch.equal(torch.stack([padded.sequence, padded.position]), mask.nonzero().T)
    assert torch.equal(padded.token_ids, batch_of("padded").targets[mask])
    assert torch.equal(flat.position, padded.position)
    assert torch.equal(flat.sequence, padded.sequence)
    for name, x in padded.columns.items():
        torch.testing.assert_close(flat.columns[name], x, equal_nan=True, msg=name)
    for name in ("gradient_share", "loss_share", "kl_share"):
        rows = [row[name] for row in padded.sequences]
        column = {"gradient_share": "gradient", "loss_share": "loss", "kl_share": "kl"}[name]
        size = padded.columns[column].abs() / padded.columns[column].abs().sum()
        assert rows == pytest.approx([size[padded.sequence == b].sum().item() for b in range(6)])
        assert sum(rows) == pytest.approx(1)
        groups = [group[name] for group in padded.groups]
        assert groups == pytest.approx([sum(rows[:3]), sum(rows[3:])])
    assert [row["length"] for row in padded.sequences] == mask.sum(1).tolist()
    assert [row["group"] for row in padded.sequences] == [0, 0, 0, 1, 1, 1]
    assert padded.sequences[2]["truncated"] is True and padded.sequences[3]["prompt"] == "b"
    assert padded.groups[0]["sequences"] == [0, 1, 2]
    assert padded.groups[0]["reward"] == 0.5
    assert padded.groups[1]["reward_std"] == pytest.approx(math.sqrt(0.125))
    assert "advantage" not in padded.sequences[1]  # it has no token


def test_groups_in_any_order():
    explanation = explain(**arguments(groups=torch.tensor([7, 2, 7, 2, 9, 7])))
    assert [group["group"] for group in explanation.groups] == [7, 2, 9]
    assert [group["sequences"] for group in explanation.groups] == [[0, 2, 5], [1, 3], [4]]


def test_rewards_that_are_not_finite():
    """An infinite one has no spread; a missing one does not count."""
    rewards = [math.inf, 0.0, 1.0, math.nan, 2.0, 4.0]
    first, second = explain(**arguments(rewards=rewards)).groups
    assert first["reward"] == math.inf and math.isnan(first["reward_std"])
    assert (second["reward"], second["reward_std"]) == (3.0, 1.0)


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
    assert torch.equal(joined.position, whole.position)
    for name in ("loss_share", "gradient_share"):
        shares = [[row[name] for row in x.sequences] for x in (joined, whole)]
        assert shares[0] == pytest.approx(shares[1], rel=1e-5)
    assert [x["sequences"] for x in joined.groups] == [[0, 1, 4], [2, 3, 5]]


def test_calls_that_do_not_join():
    part = explain(**arguments())
    with pytest.raises(ValueError, match="parts: expected one explanation at least; got none"):
        join([])
    with pytest.raises(ValueError, match="scales: expected 2, one for each part; got 1"):
        join([part, part], [1.0])
    other = explain(**arguments(next_logps=batch_of("padded").old_logps))
    with pytest.raises(ValueError, match=r"parts\[1\]: expected the columns of parts\[0\]"):
        join([part, other])


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
    lengths = batch_of("padded").mask.sum(1).tolist()
    shown = [[f"{b}.{t}" for t in range(n)] for b, n in enumerate(lengths)]
    assert explain(**arguments(texts=shown)).texts == shown
    every = [[f"{b}.{t}" for t in range(11)] for b in range(6)]
    actual = explain(**arguments(texts=every)).texts
    assert actual[0] == [every[0][t] for t in (0, 1, 2, 3, 4, 7, 8, 9, 10)]  # with its hole
    text = "h é 日!".encode()
    logps, targets = torch.zeros(1, len(text)), torch.tensor([list(text)])
    out = grpo_loss(logps, torch.ones(1))
    decoded = explain(out, targets, torch.ones(1), tokenizer=Bytes()).texts
    missing = "\N{REPLACEMENT CHARACTER}"
    assert decoded == [["h", " ", missing, "é", " ", missing, missing, "日", "!"]]
    assert explain(out, None, torch.ones(1)).token_ids is None


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
    assert "limit 5%" in cause.text and f"{cause.share:.1%} more than" in cause.text
    shown = str(explanation).splitlines()
    assert (
        shown[0].startswith(" 59%  ratio: the ratio of 1 token is above 2")
        and max(map(len, shown)) <= 100
    )


REFUSED = {
    "out": ({"out": 3}, TypeError, "out: expected a GRPOLossOutput; got int"),
    "another config": ({"config": config(loss_type="grpo", beta=0.5)}, ValueError,
                       "out.loss: expected the sum of the tokens' losses"),
    "without a reference": ({"ref_logps": None}, ValueError, "beta=.* needs .* reference"),
    "groups": ({"groups": 4}, ValueError,
               "groups: expected a divisor of the number of sequences, 6; got 4"),
    "config": ({"config": {}}, TypeError, "config: expected a GRPOLossConfig; got dict"),
    "texts as rewards": ({"rewards": ["a"] * 6}, TypeError, "rewards: expected numbers; got 'a'"),
    "group ids": ({"groups": [1, 2]}, ValueError,
                  "groups: expected one for each of 6 sequences; got shape \\[2\\]"),
    "float ids": ({"groups": torch.ones(6)}, TypeError, "groups: expected whole numbers"),
    "rewards": ({"rewards": torch.ones(6, 2)}, ValueError,
                r"rewards: expected one for each of 6 sequences; got shape \[6, 2\]"),
    "truncated": ({"truncated": [True]}, ValueError, "truncated: expected one for each of 6"),
    "prompts": ({"prompts": "abcdef"}, TypeError, "prompts: expected a list or tensor; got str"),
    "next_logps": ({"next_logps": torch.ones(6, 3)}, ValueError,
                   r"next_logps: expected shape \[6, 11\]; got \[6, 3\]"),
    "d_hidden": ({"d_hidden": torch.ones(6, 10, 4)}, ValueError,
                 r"d_hidden: expected shape \[6, 11, H\]; got \[6, 10, 4\]"),
    "targets": ({"targets": torch.ones(6, 3).long()}, ValueError, r"targets: expected shape"),
    "rows of texts": ({"texts": [["a"]]}, ValueError, "texts: expected one for each of 6"),
    "texts": ({"texts": [["a"]] * 6}, ValueError,
              r"texts\[0\]: expected 9 texts, or 11 and more for all positions; got 1"),
    "one text": ({"texts": ["a" * 11] * 6}, TypeError, r"texts\[0\]: expected a list of texts"),
    "tokenizer": ({"tokenizer": "gpt2"}, TypeError, "tokenizer: expected an object with decode"),
    "both": ({"texts": [["a"] * 11] * 6, "tokenizer": Bytes()}, ValueError,
             "tokenizer: expected None with texts"),
    "no targets": ({"targets": None, "tokenizer": Bytes()}, ValueError,
                   "targets: expected token ids for a tokenizer; got None"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    change, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        explain(**arguments(**change))


def test_thresholds_check_themselves():
    with pytest.raises(ValueError, match=r"ratio: expected a number > 0; got -1"):
        Thresholds(ratio=-1.0)
    with pytest.raises(ValueError, match=r"path: expected a name in .html or .*got '.png'"):
        explain(**arguments()).write("a.png")


def test_every_parameter_is_described_and_the_example_runs(capsys):
    text = inspect.getdoc(explain)
    named = re.findall(r"^    (\w+): ", text.split("Args:")[1].split("Returns:")[0], re.MULTILINE)
    calls = set(inspect.signature(fused_grpo_loss).parameters)
    assert [x for x in inspect.signature(explain).parameters if x not in calls] == [
        x for x in named if x not in calls
    ]
    thresholds = re.findall(r"^    (\w+): ", inspect.getdoc(Thresholds), re.MULTILINE)
    assert thresholds == list(inspect.signature(Thresholds).parameters)
    example = re.search(r"\n\n((?:    .*\n)+)\n", text)[1]
    names = {"torch": torch, "fused_grpo_loss": fused_grpo_loss, "explain": explain}
    exec(inspect.cleandoc(example), names)
    assert capsys.readouterr().out

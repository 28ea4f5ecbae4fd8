"""Every pair of options equals the float64 reference, or is refused by name.

The options are the fields of `LMHead`, `Execution` and the calls' own arguments; a field that has
no value here fails the first test.
"""

import inspect
import itertools
from dataclasses import fields, replace

import pytest
import torch
import torch.distributed as dist

import grpo_kernels
from grpo_kernels import Execution, LMHead, Reference, VocabRanks
from grpo_kernels import reference as exact
from tests.helpers.batches import (
    config,
    exact_batch,
    packed,
    relative_error,
    with_cross_entropy,
)
from tests.helpers.supports import make_support

pytestmark = pytest.mark.usefixtures("one_rank")
R = 4
CHUNK = 4 * 211 * 7  # seven rows of logits


def rounding_matmul(a, b):
    """The product of a sampler of its own."""
    return torch.mm(a, b)


def scored(batch):
    """The batch with all tokens that take part in its mask."""
    rows = batch.mask if batch.ce_weights is None else batch.mask | (batch.ce_weights != 0)
    return replace(batch, mask=rows)


def reference_of(batch):
    """Another model on the same tokens, with options of its own, and NaN where masked."""
    g = torch.Generator().manual_seed(5)
    taken = batch.hidden.float().masked_fill(~scored(batch).mask[..., None], 0.0)
    hidden = torch.cat([taken, torch.randn(*taken.shape[:-1], 8, generator=g)], -1)
    weight = torch.cat([batch.weight.float(), torch.randn(211, 8, generator=g) / 16], 1)
    hidden = hidden.masked_fill(~scored(batch).mask[..., None], torch.nan)
    return Reference(hidden, LMHead(weight, temperature=0.8))


# Values of each field, by the field's name and what it is here: functions of the batch.
OF_HEAD = {
    "bias": {"bias": lambda b: b.bias},
    "low_rank": {"low_rank": lambda b: (b.hidden[..., :R] / 4, b.weight[:, -R:] / 4)},
    "logit_scale": {"logit_scale": lambda b: 0.75},
    "softcap": {"softcap": lambda b: 8.0},
    "temperature": {"temperature": lambda b: 0.5, "temperatures": lambda b: b.temperature},
    "logits_dtype": {"logits_dtype": lambda b: "model"},
    "ranks": {"ranks": lambda b: VocabRanks(dist.group.WORLD)},
}
OF_EXECUTION = {
    "backend": {"triton": lambda b: "triton"},
    "chunk_bytes": {"chunk_bytes": lambda b: CHUNK},
    "batch_invariant": {"batch_invariant": lambda b: True},
    "matmul": {"matmul": lambda b: rounding_matmul},
    "capturable": {"capturable": lambda b: True},
    "exp_gemm": {"exp_gemm": lambda b: True},
    "keep_gradients": {"made_again": lambda b: False},
}
OF_CALL = {
    "old_logps": {"old_logps": lambda b: b.old_logps},
    "ref_logps": {"ref_logps": lambda b: b.ref_logps},
    "sampling_logps": {"sampling_logps": lambda b: b.sampling_logps},
    "ce_weights": {"ce_weights": lambda b: b.ce_weights},
    "support": {"support": lambda b: make_support(scored(b))},
    # With a KL: its estimate, or the exact one.
    "reference": dict.fromkeys(("reference", "exact_kl"), lambda b: reference_of(b)),
    "num_items": {"num_items": lambda b: 31},
    "config": {
        "entropy_bonus": lambda b: config(entropy_coef=0.1),
        "two_passes": lambda b: config(loss_type="gspo", epsilon=0.05),
        "per_sequence": lambda b: config(loss_type="grpo", epsilon=0.05),
    },
    "cu_seqlens": {"packed": None},
}
NAMED = {
    name: (where, field, value)
    for where, table in (("head", OF_HEAD), ("execution", OF_EXECUTION), ("call", OF_CALL))
    for field, values in table.items()
    for name, value in values.items()
}
# What cannot be computed: the argument that is named, and why.
REFUSED = {
    ("support", "batch_invariant"): "support",  # which entries are gathered depends on the batch
    ("support", "matmul"): "support",
    ("support", "capturable"): "support",  # how many entries there are is read
    ("ranks", "capturable"): "capturable",  # what the ranks have is read
    ("support", "reference"): "reference",  # whose softmax would be over the sets, too
    ("support", "exact_kl"): "reference",
    ("ref_logps", "reference"): "ref_logps",  # which are those of the reference
    ("ref_logps", "exact_kl"): "ref_logps",
    # What needs logits, or others' sums.
    **{(name, "exp_gemm"): "exp_gemm" for name in (
        "bias", "low_rank", "softcap", "logits_dtype", "ranks", "batch_invariant", "matmul",
        "exact_kl", "entropy_bonus")},
}  # fmt: skip
PAIRS = [
    pair for pair in itertools.combinations(NAMED, 2) if NAMED[pair[0]][:2] != NAMED[pair[1]][:2]
]


# What a graph does not hold, so that the call is eager.
EAGER = {"support", "ranks", "matmul"}


def refused(pair, call):
    with_many = "support" if call == "targets" and "support" in pair else None
    several = call == "targets" or "distillation" in call
    several = "exp_gemm" if several and "exp_gemm" in pair else None
    return REFUSED.get(pair) or REFUSED.get(pair[::-1]) or with_many or several


def test_every_option_is_here():
    of_call = inspect.signature(grpo_kernels.fused_grpo_loss).parameters
    positional = {"hidden", "head", "targets", "advantages", "mask", "execution"}
    assert set(OF_HEAD) == {field.name for field in fields(LMHead)} - {"weight"}
    assert set(OF_EXECUTION) == {field.name for field in fields(Execution)}
    assert set(OF_CALL) == set(of_call) - positional
    assert all(name in NAMED for pair in REFUSED for name in pair)


def batch_of(pair):
    """Sums without a rounding where logits are rounded, so that both round to the same."""
    dtype = torch.bfloat16 if "logits_dtype" in pair else torch.float32
    batch = exact_batch(dtype, B=4, T=9, H=32, V=211)
    if "ce_weights" in pair:
        batch = with_cross_entropy(batch)
        hidden = (batch.hidden.float() * 16).round().clamp(-64, 64) / 16
        batch = replace(batch, hidden=hidden.to(dtype))
    return packed(batch) if "packed" in pair or "per_sequence" in pair else batch


def run(batch, pair, *, truth, call, rows=None):
    """Value and gradients of a call with the two options; one of ranks has `rows` of the head."""
    leaves = {name: getattr(batch, name).detach() for name in ("hidden", "weight")}
    given = {"head": {}, "execution": {}, "call": {}}
    for name in pair:
        where, field, value = NAMED[name]
        if value is not None:
            given[where][field] = value(batch)
    head, low_rank = given["head"], given["head"].get("low_rank")
    leaves |= {"bias": head["bias"]} if "bias" in head else {}
    if low_rank is not None:
        leaves |= {"a_out": low_rank[0].detach(), "lora_b": low_rank[1].detach()}
    if rows is not None:
        head["ranks"] = VocabRanks(dist.group.WORLD)
        leaves |= {name: x[rows] for name, x in leaves.items() if name in OF_VOCABULARY}
    trained = ("hidden", "a_out") if call == "frozen" else tuple(leaves)
    leaves = {
        name: (x.double() if truth else x.clone()).requires_grad_(name in trained)
        for name, x in leaves.items()
    }
    if "bias" in head:
        head["bias"] = leaves["bias"]
    if low_rank is not None:
        head["low_rank"] = (leaves["a_out"], leaves["lora_b"])
    options = given["call"]
    other = options.get("reference")
    if other is None and "distillation" in call:
        other = reference_of(batch)
    if other is not None:
        hidden, its = other
        if truth:
            hidden, its = hidden.double(), LMHead(its.weight.double(), temperature=its.temperature)
        elif "ranks" in head:
            its = its.replace(weight=its.weight[rows or slice(None)], ranks=head["ranks"])
        options["reference"] = Reference(hidden, its)
        kl = {"beta": 0.2, "kl_estimator": "exact" if "exact_kl" in pair else "k3"}
        options["config"] = replace(options.get("config", config()), **kl)
    if batch.cu_seqlens is not None:
        options["cu_seqlens"] = batch.cu_seqlens
    if truth:
        head.pop("ranks", None)
        if head.pop("logits_dtype", None):
            options["rounded_to"] = batch.hidden.dtype
        options |= {
            name: x.double()
            for name, x in options.items()
            if isinstance(x, torch.Tensor) and x.is_floating_point()
        }
    else:
        if "exp_gemm" in pair:
            given["execution"]["backend"] = "triton"
        options["execution"] = Execution(**given["execution"])
    head = LMHead(leaves["weight"], **head) if head else leaves["weight"]
    package = exact if truth else grpo_kernels
    names = {"loss": "fused_grpo_loss", "distillation": "fused_distillation_loss"}
    name = names.get(call.split()[-1], "linear_logprobs")
    of_call = getattr(package, name, None)
    if "compiled" in call and not truth:
        torch._dynamo.reset()
        of_call = torch.compile(of_call, backend="eager", fullgraph=not EAGER & set(pair))
    if "distillation" in call:
        return distilled(leaves, head, batch, options, None if truth else of_call)
    if "loss" not in call:
        names = ("support", "execution", "rounded_to")
        options = {name: x for name, x in options.items() if name in names}
        if not truth:
            options["entropy"] = call != "frozen"
        targets = several(batch) if call == "targets" else batch.targets
        out = of_call(leaves["hidden"], head, targets, scored(batch).mask, **options)
        value = (out.logps * torch.arange(1, out.logps.shape[-1] + 1)).sum() / 8
        if call != "frozen":
            value = value + 0.1 * out.entropy.sum() + 0.2 * out.logsumexp.sum()
    else:
        out = of_call(
            leaves["hidden"], head, batch.targets, batch.advantages, batch.mask, **options
        )
        value = out.loss
    value.backward()
    return (
        value.detach(),
        out.logps,
        {name: leaves[name].grad for name in trained if name in leaves},
    )


def distilled(leaves, head, batch, options, of_call):
    """Value, divergence of each token, and gradients; without a call those of the truth."""
    given, mask = (leaves["hidden"], head, options["reference"]), scored(batch).mask
    if of_call is None:
        rounded_to = options.get("rounded_to")
        found = exact.divergence(*given, mask, kind="jsd", beta=0.3, rounded_to=rounded_to)
        value = found.sum() / mask.sum()
    else:
        out = of_call(*given, mask, kind="jsd", beta=0.3, execution=options["execution"])
        value, found = out.loss, out.divergence
    value.backward()
    return value.detach(), found.detach(), {name: x.grad for name, x in leaves.items()}


def several(batch):
    """Four targets per token: its own, twice, one that is drawn, and the first id of all."""
    drawn = torch.randint(211, batch.targets.shape, generator=torch.Generator().manual_seed(3))
    drawn = drawn.masked_fill(~scored(batch).mask, 10**6)
    return torch.stack([batch.targets, drawn, 0 * drawn, batch.targets], -1)


OF_VOCABULARY = ("weight", "bias", "lora_b")
OF_LOSS = set(itertools.chain.from_iterable(OF_CALL.values())) - {"support"}
PAIRS_OF_HEAD = [pair for pair in PAIRS if not OF_LOSS & set(pair)]
PAIRS_OF_HEADS = [pair for pair in PAIRS_OF_HEAD if "support" not in pair]
# All in the slow tier; in the fast one every third of the forms that share most of their code.
CASES = [
    *((pair, "loss") for pair in PAIRS),
    *((pair, "logps") for pair in PAIRS_OF_HEAD),
    *(
        pytest.param(pair, call, marks=() if place % 3 == turn else pytest.mark.slow)
        for turn, (pairs, call) in enumerate(
            (
                (PAIRS_OF_HEAD, "targets"),
                (PAIRS_OF_HEAD, "frozen"),
                (PAIRS_OF_HEADS, "distillation"),
            )
        )
        for place, pair in enumerate(pairs)
    ),
    *(
        pytest.param(pair, call, marks=() if place % 15 == 0 else pytest.mark.slow)
        for pairs, call in (
            (PAIRS, "compiled loss"),
            (PAIRS_OF_HEAD, "compiled logps"),
            (PAIRS_OF_HEADS, "compiled distillation"),
        )
        for place, pair in enumerate(pairs)
    ),
]


@pytest.mark.parametrize(
    ("pair", "call"), CASES, ids=lambda x: x if isinstance(x, str) else "-".join(x)
)
def test_pair(pair, call):
    batch = batch_of(pair)
    if reason := refused(pair, call):
        # A compiler has errors of its own around ours.
        kind, begin = (Exception, "") if "compiled" in call else (ValueError, "^")
        with pytest.raises(kind, match=rf"{begin}{reason}: expected .*; got "):
            run(batch, pair, truth=False, call=call)
        return
    expected = run(batch, pair, truth=True, call=call)
    check(run(batch, pair, truth=False, call=call), expected, batch.hidden.dtype)


def check(actual, expected, dtype, rows=slice(None)):
    """Compares value, log-probs and gradients; of the head those of these `rows`."""
    half = dtype != torch.float32
    tolerance = 3e-3 if half else 3e-5
    assert (actual[1].double() - expected[1]).abs().max() <= (5e-4 if half else 1e-4)
    assert abs(actual[0].item() - expected[0].item()) <= 1e-4 * max(1, abs(expected[0].item()))
    for name, gradient in expected[2].items():
        gradient = gradient[rows] if name in OF_VOCABULARY else gradient
        assert gradient.norm() > 0, name
        assert relative_error(actual[2][name], gradient) <= tolerance, name

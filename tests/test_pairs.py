"""Every option beside every other, and beside every objective: right, or refused by name.

Value, metrics and every gradient of each call are those of `grpo_kernels.reference` in float64. The
options are the fields of `LMHead`, `Execution` and the calls' own arguments; a field that has no
value here fails the first test.
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
    OBJECTIVES,
    Result,
    assert_matches,
    config,
    exact_batch,
    packed,
    with_cross_entropy,
)
from tests.helpers.supports import make_support, with_logps_of
from tests.helpers.tiers import in_turn

pytestmark = pytest.mark.usefixtures("one_rank")
V, R = 211, 4
CHUNK = 4 * V * 7  # seven rows of logits
# On few tokens the rounding of X and of dH to bfloat16 scatters around 2.4e-3 on a GPU.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 2.5e-3}
HALF = (torch.bfloat16, torch.float16)
VOCABULARY_FIELDS = ("weight", "bias", "lora_b")
SOFTMAX_OPTIONS = ("bias", "logit_scale", "softcap", "temperature")


def scored(batch):
    """The batch with all tokens that take part in its mask."""
    rows = batch.mask if batch.ce_weights is None else batch.mask | (batch.ce_weights != 0)
    return replace(batch, mask=rows)


def reference_of(batch):
    """Another model on the same tokens, with options of its own, and NaN where masked."""
    g, rows = torch.Generator().manual_seed(5), scored(batch).mask[..., None]
    taken = batch.hidden.float().masked_fill(~rows, 0.0)
    hidden = torch.cat([taken, torch.randn(*taken.shape[:-1], 8, generator=g)], -1)
    wide = torch.cat([batch.weight.float(), torch.randn(V, 8, generator=g) / 16], 1)
    bias, lora_b = torch.randn(V, generator=g) / 4, torch.randn(V, R, generator=g) / 4
    low_rank, dtype = (hidden[..., :R] / 4, lora_b), batch.hidden.dtype
    numbers = {"logit_scale": 0.9, "softcap": 20.0, "temperature": 0.8}
    head = LMHead(wide.to(dtype), bias, low_rank, **numbers)
    return Reference(hidden.masked_fill(~rows, torch.nan).to(dtype), head)


# Values of each field, by the field's name and what it is here: functions of the batch.
HEAD_OPTIONS = {
    "bias": {"bias": lambda b: b.bias},
    "low_rank": {"low_rank": lambda b: (b.hidden[..., :R] / 4, b.weight[:, -R:] / 4)},
    "logit_scale": {"logit_scale": lambda b: 0.75},
    "softcap": {"softcap": lambda b: 8.0},
    "temperature": {"temperature": lambda b: 0.5, "temperatures": lambda b: b.temperature},
    "logits_dtype": {"logits_dtype": lambda b: "model"},
    "ranks": {"ranks": lambda b: VocabRanks(dist.group.WORLD)},
}
EXECUTION_OPTIONS = {
    "backend": {"triton": lambda b: "triton"},
    "chunk_bytes": {"chunk_bytes": lambda b: CHUNK},
    "batch_invariant": {"batch_invariant": lambda b: True},
}
CALL_OPTIONS = {
    "old_logps": {"old_logps": lambda b: b.old_logps},
    "ref_logps": {"ref_logps": lambda b: b.ref_logps},
    "sampling_logps": {"sampling_logps": lambda b: b.sampling_logps},
    "ce_weights": {"ce_weights": lambda b: b.ce_weights},
    "support": {"support": lambda b: make_support(scored(b))},
    # With a KL: its estimate, or the exact one.
    "reference": dict.fromkeys(("reference", "exact_kl"), reference_of),
    "num_items": {"num_items": lambda b: 31},
    "config": {
        "entropy_bonus": lambda b: config(entropy_coef=0.1),
        "two_passes": lambda b: config(loss_type="gspo", epsilon=0.05),
        "per_sequence": lambda b: config(loss_type="grpo", epsilon=0.05),
    },
    "cu_seqlens": {"packed": lambda b: b.cu_seqlens},
}
TABLES = {"head": HEAD_OPTIONS, "execution": EXECUTION_OPTIONS, "call": CALL_OPTIONS}
NAMED = {
    name: (where, field, value)
    for where, table in TABLES.items()
    for field, values in table.items()
    for name, value in values.items()
}
# Pairs that are refused: the argument that the error names, and why.
REFUSED = {
    ("support", "batch_invariant"): "support",  # which entries are gathered depends on the batch
    ("support", "reference"): "reference",  # its softmax would be over the sets
    ("support", "exact_kl"): "reference",
    ("ref_logps", "reference"): "ref_logps",  # the reference computes them
    ("ref_logps", "exact_kl"): "ref_logps",
}  # fmt: skip
KINDS = ("reverse", "forward", "jsd")


def refusals(names, call):
    """The arguments of which one is named, of a call that is refused."""
    base, names = call.split()[-1], set(names)
    if base == "entries":
        names.add("support")
    arguments = {argument for pair, argument in REFUSED.items() if names.issuperset(pair)}
    return arguments | {"support"} if base == "targets" and "support" in names else arguments


def test_every_option_is_here():
    parameters = inspect.signature(grpo_kernels.fused_grpo_loss).parameters
    positional = {"hidden", "head", "targets", "advantages", "mask", "execution"}
    assert set(HEAD_OPTIONS) == {field.name for field in fields(LMHead)} - {"weight"}
    assert set(EXECUTION_OPTIONS) == {field.name for field in fields(Execution)}
    assert set(CALL_OPTIONS) == set(parameters) - positional
    assert all(name in NAMED for pair in REFUSED for name in pair)


def batch_of(names, dtype=torch.float32, **sizes):
    """Sums without a rounding where logits are rounded, so that both round to the same."""
    if "logits_dtype" in names and dtype == torch.float32:
        dtype = torch.bfloat16
    batch = exact_batch(dtype, **{"B": 4, "T": 9, "H": 32, "V": V, **sizes})
    if "ce_weights" in names:
        batch = with_cross_entropy(batch)
        hidden = (batch.hidden.float() * 16).round().clamp(-64, 64) / 16
        batch = replace(batch, hidden=hidden.to(dtype))
    if "support" in names:
        options = {name: NAMED[name] for name in names if NAMED[name][1] in SOFTMAX_OPTIONS}
        options = {field: value(batch) for _, field, value in options.values()}
        batch = with_logps_of(batch, make_support(scored(batch)), **options)
    return packed(batch) if {"packed", "per_sequence"} & set(names) else batch


def options_of(batch, names, objective=None):
    """Fields of the head and of the execution, and arguments of the loss."""
    options = {"head": {}, "execution": {}, "call": {}}
    for name in names:
        where, field, value = NAMED[name]
        options[where][field] = value(batch)
    call = options["call"]
    if batch.cu_seqlens is not None:
        call["cu_seqlens"] = batch.cu_seqlens
    if objective is not None:
        settings, tensors = OBJECTIVES[objective]
        call["config"] = config(**settings)
        call |= {name: getattr(batch, name) for name in tensors}
    if "reference" in call:
        estimator = {"kl_estimator": "exact", "kl_clamp": None} if "exact_kl" in names else {}
        cfg = call.get("config", config())
        call["config"] = replace(cfg, **{"beta": cfg.beta or 0.2, **estimator})
        if objective is not None:
            call.pop("ref_logps", None)
    return options.values()


def exactly(head, call, dtype):
    """Returns the options of a head and of a call that the reference takes, in float64."""
    head = moved({name: x for name, x in head.items() if name != "ranks"}, torch.float64)
    call = moved(call, torch.float64)
    if head.pop("logits_dtype", None):
        call["rounded_to"] = dtype
    return head, call


def moved(x, to):
    """Tensors, wherever they are, on a device, or those of floats in a dtype."""
    if isinstance(x, torch.Tensor):
        return x.to(to) if isinstance(to, str) or x.is_floating_point() else x
    if isinstance(x, LMHead):
        return LMHead(**{field.name: moved(getattr(x, field.name), to) for field in fields(x)})
    if isinstance(x, dict):
        return {name: moved(value, to) for name, value in x.items()}
    if isinstance(x, tuple):
        items = [moved(value, to) for value in x]
        return type(x)(*items) if hasattr(x, "_fields") else tuple(items)
    return x


def leaves_of(batch, head, frozen, *, truth, rows, device):
    """The tensors with a gradient: float64 for the truth, `rows` of the vocabulary on a rank."""
    leaves = {"hidden": batch.hidden, "weight": batch.weight}
    leaves |= {"bias": head["bias"]} if "bias" in head else {}
    leaves |= dict(zip(("a_out", "lora_b"), head.get("low_rank", ()), strict=False))
    for name, x in leaves.items():
        leaf = x[rows] if rows is not None and name in VOCABULARY_FIELDS else x
        leaf = leaf.detach().double() if truth else leaf.detach().clone().to(device)
        leaves[name] = leaf.requires_grad_(name not in frozen)
    return leaves


def part_of(other, ranks, rows):
    """The reference's model as a rank has it."""
    if ranks is None:
        return other
    head = other.head
    rows, (a_out, lora_b) = rows or slice(None), head.low_rank
    part = {"weight": head.weight[rows], "bias": head.bias[rows], "low_rank": (a_out, lora_b[rows])}
    return Reference(other.hidden, head.replace(**part, ranks=ranks))


def run(batch, names, *, truth, call, objective=None, rows=None, device="cpu"):
    """Result and gradients of a call with these options; one of ranks has `rows` of the head."""
    *how, base = call.split()
    head, execution, call_options = options_of(batch, names, objective)
    if base == "grpo_loss":
        return run_on_logps(batch, call_options, execution, truth=truth, device=device)
    if base in KINDS:
        call_options.setdefault("reference", reference_of(batch))
    if base == "entries":
        call_options["support"] = make_support(scored(batch), without=0.0)
    frozen = ("weight", "bias") if "frozen" in how else ()
    leaves = leaves_of(batch, head, frozen, truth=truth, rows=rows, device=device)
    if truth:
        head, call_options = exactly(head, call_options, batch.hidden.dtype)
    else:
        head |= {"ranks": VocabRanks(dist.group.WORLD)} if rows is not None else {}
        if "reference" in call_options:
            call_options["reference"] = part_of(call_options["reference"], head.get("ranks"), rows)
        head, call_options = moved(head, device), moved(call_options, device)
        call_options["execution"] = Execution(**execution)
        batch = batch.to(device, batch.hidden.dtype)
    head |= {name: leaves[name] for name in ("weight", "bias") if name in leaves}
    if "low_rank" in head:
        head["low_rank"] = (leaves["a_out"], leaves["lora_b"])
    head_args = leaves["hidden"], LMHead(**head) if len(head) > 1 else head["weight"]

    def function(name):
        return getattr(exact if truth else grpo_kernels, name)

    of = {"loss": loss_call, **dict.fromkeys(KINDS, divergence_call)}.get(base, logps_call)
    result = of(function, head_args, batch, call_options, base=base, entropy="frozen" not in how)
    return with_gradients(result, leaves)


def with_gradients(result, leaves):
    (4.0 * result.loss).backward()  # as AMP scales it
    gradients = {k: None if x.grad is None else x.grad.cpu() / 4 for k, x in leaves.items()}
    metrics = moved(result.metrics, "cpu")
    return Result(result.loss.detach().cpu(), metrics, result.logps.detach().cpu(), gradients)


def run_on_logps(batch, options, execution, *, truth, device):
    """`grpo_loss` of log-probs near the old ones; masked tokens have an entropy of NaN."""
    noise = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(1)) / 5
    logps, rows = batch.old_logps + noise, scored(batch).mask
    if batch.ce_weights is not None:
        logps = torch.where(rows & ~batch.mask, -noise.abs(), logps)
    # The entropy has no gradient where the objective does not use it.
    leaves = {"logps": logps, "entropy": (1 + noise).masked_fill(~batch.mask, torch.nan)}
    leaves = moved(moved(leaves, batch.hidden.dtype), torch.float64 if truth else device)
    leaves = {name: x.requires_grad_() for name, x in leaves.items()}
    if truth:
        options = moved(options, torch.float64)
    else:
        options, batch = moved(options, device), batch.to(device, batch.hidden.dtype)
        options["backend"] = execution.get("backend", "auto")
    call = exact.grpo_loss if truth else grpo_kernels.grpo_loss
    out = call(leaves["logps"], batch.advantages, batch.mask, entropy=leaves["entropy"], **options)
    result = with_gradients(Result(out.loss, out.metrics, torch.zeros(0)), leaves)
    assert (result.gradients["logps"][~rows] == 0).all()
    return result


def loss_call(function, args, batch, options, **_):
    call = function("fused_grpo_loss")
    out = call(*args, batch.targets, batch.advantages, batch.mask, **options)
    metrics = {name: x for name, x in out.metrics.items() if not name.startswith("support/")}
    per_token = [x.flatten() for x in (out.logps, out.ref_logps, out.kl) if x is not None]
    return Result(out.loss, metrics, torch.cat(per_token))


def divergence_call(function, args, batch, options, *, base, **_):
    """Runs a distillation call; the reference's metrics are computed from its divergences."""
    mask, other = scored(batch).mask, options["reference"]
    how, count = {"kind": base, "beta": 0.3}, scored(batch).mask.sum()
    if "execution" in options:
        out = function("fused_distillation_loss")(
            *args, other, mask, execution=options["execution"], **how
        )
        metrics = dict(out.metrics)
        if LMHead.of(args[1]).logits_dtype == "model":
            del metrics["agreement"]  # rounded logits may be equal
        return Result(out.loss, metrics, out.divergence)
    rounded_to = {"rounded_to": options.get("rounded_to")}
    divergences = exact.divergence(*args, other, mask, **how, **rounded_to)
    entropies = [
        exact.linear_logprobs(*model, batch.targets, mask, **rounding).entropy.sum() / count
        for model, rounding in ((args, rounded_to), (other, {}))
    ]
    names = ("tokens", "divergence", "divergence_max", "entropy", "ref_entropy")
    loss = divergences.sum() / count
    metrics = dict(zip(names, (count, loss, divergences.max(), *entropies), strict=True))
    if rounded_to["rounded_to"] is None:
        tops = [exact.linear_logits(*model).argmax(-1) for model in (args, other)]
        metrics["agreement"] = ((tops[0] == tops[1]) & mask).sum() / count
    return Result(loss, metrics, divergences)


def logps_call(function, args, batch, options, *, base, entropy):
    """A loss of all results, each with a gradient for other rows."""
    mask, names = scored(batch).mask, ("support", "execution", "rounded_to")
    options = {name: x for name, x in options.items() if name in names}
    if "execution" in options:
        options["entropy"] = entropy
    if base == "entries":
        options["entries"] = True
    targets = {"entries": None, "targets": several(batch)}.get(base, batch.targets)
    out = function("linear_logprobs")(*args, targets, mask, **options)
    results = list(out if entropy else out[:1])
    g, total = torch.Generator().manual_seed(5), 0.0
    for factor, x in zip((0.5, -0.1, 0.2), results, strict=False):
        weights = torch.randn(x.shape, generator=g)
        weights[weights.abs() < 0.3] = 0.0
        total = total + factor * (x * weights.to(x.device)).sum()
    return Result(total, {}, torch.cat([x.detach().flatten() for x in results]))


def several(batch):
    """Four targets per token: its own, twice, one that is drawn, and the first id of all."""
    mask = scored(batch).mask
    drawn = torch.randint(V, mask.shape, generator=torch.Generator().manual_seed(3)).to(mask.device)
    drawn = drawn.masked_fill(~mask, 10**6)
    return torch.stack([batch.targets, drawn, 0 * drawn, batch.targets], -1)


def check(names, call, dtype=torch.float32, objective=None, device="cpu", floor=0.0, **sizes):
    """Compares a call with the reference, or expects it to be refused."""
    batch = batch_of(names, dtype, **sizes)
    dtype, options = batch.hidden.dtype, {"call": call, "objective": objective}
    arguments = refusals(names, call)
    if arguments:
        message = rf"^({'|'.join(arguments)})(: expected .*; got | does not work with .*pass )"
        with pytest.raises(ValueError, match=message):
            run(batch, names, truth=False, device=device, **options)
        return
    expected = run(batch, names, truth=True, **options)
    actual = run(batch, names, truth=False, device=device, **options)
    compare(actual, expected, dtype, call, device, floor, parts=1 + ("support" in names))


def compare(actual, expected, dtype, call, device="cpu", floor=0.0, parts=1):
    """`floor`: the least that an error is divided by, where a gradient may be 0.

    `parts`: of a gradient, each rounded before they are added: with a support, the tokens with a
    set and those without.
    """
    for name, x in expected.gradients.items():
        assert x is None or floor or name == "entropy" or x.norm() > 0, name
    tolerance = TOLERANCE[dtype]
    if call == "grpo_loss" and dtype == torch.float32:
        tolerance = 1e-5
    # With a frozen head, kept in its dtype, and rounded again where it is multiplied.
    if call == "frozen logps" or (parts > 1 and dtype in HALF):
        tolerance *= 1.6
    if device != "cpu" and dtype == torch.bfloat16:
        tolerance = 6e-3
    assert_matches(actual, expected, tolerance, logps=1e-4, floor=floor, rounded_to=dtype)


PAIRS = [x for x in itertools.combinations(NAMED, 2) if NAMED[x[0]][:2] != NAMED[x[1]][:2]]
LOSS_OPTIONS = set(itertools.chain.from_iterable(CALL_OPTIONS.values())) - {"support"}
HEAD_PAIRS = [pair for pair in PAIRS if not LOSS_OPTIONS & set(pair)]
TWO_HEAD_PAIRS = [pair for pair in HEAD_PAIRS if "support" not in pair]
LOGPS_OPTIONS = {"triton", *LOSS_OPTIONS} - {"reference", "exact_kl"}
LOGPS_PAIRS = [pair for pair in PAIRS if set(pair) <= LOGPS_OPTIONS]
# The calls, the pairs that they take, and of how many one is in the fast tier.
CALLS = {
    "loss": (PAIRS, 1),
    "grpo_loss": (LOGPS_PAIRS, 1),
    "logps": (HEAD_PAIRS, 3),
    "targets": (HEAD_PAIRS, 3),
    "entries": (TWO_HEAD_PAIRS, 3),
    "frozen logps": (HEAD_PAIRS, 3),
    "frozen loss": (PAIRS, 9),
    **{kind: (TWO_HEAD_PAIRS, 7) for kind in KINDS},
    "frozen reverse": (TWO_HEAD_PAIRS, 20),
}


def one_in(cases, counts):
    """Leaves to the slow tier all cases of a kind but one in `counts[kind]`.

    A case is its names, whatever else, and last its kind; each kind begins with another one.
    """
    seen, marked = {}, []
    for case in cases:
        kind = case[-1]
        place = seen[kind] = seen.get(kind, len(seen)) + 1
        marks = [pytest.mark.slow] if place % counts[kind] else []
        if "triton" in case[0] and stores_bfloat16(case):
            marks.append(pytest.mark.compiled)
        marked.append(pytest.param(*case, marks=marks))
    return marked


def few(names):
    """Fewer tokens, still of two chunks, where the interpreter takes a program per row."""
    return {"T": 5} if "triton" in names else {}


def stores_bfloat16(case):
    """True where kernels store bfloat16, of which the interpreter cuts digits off."""
    of_entries = case[-1] == "entries" or "support" in case[0]
    return torch.bfloat16 in case or (of_entries and "logits_dtype" in case[0])


def name_of(value):
    return "-".join(value) if isinstance(value, tuple) else str(value).removeprefix("torch.")


@pytest.mark.parametrize(
    ("pair", "call"),
    one_in(
        ((pair, call) for call, (pairs, _) in CALLS.items() for pair in pairs),
        {call: count for call, (_, count) in CALLS.items()},
    ),
    ids=name_of,
)
def test_pair(pair, call):
    check(pair, call, **few(pair))


# Options that may conflict with an objective; one of so many cases is in the fast tier.
BESIDE = {
    "chunk_bytes": 1, "packed": 2, "triton": 9, "support": 3, "ce_weights": 3, "reference": 4,
    "exact_kl": 4,
}  # fmt: skip
# More tokens than a block of the kernel has.
MANY = {"B": 11, "T": 31}


@pytest.mark.parametrize(
    ("objective", "option"), one_in(itertools.product(OBJECTIVES, BESIDE), BESIDE)
)
def test_objective(objective, option):
    check(("bias", option), "loss", objective=objective, B=6, T=11)


@pytest.mark.parametrize("options", ((), ("triton",), ("packed",), ("ce_weights", "triton")))
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_objective_of_log_probs(objective, options):
    check(options, "grpo_loss", objective=objective, **MANY)


# Alone, and all that go together. Triton's interpreter does not have bfloat16.
EVERYTHING = ("bias", "low_rank", "logit_scale", "softcap", "temperatures", "chunk_bytes")


def with_each(dtypes):
    """Every option, and all of the head, in each call."""
    for call in CALLS:
        names = sorted({name for pair in CALLS[call][0] for name in pair})
        everything = () if call == "grpo_loss" else EVERYTHING
        for options in (*((name,) for name in names), everything):
            yield from ((options, dtype, call) for dtype in dtypes)


@pytest.mark.parametrize(
    ("names", "dtype", "call"),
    # On a CPU GEMMs are in float32.
    one_in(with_each(HALF), dict.fromkeys(CALLS, 3)),
    ids=name_of,
)
def test_half_precision(names, dtype, call):
    """The error is no more than the rounding of the gradients."""
    check(names, call, dtype)


@pytest.mark.parametrize(
    ("call", "names"),
    [
        *in_turn([x for x in CALLS if x != "grpo_loss"], (EVERYTHING, (*EVERYTHING, "triton"))),
        # Gradients of the policy's statistics beside a divergence's, through all of the head.
        *(("loss", (*EVERYTHING, x, "exact_kl", "entropy_bonus")) for x in ("triton", "old_logps")),
    ],
    ids=name_of,
)
def test_everything(call, names):
    check(names, call, **few(names))


# The comparison itself


@pytest.mark.parametrize("factor", (0.0, -1.0, 0.98, 1.02))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=name_of)
@pytest.mark.parametrize(
    ("call", "names", "count"),
    (
        ("loss", ("bias", "low_rank", "old_logps", "reference"), 10),
        ("grpo_loss", ("old_logps", "entropy_bonus"), 4),
    ),
)
def test_what_is_wrong_is_seen(call, names, count, dtype, factor):
    """Zeros, another sign and two percent: in each gradient, metric and value."""
    batch = batch_of(names, dtype)
    right = run(batch, names, truth=False, call=call)
    compare(right, right, dtype, call)
    wrong = [replace(right, loss=factor * right.loss)]
    wrong += [replace(right, logps=factor * right.logps)] * (right.logps.numel() > 0)
    for name, x in right.gradients.items():
        wrong.append(replace(right, gradients={**right.gradients, name: factor * x}))
    for name, x in right.metrics.items():
        if x.abs() > 0.1:
            wrong.append(replace(right, metrics={**right.metrics, name: factor * x}))
    assert len(wrong) > count
    for result in wrong:
        with pytest.raises(AssertionError):
            compare(result, right, dtype, call)


def test_memory_that_nobody_wrote_is_nan():
    x = torch.zeros(3)
    assert all(y.isnan().all() for y in (torch.empty(3), torch.empty_like(x), x.new_empty(3)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("names", "dtype", "call"),
    # The group of ranks is of a CPU.
    [case for case in with_each((torch.float32, *HALF)) if "ranks" not in case[0]],
    ids=name_of,
)
def test_on_a_gpu(names, dtype, call):
    check(names, call, dtype, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.float32, *HALF), ids=name_of)
@pytest.mark.parametrize("backend", ("torch", "triton"))
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_objectives_on_a_gpu(objective, backend, dtype):
    names = ("triton",) if backend == "triton" else ()
    options = {"objective": objective, "device": "cuda"}
    check(("bias", "chunk_bytes", *names), "loss", dtype, B=6, T=11, **options)
    check(names, "grpo_loss", dtype, B=64, T=31, **options)

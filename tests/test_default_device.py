"""Calls and helpers on tensors of the CPU, whatever `torch.set_default_device` says."""

import inspect
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import grpo_kernels
from grpo_kernels import Execution, LMHead, Reference, VocabRanks, reference
from grpo_kernels.base.layout import to_device
from grpo_kernels.explain import Thresholds, explain
from grpo_kernels.explain.exports import read
from grpo_kernels.integrations import transformers as attached
from grpo_kernels.integrations.generation import SupportRecorder, support_of
from grpo_kernels.integrations.hf_head import check_logits
from grpo_kernels.integrations.liger import FusedLinearGRPOLoss
from grpo_kernels.integrations.verl import linear_cross_entropy
from grpo_kernels.integrations.vllm import names_and_weights
from grpo_kernels.training.problems.rewards import weighted_sum
from grpo_kernels.training.step import samples
from grpo_kernels.training.step.policy import Batch
from tests.helpers.batches import OBJECTIVES, config, make_batch, packed, with_cross_entropy
from tests.helpers.head_options import BACKENDS
from tests.helpers.supports import csr, make_support
from tests.helpers.tiny_models import make_model

pytestmark = pytest.mark.usefixtures("real_memory")
BATCH = with_cross_entropy(make_batch(B=4, T=5, H=16, V=61))
PACKED = packed(BATCH)
SHOWN = replace(BATCH, mask=BATCH.mask | (BATCH.ce_weights != 0))
SUPPORT = make_support(SHOWN, most=4)
IDS = torch.randint(1, 257, (2, 6), generator=torch.Generator().manual_seed(0))
SETS = [csr([[5, 9], [], [2, 7, 4]]), None, csr([[3]])]
MODEL = make_model("qwen2", tie_word_embeddings=False).eval()


def grads(loss, *leaves):
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def leaves_of(batch):
    return [x.detach().clone().requires_grad_() for x in (batch.hidden, batch.weight, batch.bias)]


def fused(backend, batch=BATCH, case="everything", **more):
    options, names = OBJECTIVES[case]
    hidden, weight, bias = leaves_of(batch)
    tensors = {name: getattr(batch, name) for name in (*names, "ce_weights")}
    out = grpo_kernels.fused_grpo_loss(
        hidden, LMHead(weight, bias, temperature=batch.temperature, softcap=30.0), batch.targets,
        batch.advantages, batch.mask, cu_seqlens=batch.cu_seqlens, config=config(**options),
        execution=Execution(backend=backend, **more.pop("execution", {})), **tensors, **more,
    )  # fmt: skip
    return [*grads(out.loss, hidden, weight, bias), out.logps, *out.metrics.values()]


def scored(backend, call, *more, batch=BATCH, **options):
    hidden, weight, bias = leaves_of(batch)
    head = LMHead(weight, bias, **options.pop("head", {}))
    execution = Execution(backend=backend)
    out = call(hidden, head, *more, execution=execution, **options)
    value = next(x for x in out if isinstance(x, torch.Tensor))
    return [*grads(value.sum(), hidden, weight), *(x for x in out if isinstance(x, torch.Tensor))]


def other_model(batch=BATCH):
    return Reference(batch.hidden.nan_to_num() + 0.1, batch.weight)


def plain(backend, batch=BATCH, case="everything"):
    options, names = OBJECTIVES[case]
    logps = (batch.old_logps.nan_to_num(-2.0) + 0.1).requires_grad_()
    entropy = (-logps).detach().requires_grad_()
    out = grpo_kernels.grpo_loss(
        logps, batch.advantages, batch.mask, entropy=entropy, cu_seqlens=batch.cu_seqlens,
        config=config(**options), backend=backend, **{x: getattr(batch, x) for x in names},
    )  # fmt: skip
    return [*grads(out.loss, logps), *out.metrics.values()]


def softmaxed(backend, batch=BATCH):
    logits = (batch.hidden.nan_to_num() @ batch.weight.T).requires_grad_()
    out = grpo_kernels.selective_log_softmax(logits, batch.targets.clamp(min=0), backend=backend)
    logps = out if isinstance(out, torch.Tensor) else out[0]
    return grads(logps.sum(), logits)


def divergence(backend):
    z = BATCH.ref_logps[BATCH.mask].clone().requires_grad_()
    offsets = torch.stack([IDS[0, 0] * 0, IDS[0, 0] * 0 + 2, IDS[0, 0] * 0 + len(z)])
    return grads(grpo_kernels.topk_kl(z, z.detach() * 0.9, offsets).sum(), z)


# Calls that have a backend, by name: the values and gradients to compare.
CALLS = {
    "fused_grpo_loss": fused,
    "fused_grpo_loss, packed": lambda x: fused(x, PACKED),
    "fused_grpo_loss, chunks": lambda x: fused(x, execution={"chunk_bytes": 12 * 61}),
    "fused_grpo_loss, support": lambda x: fused(x, case="kl_old_delta", support=SUPPORT),
    "fused_grpo_loss, sequences": lambda x: fused(x, PACKED, "gspo"),
    "fused_grpo_loss, reference": lambda x: fused(x, case="old_logps", reference=other_model()),
    "linear_logprobs": lambda x: scored(
        x, grpo_kernels.linear_logprobs, BATCH.targets, BATCH.mask, entropy=True
    ),
    "linear_logprobs, support": lambda x: scored(
        x, grpo_kernels.linear_logprobs, BATCH.targets, BATCH.mask, support=SUPPORT
    ),
    "fused_distillation_loss": lambda x: scored(
        x, grpo_kernels.fused_distillation_loss, other_model(), BATCH.mask
    ),
    "grpo_loss": plain,
    "grpo_loss, packed": lambda x: plain(x, PACKED, "gspo_token"),
    "selective_log_softmax": softmaxed,
}


def explained(folder):
    options, names = OBJECTIVES["everything"]
    tensors = {name: getattr(BATCH, name) for name in names}
    out = grpo_kernels.fused_grpo_loss(
        BATCH.hidden, BATCH.weight, BATCH.targets, BATCH.advantages, BATCH.mask,
        config=config(**options), **tensors,
    )  # fmt: skip
    shown = explain(
        out, BATCH.targets, BATCH.advantages, BATCH.mask, config=config(**options), groups=2,
        rewards=[1.0, 0.0, 0.5, 2.0], thresholds=Thresholds(gap=0.01, share=0.01), **tensors,
    )  # fmt: skip
    for suffix in (".jsonl", ".html"):
        shown.write(folder / f"page{suffix}")
    again, page = read(folder / "page.jsonl"), (folder / "page.html").read_text()
    columns = [*shown.columns.values(), *again.columns.values(), again.position, again.sequence]
    return [*columns, str(shown), str(again), page]


def recorded(folder):
    recorder = SupportRecorder(top_k=30, temperature=0.8)
    torch.manual_seed(0)
    out = MODEL.generate(
        IDS, attention_mask=IDS > 0, max_new_tokens=3, pad_token_id=0, logits_processor=[recorder],
        **recorder.generate_options(MODEL),
    )  # fmt: skip
    return [out, *(x for support in recorder.supports([3, 2]) for x in support)]


def from_the_model(folder):
    check_logits(MODEL)
    attached.attach_fused_head(MODEL, temperature=0.7)
    try:
        advantages, mask = BATCH.advantages[:2], IDS[:, 1:] > 100
        objective = attached.Objective(advantages, mask=mask)
        out = MODEL(input_ids=IDS, labels=IDS, fused_head=objective)
        plain_loss = MODEL(input_ids=IDS, labels=IDS).loss
        weight = MODEL.lm_head.weight
        return [*grads(out.loss, weight), *grads(plain_loss, weight), objective.output.logps]
    finally:
        attached.detach_fused_head(MODEL)


def by_liger(folder):
    hidden, weight, bias = leaves_of(BATCH)
    loss = FusedLinearGRPOLoss(beta=0.1)
    out = loss(
        hidden.nan_to_num(), weight, BATCH.targets.clamp(min=0), BATCH.mask.long(),
        BATCH.advantages, bias, BATCH.ref_logps, BATCH.old_logps,
    )  # fmt: skip
    return [*grads(out[0], weight, bias), *out[1]]


def of_the_trainer(folder):
    batch = Batch.from_rows([[3, 4], [5]], [0, 1], [[6], [7, 8]], 0)
    completions = [SimpleNamespace(sampled_flags=[True], ended=x) for x in (True, False)]
    mask = samples.loss_mask(completions, True)
    rewards = BATCH.advantages[:, None].double().repeat(1, 2)
    padded = samples.pad_per_token([[0.5], None], mask)
    tensors = [x for x in vars(batch).values() if x is not None]
    return [*tensors, mask, padded, weighted_sum(rewards, [1.0, 2.0]), to_device(mask, None)]


def batched(folder):
    targets = [[9, 1, 2], [], [8]]
    both = (grpo_kernels.batch_support(SETS, 3, targets=x) for x in (None, targets))
    return [x for support in both for x in support]


# Helpers, and calls without a backend.
HELPERS = {
    "batch_support": batched,
    "support_of": lambda _: [*support_of([[1, 2], [], [3]])],
    "SupportRecorder": recorded,
    "group_advantages": lambda _: [
        *grpo_kernels.group_advantages(BATCH.advantages, 2),
        *grpo_kernels.group_advantages(BATCH.ref_logps.nan_to_num(1.0, 1.0, 1.0), 2),
    ],
    "completion_mask": lambda _: [grpo_kernels.completion_mask(IDS, [1, 2])],
    "per_token_kl": lambda _: [
        grpo_kernels.per_token_kl(BATCH.old_logps, BATCH.ref_logps, BATCH.mask)
    ],
    "topk_kl": divergence,
    "check_sampler": lambda _: [
        str(grpo_kernels.check_sampler(BATCH.sampling_logps, BATCH.old_logps, BATCH.ref_logps,
                                       BATCH.mask))
    ],
    "explain": explained,
    "attach_fused_head": from_the_model,
    "FusedLinearGRPOLoss": by_liger,
    "linear_cross_entropy": lambda _: [
        *linear_cross_entropy(BATCH.hidden, BATCH.weight, BATCH.targets, mask=BATCH.mask)
    ],
    "names_and_weights": lambda _: [x for row in names_and_weights(MODEL) for x in row],
    "training": of_the_trainer,
    "reference": lambda _: [
        *reference.linear_logprobs(BATCH.hidden, BATCH.weight, BATCH.targets, BATCH.mask,
                                   support=SUPPORT)
    ],
}  # fmt: skip


def test_every_public_call_is_here():
    public = {name: getattr(grpo_kernels, name) for name in grpo_kernels.__all__}
    calls = {name for name, x in public.items() if inspect.isfunction(x)}
    assert calls - {"gather_tokens"} <= {name.partition(",")[0] for name in (*CALLS, *HELPERS)}


def expect_same(compute):
    """Values on the CPU, and with "meta" as the default device the same."""
    expected = compute()
    with torch.device("meta"):
        actual = compute()
    assert len(actual) == len(expected) > 0
    for ours, theirs in zip(actual, expected, strict=True):
        if isinstance(theirs, torch.Tensor):
            assert ours.device.type == "cpu"
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        else:
            assert ours == theirs


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("call", CALLS)
def test_calls_follow_the_device_of_their_inputs(call, backend):
    expect_same(lambda: CALLS[call](backend))


@pytest.mark.parametrize("helper", HELPERS)
def test_helpers_stay_on_the_cpu(helper, tmp_path):
    expect_same(lambda: HELPERS[helper](tmp_path))


def test_ranks(one_rank):
    def compute():
        hidden, weight, _ = leaves_of(BATCH)
        head = LMHead(weight, ranks=VocabRanks(one_rank))
        out = grpo_kernels.fused_grpo_loss(
            hidden, head, BATCH.targets, BATCH.advantages, BATCH.mask, support=SUPPORT,
            ce_weights=BATCH.ce_weights,
        )  # fmt: skip
        tokens = BATCH.bias.clone().requires_grad_()
        gathered = grpo_kernels.gather_tokens(tokens, one_rank)
        return [*grads(out.loss, hidden, weight), *grads(gathered.square().sum(), tokens)]

    expect_same(compute)

"""Bad input gets an error that names the argument, what was expected and what came."""

import contextlib
import inspect
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import grpo_kernels
from grpo_kernels import (
    Execution,
    GRPOLossConfig,
    LMHead,
    Reference,
    Support,
    VocabRanks,
    grpo_loss,
    reference,
    selective_log_softmax,
)
from grpo_kernels.explain import Thresholds, explain
from grpo_kernels.loss.losses import Clip
from grpo_kernels.training import TrainingConfig
from tests.helpers.batches import EXECUTION_FIELDS, HEAD_FIELDS, called
from tests.helpers.quantised import Quantised

B, T, H, V = 2, 3, 4, 7
NAN, INF = float("nan"), float("inf")
HEAD_CALLS = ("fused_grpo_loss", "linear_logprobs", "fused_distillation_loss")
HEAD_ARGS = {"hidden", "weight", *HEAD_FIELDS, *EXECUTION_FIELDS}
# Each call's arguments, those of its head and its execution among them; and `packed`.
CALLS = {
    name: {*inspect.signature(getattr(grpo_kernels, name)).parameters, "packed"}
    | (HEAD_ARGS if name in HEAD_CALLS else set())
    for name in (*HEAD_CALLS, "grpo_loss")
}


def arguments_of(call, **changes):
    """Valid arguments of a call, with changes; packed when `packed` is given."""
    tokens = (B * T,) if changes.pop("packed", False) else (B, T)
    good = {"mask": torch.ones(tokens)}
    if call == "grpo_loss":
        good["logps"] = torch.zeros(tokens)
    else:
        good |= {"hidden": torch.randn(*tokens, H), "weight": torch.randn(V, H)}
        good["targets"] = torch.zeros(tokens, dtype=torch.long)
    if call == "fused_distillation_loss":
        good["reference"] = Reference(torch.randn(*tokens, 2), torch.randn(V, 2))
        del good["targets"]
    elif call != "linear_logprobs":
        good["advantages"] = torch.ones(tokens[0])
    return good | changes


def sizes(*offsets):
    """Offsets of packed sequences."""
    return {"packed": True, "cu_seqlens": torch.tensor(offsets)}


def loss_call(**options):
    return {"config": GRPOLossConfig(**options)}


HALVES, NO_MASK, LOGPS = torch.full((B, T), 0.5), {"mask": None}, torch.full((B, T), -1.0)
NOT_IDS, IDS_0 = {"targets": torch.full((B, T), -100)}, {"targets": torch.zeros(B, T).long()}
BANS_0, NO_SETS = torch.zeros(V), Support(torch.zeros(0).long(), torch.zeros(B * T + 1).long())
BANS_0[0] = -INF
A, LORA_B = torch.randn(B, T, 3), torch.randn(V, 3)
QUANTISED = "expected a dense tensor that is not quantised; got Quantised"
# A message, and the changes of arguments that every call with these arguments refuses so.
WRONG_TYPES = (
    ("hidden: expected a tensor; got list", {"hidden": [1.0]}),
    ("hidden: expected dtype float32, bfloat16, float16; got float64: cast it, or use",
     {"hidden": torch.zeros(B, T, H, dtype=torch.float64)}),
    (f"hidden: {QUANTISED}", {"hidden": Quantised(torch.ones(B, T, H))}),
    (f"weight: {QUANTISED}", {"weight": Quantised(torch.ones(V, H))}),
    (f"bias: {QUANTISED}", {"bias": Quantised(torch.ones(V))}),
    (rf"low_rank\[1\]: {QUANTISED}", {"low_rank": (A, Quantised(LORA_B))}),
    (rf"reference.head.weight: {QUANTISED} \(torch.strided\): dequantise it",
     {"reference": Reference(torch.zeros(B, T, H), Quantised(torch.ones(V, H)))}),
    (r"weight: expected a dense .*; got Tensor \(torch.sparse_coo\)",
     {"weight": torch.ones(V, H).to_sparse()}),
    (r"hidden: expected a dense .*; got Tensor \(torch.strided\)",
     {"hidden": torch.nested.nested_tensor([torch.ones(T, H)] * B)}),
    ("targets: expected dtype int64, .*; got float32", {"targets": torch.zeros(B, T)}),
    ("mask: expected a tensor; got list", {"mask": [[1] * T] * B}),
    ("old_logps: expected dtype float32, .*; got int64", {"old_logps": torch.ones(B, T).long()}),
    ("ce_weights: expected a tensor; got float", {"ce_weights": 0.1}),
    ("ce_weights: expected dtype float32, .*; got bool", {"ce_weights": torch.ones(B, T).bool()}),
    ("config: expected a GRPOLossConfig; got dict", {"config": {"beta": 0.1}}),
    ("num_items: expected a number; got str '5'", {"num_items": "5"}),
    ("cu_seqlens: expected dtype int64, int32; got float32", sizes(0.0, 6.0)),
    ("logit_scale: expected a number; got NoneType None", {"logit_scale": None}),
    ("temperature: expected a number; got NoneType None", {"temperature": None}),
    ("low_rank: expected a pair", {"low_rank": A}),
    ("low_rank: expected a pair", {"low_rank": (A, LORA_B, LORA_B)}),
    (r"low_rank\[0\]: expected dtype .* got float64", {"low_rank": (A.double(), LORA_B)}),
    ("batch_invariant: expected a bool; got 1", {"batch_invariant": 1}),
)  # fmt: skip
WRONG_VALUES = (
    (r"hidden: expected shape \[B, T, H\] or \[N, H\]; got \[4\]", {"hidden": torch.zeros(H)}),
    (r"weight: expected shape \[V, 4\]; got \[7, 5\]", {"weight": torch.zeros(V, H + 1)}),
    (r"weight: expected shape \[V, H\]; got \[0\]. With ZeRO-3, call",
     {"weight": torch.zeros(0)}),
    ("weight: expected a tensor on cpu; got one on meta",
     {"weight": torch.zeros(V, H, device="meta")}),
    (r"targets: expected shape \[2, 3\]; got \[2, 4\]", {"targets": torch.ones(B, T + 1).long()}),
    (r"targets: expected shape \[2, 3\]; got \[2, 4\]: cut them to the ids that hidden predicts, "
     r"targets\[:, -3:\]", {"targets": torch.ones(B, T + 1).long()}),
    (r"targets: expected shape \[2, 3\]; got \[2, 2\]: cut hidden to the positions that predict "
     r"the targets, hidden\[:, -3:-1\]", {"targets": torch.ones(B, T - 1).long()}),
    (r"targets: expected shape \[2, 3\]; got \[2, 1\]: cut hidden .* hidden\[:, -2:-1\]",
     {"targets": torch.ones(B, 1).long()}),
    (r"targets: expected shape \[6\]; got \[5\]: cut hidden .* hidden\[-6:-1\]",
     {"packed": True, "targets": torch.ones(B * T - 1).long(), **NO_MASK}),
    (r"targets: expected shape \[6\]; got \[4\]$",
     {"packed": True, "targets": torch.ones(B * T - 2).long(), **NO_MASK}),
    (r"hidden: its last dimension 7 is the head's number of rows: pass hidden states, "
     r"\[..., 4\], not logits", {"hidden": torch.zeros(B, T, V)}),
    (r"weight: expected shape \[V, 4\]; got \[4, 7\]: transpose it",
     {"weight": torch.zeros(H, V)}),
    (r"mask: expected shape \[2, 3\]; got \[2, 5\]: cut it to the positions of the targets, "
     r"mask\[:, -3:\]", {"mask": torch.ones(B, T + 2)}),
    (r"mask: expected shape \[2, 3\]; got \[2\]: a value per sequence, as advantages are, is no ",
     {"mask": torch.ones(B), "advantages": torch.ones(B, T)}),
    (r"old_logps: expected shape \[2, 3\]; got \[2, 4\]: cut it .* old_logps\[:, -3:\]",
     {"old_logps": torch.zeros(B, T + 1)}),
    (r"targets: expected ids in \[0, 7\) at unmasked positions; got ids .*\(6 of them\)",
     {"targets": torch.full((B, T), V)}),
    (r"targets: expected ids in \[0, 7\); got ids outside: mask .*\(6 of them\)",
     NOT_IDS | NO_MASK),
    (r"advantages: expected shape \[2\] or \[2, 3\]; got \[3\]", {"advantages": torch.ones(B + 1)}),
    (r"advantages: expected shape \[6\], or one per sequence together with cu_seqlens; got \[2\]",
     {"packed": True, "advantages": torch.ones(B)}),
    (r"advantages: expected shape \[2\] \(one per sequence\) or \[6\]; got \[3\]",
     {"advantages": torch.ones(3), **sizes(0, 3, 6)}),
    (r"advantages: expected \[6\] to be one per sequence or one per token",
     sizes(0, 2, 2, 3, 4, 5, 6)),
    (r"mask: expected shape \[2, 3\]; got \[2\]", {"mask": torch.ones(B)}),
    (r"mask: expected 0 or 1; got other values \(6 of them\)", {"mask": HALVES}),
    (r"mask: expected 0 or 1; got other values \(6 of them\)",
     {"mask": HALVES, "ce_weights": torch.zeros(B, T)}),
    (r"old_logps: expected shape \[2, 3\]; got \[2\]", {"old_logps": torch.zeros(B)}),
    ("beta=0.1 needs the log-probs of the reference: pass ref_logps",
     loss_call(beta=0.1)),
    (r"ce_weights: expected shape \[2, 3\]; got \[2\]", {"ce_weights": torch.zeros(B)}),
    (r"ce_weights: expected shape \[2, 3\]; got \[2\]", {"ce_weights": torch.zeros(B), **NO_MASK}),
    (r"targets: expected shape \[2, 3\]; got \[2\]",
     {"ce_weights": torch.zeros(B, T), "targets": torch.zeros(B).long()}),
    (r"ce_weights: expected finite numbers; got NaN or inf \(2 of them\)",
     {"ce_weights": torch.tensor([[1.0, NAN, 0.0]] * B), "mask": torch.zeros(B, T)}),
    (r"ce_weights: expected finite numbers; got NaN or inf \(6 of them\)",
     {"ce_weights": torch.full((B, T), -INF), **NO_MASK}),
    (r"targets: expected ids in \[0, 7\) at unmasked positions; got ids .*\(2 of them\)",
     {"ce_weights": torch.tensor([[0.1, 0.0, 0.0]] * B), "mask": torch.zeros(B, T), **NOT_IDS}),
    (r"advantages: expected finite numbers at unmasked positions; got NaN or inf.*\(2 of them\)",
     {"advantages": torch.tensor([0.0, NAN]), "mask": torch.tensor([[1, 1, 1], [1, 0, 1]])}),
    (r"advantages: expected finite numbers at unmasked positions; got .*tokens \(5 of them\)",
     {"advantages": torch.tensor([[NAN, INF, 1.0], [-INF] * 3]), **NO_MASK}),
    (r"advantages: expected finite numbers .* \(6 of them\)",
     {"advantages": torch.full((B,), INF), **NO_MASK}),
    (r"bias: expected shape \[7\]; got \[4\]", {"bias": torch.zeros(H)}),
    (r"bias: expected more than -inf at every unmasked target; .* -inf: .*\(6 of them\)",
     {"bias": BANS_0, **IDS_0}),
    (r"bias: expected more than -inf at every unmasked target; .* -inf: .*\(2 of them\)",
     {"bias": BANS_0.bfloat16(), **IDS_0, "softcap": 9.0, "mask": torch.eye(B, T),
      "support": NO_SETS}),
    ("logit_scale: expected a number > 0, as a float32; got 0", {"logit_scale": 0}),
    ("logit_scale: expected a number > 0, as a float32; got 1e-46", {"logit_scale": 1e-46}),
    (r"low_rank\[0\]: expected hidden @ lora_a.T, of shape", {"low_rank": (A[..., :2], LORA_B)}),
    (r"low_rank\[1\]: expected shape", {"low_rank": (A, LORA_B.T)}),
    ("logits_dtype: expected 'fp32' or 'model'", {"logits_dtype": "bf16"}),
    ("num_items: expected a number > 0, as a float32; got -1", {"num_items": -1}),
    ("num_items: expected a number > 0, as a float32; got 1000", {"num_items": 10**400}),
    (r"num_items: expected a 0-d tensor; got shape \[2\]", {"num_items": torch.ones(2)}),
    ("num_items: expected a tensor on cpu; got one on meta",
     {"num_items": torch.zeros((), device="meta")}),
    ("cu_seqlens does not work with padded input", {"cu_seqlens": torch.tensor([0, 3])}),
    ("loss_type='grpo' with these options works on sequences: .* pass cu_seqlens",
     {"packed": True, **loss_call(loss_type="grpo")}),
    ("loss_type='gspo' with these options works on sequences: .* pass cu_seqlens",
     {"packed": True, **loss_call(loss_type="gspo", aggregation="dapo")}),
    ("cu_seqlens: expected to end at N = 6; got no sequence at all",
     {**sizes(0), **loss_call(loss_type="grpo")}),
    ("cu_seqlens: expected to start at 0, never to decrease, and to end at N = 6", sizes(0, 3, 5)),
    ("cu_seqlens: expected to start at 0, never to decrease", sizes(0, 5, 3, 6)),
    (r"cu_seqlens: expected shape \[B \+ 1\]; got \[\]",
     {"packed": True, "cu_seqlens": torch.tensor(6)}),
    ("is_correction='token_mask' needs the sampler's log-probs: pass sampling_logps",
     loss_call(is_correction="token_mask")),
    (r"sampling_logps: expected shape \[2, 3\]; got \[2, 4\]",
     {"sampling_logps": torch.zeros(B, T + 1)}),
    ("temperature: expected a number > 0, as a float32; got 0", {"temperature": 0}),
    ("temperature: expected a number > 0, as a float32; got 1e\\+39", {"temperature": 1e39}),
    (r"temperature: expected shape \[2, 3\]; got \[2\]", {"temperature": torch.ones(B)}),
    (r"temperature: expected finite numbers > 0; got others \(4 of them\)",
     {"temperature": torch.tensor([[1.0, 0.0, -1.0], [1.0, NAN, INF]])}),
    ("temperature: expected a constant; got a tensor requiring grad",
     {"temperature": torch.ones(B, T, requires_grad=True)}),
    (r"logps: expected more than -inf at unmasked positions; got .* \(2 of them\)",
     {"logps": torch.full((B, T), -INF), "mask": torch.eye(B, T)}),
    ("softcap: expected a number > 0, as a float32; got -1.0", {"softcap": -1.0}),
    ("backend: expected one of auto, triton, torch; got 'cuda'", {"backend": "cuda"}),
    ("chunk_bytes: expected a positive int, or None; got 0", {"chunk_bytes": 0}),
    # Arguments of `grpo_loss` only.
    (r"logps: expected shape \[B, T\] \(padded\) or \[N\] \(packed\); got \[2, 3, 4\]: of logits "
     r"take selective_log_softmax\(logits, targets\)", {"logps": torch.zeros(2, 3, 4)}),
    ("entropy_coef=0.1 needs the entropy of every token: pass entropy",
     {"logps": LOGPS, **loss_call(entropy_coef=0.1)}),
    (r"entropy: expected shape \[2, 3\]; got \[2\]", {"logps": LOGPS, "entropy": torch.ones(B)}),
)  # fmt: skip
TABLES = ((TypeError, WRONG_TYPES), (ValueError, WRONG_VALUES))
WRONG = [(error, message, changes) for error, table in TABLES for message, changes in table]
CASES = [(call, *x) for x in WRONG for call, known in CALLS.items() if x[-1].keys() <= known]


@pytest.mark.parametrize(("call", "error", "message", "changes"), CASES)
def test_refuses(call, error, message, changes):
    arguments = arguments_of(call, **changes)
    with pytest.raises(error, match=f"^{message}"):
        called(grpo_kernels, call, arguments)


@pytest.mark.parametrize("name", ("fused_grpo_loss", "grpo_loss"))
@pytest.mark.parametrize("library", (grpo_kernels, reference), ids=lambda x: x.__name__)
def test_an_advantage_that_is_no_number_is_masked_or_refused(library, name):
    """A sequence without an unmasked token counts for nothing, whatever its advantage is."""
    mask, results = torch.tensor([[1, 1, 1], [0, 0, 0]]), []
    for last in (0.0, NAN):
        arguments = arguments_of(name, mask=mask)
        first = next(iter(arguments.keys() & {"hidden", "logps"}))
        g = torch.Generator().manual_seed(0)
        leaf = arguments[first] = torch.randn(arguments[first].shape, generator=g).requires_grad_()
        arguments["advantages"] = torch.tensor([2.0, last])
        if name == "fused_grpo_loss":
            arguments["weight"] = torch.randn(V, H, generator=g)
        called(library, name, arguments).loss.backward()
        results.append(leaf.grad)
    assert torch.equal(*results) and results[0][0].abs().min() > 0
    with pytest.raises(ValueError, match=r"^advantages: expected finite .* \(1 of them\)"):
        called(library, name, arguments | {"mask": torch.tensor([[1, 1, 1], [0, 1, 0]])})


def test_explain_refuses_an_advantage_that_is_no_number():
    out = grpo_loss(LOGPS, torch.ones(B))
    with pytest.raises(ValueError, match=r"^advantages: expected finite .* \(3 of them\)"):
        explain(out, None, torch.tensor([1.0, INF]))


def test_every_case_is_tried():
    assert {message for _, _, message, _ in CASES} == {message for _, message, _ in WRONG}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    (
        ({"logits": torch.zeros(V)}, ValueError, r"logits: expected shape \[B, T, V\] or \[N, V\]"),
        ({"logits": torch.zeros(B, T, V).double()}, TypeError,
         "logits: expected dtype float32, .* got float64"),
        ({"targets": torch.zeros(1, T).long()}, ValueError,
         r"targets: expected shape \[2, 3\]; got \[1, 3\]"),
        (NOT_IDS, ValueError, r"targets: expected ids in \[0, 7\); got ids outside"),
        ({"logits": torch.zeros(B, T + 2, V)}, ValueError,
         r"got \[2, 3\]: cut logits .*, logits\[:, -4:-1\]"),
    ),
)  # fmt: skip
def test_selective_log_softmax(changes, error, message):
    with pytest.raises(error, match=message):
        selective_log_softmax(**{"logits": torch.zeros(B, T, V), **IDS_0, **changes})


# Keywords that calls lack, and what is said after them.
UNKNOWN = (
    ("fused_grpo_loss", "beta", r"pass config=GRPOLossConfig\(beta=...\)"),
    ("fused_grpo_loss", "kl_coef", r"pass config=GRPOLossConfig\(beta=...\)"),
    ("fused_grpo_loss", "chunk_bytes", r"pass execution=Execution\(chunk_bytes=...\)"),
    ("fused_grpo_loss", "old_per_token_logps", "pass old_logps"),
    ("fused_grpo_loss", "num_iterations", "in a TrainingConfig set epochs_per_rollout; .*"),
    ("fused_grpo_loss", "old_logp", r"did you mean old_logps\?"),
    ("grpo_loss", "epsilon", r"pass config=GRPOLossConfig\(epsilon=...\)"),
    ("grpo_loss", "temperature", r"pass LMHead\(weight, temperature=...\) as the head of a call"),
    ("linear_logprobs", "attention_mask", "pass mask"),
    ("linear_logprobs", "temperature", r"pass head=LMHead\(weight, temperature=...\)"),
    ("fused_distillation_loss", "final_logit_softcapping", r"pass head=LMHead\(weight, softcap=.*"),
    ("fused_distillation_loss", "teacher", "pass reference"),
    ("selective_log_softmax", "index", "pass targets"),
    ("group_advantages", "num_generations", "pass groups"),
    ("group_advantages", "group_size", "pass groups"),
    ("completion_mask", "eos_token_id", "pass end_ids"),
    ("LMHead", "final_logit_softcapping", "pass softcap"),
    ("Execution", "chunk_size", r"did you mean chunk_bytes\?"),
    ("TrainingConfig", "fp16", "set dtype to mixed, .*"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "keyword", "hint"), UNKNOWN, ids=str)
def test_an_unknown_keyword_is_answered(name, keyword, hint):
    call = TrainingConfig if name == "TrainingConfig" else getattr(grpo_kernels, name)
    with pytest.raises(TypeError, match=f"^{name}.* keyword argument '{keyword}': {hint}$"):
        call(**{keyword: 1})


def test_other_errors_of_a_call_stay_as_they_are():
    """Python's about other arguments, and the call's own."""
    for args, options, message in (
        ((), {}, "missing 1 required positional argument: 'weight'"),
        ((1,), {"weight": 1}, "got multiple values for argument 'weight'"),
        ((1,), {}, "weight: expected a tensor; got int"),
    ):
        with pytest.raises(TypeError, match=f"{message}$") as raised:
            LMHead(*args, **options)
        assert raised.value.__cause__ is None


@pytest.mark.parametrize(
    ("hidden", "head", "message"),
    (
        (torch.zeros(B, T, H), torch.nn.Linear(H, V, bias=False), "got Linear: pass head.weight$"),
        (torch.zeros(B, T, H), torch.nn.Linear(H, V),
         r"got Linear: pass LMHead\(head.weight, head.bias\)$"),
        (torch.zeros(B, T, H), torch.nn.Sequential(), "got Sequential$"),
        (SimpleNamespace(last_hidden_state=0), torch.zeros(V, H),
         "^hidden: .* got SimpleNamespace: pass its last_hidden_state$"),
    ),
    ids=("linear", "bias", "module", "output"),
)  # fmt: skip
def test_modules_and_outputs_are_no_tensors(hidden, head, message):
    with pytest.raises(TypeError, match=message):
        grpo_kernels.linear_logprobs(hidden, head, torch.zeros(B, T).long())


def test_triton_on_a_cpu_says_what_it_needs(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="backend: 'triton' needs a GPU, or TRITON_INTERPRET=1"):
        grpo_loss(torch.zeros(B, T), torch.ones(B), backend="triton")


def numbers_of(options, integers=()):
    """The options as numbers of NumPy: scalars of two widths, and 0-d arrays."""
    for real, whole in ((np.float32, np.int64), (np.float64, np.int32), (np.array, np.array)):
        yield {k: (whole if k in integers else real)(x) for k, x in options.items()}


LOSS_NUMBERS = {
    "beta": 0.5, "epsilon": 0.25, "epsilon_high": 0.5, "delta": 1.75, "kl_clamp": 2.0,
    "top_entropy_quantile": 0.5, "entropy_threshold": 1.0, "off_policy_threshold": 0.5,
    "is_clip_max": 2.0, "is_clip_min": 0.5, "max_completion_length": 3,
}  # fmt: skip
CORRECTED = {"loss_type": "dr_grpo", "is_correction": "token_mask"}
# Objects whose fields are numbers: their class, other options, numbers, and which are whole.
OBJECTS = {
    "GRPOLossConfig": (GRPOLossConfig, CORRECTED, LOSS_NUMBERS, {"max_completion_length"}),
    "dapo": (GRPOLossConfig, {}, {"dual_clip": 4.0, "entropy_coef": 0.25}, ()),
    "cispo": (GRPOLossConfig, {"loss_type": "cispo"}, {"epsilon_high": 4.0}, ()),
    "vespo": (GRPOLossConfig, {"loss_type": "vespo"}, {"vespo_k_pos": 1.5}, ()),
    "LMHead": (
        partial(LMHead, torch.ones(V, H)), {},
        {"logit_scale": 0.5, "softcap": 8.0, "temperature": 0.75}, (),
    ),
    "VocabRanks": (VocabRanks, {}, {"start": 4}, {"start"}),
    "Execution": (Execution, {}, {"chunk_bytes": 4096}, {"chunk_bytes"}),
    "Thresholds": (Thresholds, {}, {"long": 4.0, "tokens": 0.5}, ()),
    "TrainingConfig": (
        partial(TrainingConfig, model="m"), {"rewards": ["answer"]},
        {"steps": 3, "learning_rate": 0.5, "epsilon": 0.25, "temperature": 0.75, "top_k": 5},
        {"steps", "top_k"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OBJECTS)
def test_numbers_of_numpy_become_python_s(name):
    kind, chosen, options, integers = OBJECTS[name]
    expected = kind(**chosen, **options)
    for numbers in numbers_of(options, integers):
        actual = kind(**chosen, **numbers)
        for field, x in options.items():
            assert getattr(actual, field) == x and type(getattr(actual, field)) is type(x), field
        assert repr(actual) == repr(expected)
    for field in options:
        with pytest.raises((TypeError, ValueError), match=field):
            kind(**chosen, **options | {field: np.bool_(True)})


def test_numbers_of_numpy_in_lists_and_in_a_loss():
    config = TrainingConfig(
        model="m", rewards=["answer", "format"], reward_weights=[np.float32(0.5), np.array(2)]
    )
    assert repr(config.reward_weights) == "[0.5, 2]"
    loss = GRPOLossConfig(loss_type=Clip(epsilon=np.float32(0.25), delta=np.array(1.5))).loss
    assert repr([loss.epsilon, loss.delta]) == "[0.25, 1.5]"


LOGITS, REWARDS = torch.linspace(-2, 2, B * T * V).view(B, T, V), torch.tensor([1.0, 0.0, 3.0, 2.0])
# Calls with numbers: the call, its numbers, and which of them are whole.
WITH_NUMBERS = {
    "grpo_loss": (lambda **n: grpo_loss(LOGPS, torch.ones(B), **n).loss, {"num_items": 4.0}, ()),
    "reference": (
        lambda **n: reference.grpo_loss(LOGPS, torch.ones(B), **n).loss, {"num_items": 4},
        {"num_items"},
    ),
    "selective_log_softmax": (
        partial(selective_log_softmax, LOGITS, **IDS_0), {"temperature": 0.5}, ()
    ),
    "group_advantages": (
        partial(grpo_kernels.group_advantages, REWARDS), {"groups": 2, "eps": 0.25}, {"groups"}
    ),
    "per_token_kl": (
        partial(grpo_kernels.per_token_kl, LOGPS, 3 * LOGPS), {"clamp": 0.5}, ()
    ),
    "topk_kl": (
        partial(grpo_kernels.topk_kl, LOGPS, 2 * LOGPS, direction="jsd"), {"beta": 0.25}, ()
    ),
    "fused_distillation_loss": (
        lambda **n: grpo_kernels.fused_distillation_loss(
            LOGITS, torch.eye(V), Reference(LOGITS.flip(-1), torch.eye(V)), kind="jsd", **n
        ).loss, {"beta": 0.25, "num_items": 4.0}, (),
    ),
    "explain": (
        lambda **n: torch.tensor([x["group"] for x in explain(
            grpo_loss(LOGPS, torch.ones(B)), None, torch.ones(B), **n
        ).sequences]), {"groups": 1}, {"groups"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WITH_NUMBERS)
def test_a_call_takes_numbers_of_numpy(name):
    call, options, integers = WITH_NUMBERS[name]
    expected = call(**options)
    assert expected.abs().sum() > 0
    for numbers in numbers_of(options, integers):
        actual = call(**numbers)
        assert torch.equal(actual, expected) and actual.dtype == expected.dtype


class Plain(torch.Tensor):
    """A subclass whose operators are those of torch."""


@pytest.mark.parametrize(
    "kind", (Plain, torch.nn.Parameter, torch.nn.Buffer, lambda x: TwoTensor(x, x.clone()))
)
def test_subclasses_that_compute_as_tensors_do(kind):
    kwargs = arguments_of("linear_logprobs")
    expected = called(grpo_kernels, "linear_logprobs", kwargs).logps
    kwargs["weight"] = kind(kwargs["weight"])
    logps = called(grpo_kernels, "linear_logprobs", kwargs).logps
    assert torch.equal(torch.Tensor(logps.detach()), expected)


def test_masked_targets_may_be_anything():
    arguments = arguments_of("fused_grpo_loss", **NOT_IDS, mask=torch.zeros(B, T), bias=BANS_0)
    assert called(grpo_kernels, "fused_grpo_loss", arguments).loss == 0


def test_a_target_that_a_reference_bans():
    """The target's log-prob enters the KL; the exact KL reads every id, and is infinite."""
    teacher = Reference(torch.randn(B, T, 2), LMHead(torch.randn(V, 2), BANS_0))
    arguments = arguments_of("fused_grpo_loss", reference=teacher)

    def loss(**options):
        return called(grpo_kernels, "fused_grpo_loss", arguments | loss_call(**options))

    message = r"reference\.head\.bias: expected more than -inf at every unmasked target"
    with pytest.raises(ValueError, match=message):
        loss(beta=0.1)
    assert loss().loss.isfinite()
    assert loss(beta=0.1, kl_estimator="exact").metrics["kl"] == INF


NUMBERS = (7, 7.0, np.int64(7), np.uint8(7), np.float32(7), torch.tensor(7),
           torch.tensor(7, dtype=torch.uint8), torch.tensor(7.0).double())  # fmt: skip
NO_NUMBERS = (True, np.True_, torch.tensor(True), torch.tensor(7j), "7", [7], np.ones(1))
OUT_OF_RANGE = (0, -1, INF, NAN, np.float32(INF), np.int64(-3), *map(torch.tensor, (0, -1, -1.0)),
                *map(torch.tensor, (0.0, -0.0, INF, -INF, NAN)))  # fmt: skip


@pytest.mark.parametrize("call", [name for name, known in CALLS.items() if "num_items" in known])
def test_num_items(call):
    """The same numbers, and no others, whoever is given them."""
    arguments = arguments_of(call)

    def loss(**changes):
        return called(grpo_kernels, call, arguments | changes).loss

    expected = 6 / 7 * loss()
    for number in NUMBERS:
        torch.testing.assert_close(loss(num_items=number), expected)
        assert torch.equal(loss(num_items=number), loss(num_items=7))
    for number in NO_NUMBERS:
        with pytest.raises(TypeError, match=r"^num_items: expected a (real )?number; got"):
            loss(num_items=number)
    for number in OUT_OF_RANGE:
        with pytest.raises(ValueError, match=r"^num_items: expected a (finite )?number.*; got"):
            loss(num_items=number)
    for number in (0, torch.tensor(0), torch.tensor(0.0)):
        assert loss(mask=torch.zeros(B, T), num_items=number) == 0
    for number in (NAN, -1, INF):
        with pytest.raises(ValueError, match=r"^num_items: expected a finite number"):
            loss(mask=torch.zeros(B, T), num_items=torch.tensor(number))


SUPPORT = Support(torch.zeros(B * T, dtype=torch.int32), torch.arange(B * T + 1))
REFERENCE = {"reference": Reference(torch.randn(B, T, 2), torch.randn(V, 2))}
HEAD = {"hidden": torch.randn(B, T, H), "head": torch.randn(V, H)}
MASK, ADVANTAGES = {"mask": torch.ones(B, T)}, {"advantages": torch.ones(B)}
CONSTANTS = dict.fromkeys(("old_logps", "ref_logps", "sampling_logps", "ce_weights"), LOGPS)
CONSTANTS |= {**MASK, **ADVANTAGES, "num_items": 3}
# Arguments of every public call; with a name after "#", others of the same one.
GOOD = {
    "fused_grpo_loss": {**HEAD, **IDS_0, **CONSTANTS, "support": SUPPORT},
    "fused_grpo_loss#reference": {**HEAD, **IDS_0, **ADVANTAGES, **REFERENCE},
    "fused_grpo_loss#packed": {
        "hidden": torch.randn(B * T, H), "head": torch.randn(V, H), **ADVANTAGES,
        "targets": torch.zeros(B * T, dtype=torch.long), "cu_seqlens": torch.tensor([0, 2, 6]),
    },
    "fused_distillation_loss": {**HEAD, **MASK, "num_items": 3, **REFERENCE},
    "linear_logprobs": {**HEAD, **IDS_0, **MASK, "support": SUPPORT},
    "linear_logprobs#entries": {**HEAD, "targets": None, "support": SUPPORT, "entries": True},
    "grpo_loss": {"logps": LOGPS, **CONSTANTS, "entropy": LOGPS},
    "selective_log_softmax": {"logits": torch.randn(B, T, V), **IDS_0, "temperature": 1.0},
    "group_advantages": {"rewards": torch.randn(4), "groups": 2},
    "per_token_kl": {"logps": LOGPS, "ref_logps": LOGPS, **MASK},
    "topk_kl": {"logps": LOGPS, "teacher_logps": LOGPS},
    "topk_kl#offsets": {
        **dict.fromkeys(("logps", "teacher_logps"), LOGPS.flatten()),
        "offsets": torch.tensor([0, 2, 6]),
    },
    "check_sampler": {
        **dict.fromkeys(("sampling_logps", "logps_fp32", "logps_model"), LOGPS), **MASK,
    },
}  # fmt: skip
NO_TENSORS = (None, [0.0], "x", np.zeros((B, T)), SimpleNamespace(last_hidden_state=LOGPS))


def tensors_of(call):
    """The names of a call's arguments, and of the fields of those that have some."""
    for name, x in GOOD[call].items():
        if isinstance(x, (Support, Reference)):
            yield from (f"{name}.{field}" for field in x._fields)
        if not isinstance(x, (bool, str, type(None))):
            yield name


@pytest.mark.parametrize(("call", "name"), [(call, x) for call in GOOD for x in tensors_of(call)])
def test_what_is_no_tensor_is_named(call, name):
    function = getattr(grpo_kernels, call.partition("#")[0])
    function(**GOOD[call])
    argument, _, field = name.partition(".")
    optional = not field and inspect.signature(function).parameters[name].default is None
    for junk in NO_TENSORS[optional:]:
        value = GOOD[call][argument]._replace(**{field: junk}) if field else junk
        with pytest.raises(TypeError, match=rf"^{name}: expected .*; got .*{type(junk).__name__}"):
            function(**GOOD[call] | {argument: value})


@pytest.mark.parametrize("dtype", (torch.complex64, torch.bool, torch.int64))
@pytest.mark.parametrize("name", ("logps", "ref_logps", "teacher_logps"))
def test_log_probs_are_floats(name, dtype):
    call = "topk_kl" if name == "teacher_logps" else "per_token_kl"
    with pytest.raises(TypeError, match=f"^{name}: expected dtype float32, .*; got"):
        getattr(grpo_kernels, call)(**GOOD[call] | {name: LOGPS.to(dtype)})


@pytest.mark.gpu
def test_out_of_range_ids_raise_on_cuda_too():
    arguments = arguments_of("fused_grpo_loss", targets=torch.full((B, T), V))
    with pytest.raises(ValueError, match="targets: expected ids in"):
        called(grpo_kernels, "fused_grpo_loss", {name: x.cuda() for name, x in arguments.items()})


def test_a_number_on_the_cpu_serves_tensors_elsewhere(monkeypatch):
    """A trainer's `num_items` often is; reading it waits for nothing."""
    # The meta device stands for another one, and has no autocast.
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    config = GRPOLossConfig(top_entropy_quantile=0.5, entropy_threshold=0.5)
    logps = torch.zeros(2, 3, device="meta")
    out = grpo_loss(
        logps, torch.zeros(2, device="meta"), entropy=logps, num_items=torch.tensor(7),
        config=config,
    )  # fmt: skip
    assert out.loss.device.type == "meta"

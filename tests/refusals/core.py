"""Refusals of the calls on tensors: `base/`, `loss/`, `head/`, `kernels/` and the top level."""

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

import grpo_kernels
from grpo_kernels import (
    GRPOLossConfig,
    LMHead,
    Reference,
    Support,
    VocabRanks,
    grpo_loss,
    reference,
)
from grpo_kernels.kernels.divergences import Divergence
from grpo_kernels.loss.losses import Clip, Loss, Sapo, Vespo, option
from grpo_kernels.loss.objective import kl_estimate
from grpo_kernels.training import TrainingConfig
from tests.helpers.batches import EXECUTION_FIELDS, HEAD_FIELDS, called
from tests.helpers.quantised import Quantised
from tests.refusals import Row, table

B, T, H, V = 2, 3, 4, 7
N = B * T
NAN, INF = float("nan"), float("inf")
ONES, IDS, LOGPS = torch.ones(B, T), torch.zeros(B, T).long(), torch.full((B, T), -1.0)
HIDDEN, WEIGHT, META = torch.randn(B, T, H), torch.randn(V, H), torch.zeros(V, H, device="meta")
STATES, ROWS = torch.randn(B, T, 2), torch.randn(V, 2)
REFERENCE, A, LORA_B = Reference(STATES, ROWS), torch.randn(B, T, 3), torch.randn(V, 3)
SETS = Support(torch.zeros(N, dtype=torch.int32), torch.arange(N + 1))
BANS_0 = torch.zeros(V).index_fill(0, torch.tensor(0), -INF)

# Calls on a batch

HEAD_CALLS = ("fused_grpo_loss", "linear_logprobs", "fused_distillation_loss")
HEAD_ARGS = {"hidden", "weight", *HEAD_FIELDS, *EXECUTION_FIELDS}
# Each call's arguments, those of its head and its execution among them; and `packed`.
CALLS = {
    name: {*inspect.signature(getattr(grpo_kernels, name)).parameters, "packed"}
    | (HEAD_ARGS if name in HEAD_CALLS else set())
    for name in (*HEAD_CALLS, "grpo_loss")
}


def arguments_of(call: str, **changes: Any) -> dict[str, Any]:
    """Valid arguments of a call, with changes; packed when `packed` is given."""
    tokens = (N,) if changes.pop("packed", False) else (B, T)
    good: dict[str, Any] = {"mask": torch.ones(tokens)}
    if call == "grpo_loss":
        good["logps"] = torch.zeros(tokens)
    else:
        good |= {"hidden": HIDDEN.reshape(*tokens, H), "weight": WEIGHT}
        good["targets"] = IDS.reshape(tokens)
    if call == "fused_distillation_loss":
        good["reference"] = Reference(STATES.reshape(*tokens, 2), ROWS)
        del good["targets"]
    elif call != "linear_logprobs":
        good["advantages"] = torch.ones(tokens[0])
    return good | changes


def batch_call(name: str, **changes: Any) -> None:
    called(grpo_kernels, name, arguments_of(name, **changes))


def everywhere(*rows: tuple[str, dict[str, Any]]) -> list[Row]:
    """Rows for each call that has these arguments."""
    return [
        Row(partial(batch_call, call), message, changes)
        for message, changes in rows
        for call, known in CALLS.items()
        if changes.keys() <= known
    ]


def sizes(*offsets: float) -> dict[str, Any]:
    """Offsets of packed sequences."""
    return {"packed": True, "cu_seqlens": torch.tensor(offsets)}


def loss_of(**options: Any) -> dict[str, Any]:
    return {"config": GRPOLossConfig(**options)}


QUANTISED = "expected a dense tensor that is not quantised; got Quantised"
ON_A_BATCH = [
    *everywhere(
        ("hidden: ...; got float64: cast it, or use grpo_ker", {"hidden": HIDDEN.double()}),
        (f"weight: {QUANTISED} (torch.strided): dequantise it", {"weight": Quantised(WEIGHT)}),
        ("weight: expected a dense ...; got Tensor", {"weight": WEIGHT.to_sparse()}),
        ("hidden: expected a dense ...; got Tensor (torch.strided)",
         {"hidden": torch.nested.nested_tensor([torch.ones(T, H)] * B)}),
        ("bias: expected dtype float32, ...; got float64", {"bias": BANS_0.double()}),
        ("low_rank: expected a pair of tensors, lora_a_out and lora_b, or None", {"low_rank": A}),
        ("low_rank[1]: expected dtype ...; got float64", {"low_rank": (A, LORA_B.double())}),
        (f"low_rank[1]: {QUANTISED}", {"low_rank": (A, Quantised(LORA_B))}),
        ("softcap: expected a number > 0, or None; got a tensor", {"softcap": torch.ones(())}),
        ("ranks: expected a VocabRanks, or None; got 'tensor'", {"ranks": "tensor"}),
        ("batch_invariant: expected a bool; got 1", {"batch_invariant": 1}),
        ("execution: expected an Execution; got {}", {"execution": {}}),
        ("config: expected a GRPOLossConfig; got dict", {"config": {"beta": 0.1}}),
        ("num_items: expected a real number; got bool", {"num_items": torch.tensor(True)}),
        (f"num_items: {QUANTISED}", {"num_items": Quantised(torch.ones(()))}),
        ("cu_seqlens: expected dtype int64, int32; got float32", sizes(0.0, 6.0)),
        ("entries: expected a bool; got 1", {"entries": 1}),
        ("hidden: expected shape [B, T, H] or [N, H]; got [4]", {"hidden": torch.zeros(H)}),
        ("hidden: its last dimension 7 is the head's number of rows: pass hidden states, [..., 4], "
         "not logits", {"hidden": torch.zeros(B, T, V)}),
        ("hidden: expected a tensor with values", {"hidden": torch.zeros(B, T, H, device="meta")}),
        ("weight: expected shape [V, 4]; got [4, 7]: transpose it", {"weight": WEIGHT.T}),
        ("weight: expected shape [V, H]; got [0]. With ZeRO-3, call", {"weight": torch.zeros(0)}),
        ("weight: expected a tensor on cpu; got one on meta", {"weight": META}),
        ("bias: expected shape [7]; got [4]", {"bias": torch.zeros(H)}),
        ("bias: expected more than -inf at every unmasked", {"bias": BANS_0, "targets": IDS}),
        ("low_rank[0]: expected hidden @ lora_a.T, of shape", {"low_rank": (A[..., :2], LORA_B)}),
        ("low_rank[0]: expected shape [2, 3, 3]; got [2, 2, 3]", {"low_rank": (A[:, :2], LORA_B)}),
        ("low_rank[1]: expected shape [7, r]; got [3, 7]", {"low_rank": (A, LORA_B.T)}),
        ("logit_scale: expected a number > 0, as a float32; got 1e-46", {"logit_scale": 1e-46}),
        ("logits_dtype: expected 'fp32' or 'model'; got 'bf16'", {"logits_dtype": "bf16"}),
        ("temperature: expected a number > 0, as a float32; got 1e+39", {"temperature": 1e39}),
        ("temperature: expected shape [2, 3]; got [2]", {"temperature": torch.ones(B)}),
        ("temperature: expected finite numbers > 0; got others (4 of them)",
         {"temperature": torch.tensor([[1.0, 0.0, -1.0], [1.0, NAN, INF]])}),
        ("...a constant; got", {"temperature": torch.ones(B, T, requires_grad=True)}),
        ("backend: expected one of auto, triton, torch; got 'cuda'", {"backend": "cuda"}),
        ("chunk_bytes: expected a positive int, or None; got 0", {"chunk_bytes": 0}),
        ("targets: expected shape [2, 3]; got [2, 4]: cut them to the ids that hidden predicts, "
         "targets[:, -3:]", {"targets": torch.ones(B, T + 1).long()}),
        ("targets: expected shape [2, 3]; got [2, 1]: cut hidden to the positions that predict "
         "the targets, hidden[:, -2:-1]", {"targets": torch.ones(B, 1).long()}),
        ("targets: expected ids in [0, 7) at unmasked positions; got ids", {"targets": IDS + V}),
        ("targets: expected ids in [0, 7) at unmasked positions; got ids ...(2 of them)",
         {"targets": IDS - 100, "mask": 0 * ONES,
          "ce_weights": torch.tensor([[0.1, 0.0, 0.0]] * B)}),
        ("mask: expected shape [2, 3]; got [2, 5]: cut it to the positions of the targets, "
         "mask[:, -3:]", {"mask": torch.ones(B, T + 2)}),
        ("mask: expected 0 or 1; got other values (6 of them)", {"mask": ONES / 2}),
        ("ce_weights: expected shape [2, 3]; got [2]", {"ce_weights": torch.zeros(B)}),
        ("ce_weights: expected finite numbers; got NaN or inf (2 of them)",
         {"ce_weights": torch.tensor([[1.0, NAN, 0.0]] * B), "mask": 0 * ONES}),
        ("advantages: expected shape [2] or [2, 3]; got [3]", {"advantages": torch.ones(T)}),
        ("advantages: expected shape [2] (one", {"advantages": torch.ones(3), **sizes(0, 3, 6)}),
        ("advantages: expected [6] to be one per sequence or one per", sizes(0, 2, 2, 3, 4, 5, 6)),
        ("advantages: expected finite numbers at unmasked positions; got ...(2 of them)",
         {"advantages": torch.tensor([0.0, NAN]), "mask": torch.tensor([[1, 1, 1], [1, 0, 1]])}),
        ("num_items: expected a number > 0, as a float32; got 1000", {"num_items": 10**400}),
        ("num_items: expected a finite number > 0, or 0 where every token is", {"num_items": 0}),
        ("num_items: expected a 0-d tensor; got shape [2]", {"num_items": torch.ones(2)}),
        ("num_items: expected a tensor on cpu; got", {"num_items": torch.zeros((), device="meta")}),
        ("cu_seqlens does not work with padded input", {"cu_seqlens": torch.tensor([0, 3])}),
        ("cu_seqlens: expected shape [B + 1]", {"packed": True, "cu_seqlens": torch.tensor(6)}),
        ("cu_seqlens: expected to end at N = 6; got no", {**sizes(0), **loss_of(loss_type="grpo")}),
        ("cu_seqlens: expected to start at 0, never to decrease, and to end at N", sizes(0, 3, 5)),
        ("cu_seqlens: expected to start at 0, never to decrease", sizes(0, 5, 3, 6)),
        ("loss_type='grpo' with these options", {"packed": True, **loss_of(loss_type="grpo")}),
        ("beta=0.1 needs the log-probs of the reference: pass ref_logps", loss_of(beta=0.1)),
        ("is_correction='token_mask' needs the sampler's", loss_of(is_correction="token_mask")),
        ("kl_estimator='exact' needs ...: pass reference=", loss_of(beta=1, kl_estimator="exact")),
        ("logps: expected more than -inf at", {"logps": LOGPS - INF, "mask": torch.eye(B, T)}),
        ("logps: expected shape [B, T] (padded) or [N] (packed); got [2, 3", {"logps": HIDDEN}),
        ("entropy_coef=0.1 needs the entropy of", {"logps": LOGPS, **loss_of(entropy_coef=0.1)}),
        ("entropy: expected shape [2, 3]; got [2]", {"logps": LOGPS, "entropy": torch.ones(B)}),
        ("ref_logps does not work with a reference", {"ref_logps": LOGPS, "reference": REFERENCE}),
        ("reference does not work with a support", {"reference": REFERENCE, "support": SETS}),
        ("support does not work with", {"support": SETS, "batch_invariant": True}),
        # The values of these are on the device.
        ("num_items: expected a finite number > 0, or 0 where", {"num_items": torch.tensor(INF)}),
        ("num_items: expected a finite number > 0, or 0 where every token is masked",
         {"num_items": torch.tensor(-1.0), "mask": 0 * ONES}),
    ),
]  # fmt: skip
OF_A_REFERENCE = [
    *table(partial(batch_call, "fused_distillation_loss"),
        ("reference.hidden: expected shape [2, 3, 2]; got [2, 2, 2]",
         {"reference": Reference(STATES[:, :2], ROWS)}),
        ("reference: expected a head of 7 rows, like the policy's; got 5. If ... off: weight[:5]",
         {"reference": Reference(STATES, ROWS[:5])}),
    ),
    *table(partial(batch_call, "fused_grpo_loss", **loss_of(beta=0.1)),
        ("reference.head.bias: expected more than -inf at every unmasked target",
         {"reference": Reference(STATES, LMHead(ROWS, BANS_0))})),
]  # fmt: skip

# Several targets, supports, and other calls

SET_IDS, SET_OFFSETS, SET_TARGETS = [5, 1, 1, 4, 2], [0, 2, 4, 5], torch.tensor([1, 4, 2])


def with_sets(
    ids: list = SET_IDS, offsets: list = SET_OFFSETS, mask: Any = None, **options: Any
) -> None:
    support = Support(torch.tensor(ids), torch.tensor(offsets))
    hidden, targets = HIDDEN[0], options.pop("targets", SET_TARGETS)
    grpo_kernels.linear_logprobs(hidden, WEIGHT, targets, mask, support=support, **options)


def several(ids: torch.Tensor, **options: Any) -> None:
    grpo_kernels.linear_logprobs(HIDDEN, WEIGHT, ids, **options)


TWO = torch.zeros(2)
OFFSETS = "support.offsets: expected offsets that start at 0, never decrease, and end at the 5 ids"
OF_OTHER_CALLS = [
    *table(with_sets,
        ("support.token_ids: expected ids in [0, 7)", {"ids": [5, 1, 99, 4, 2]}),
        ("support.token_ids: expected each id once per token", {"ids": [1, 1, 1, 4, 2]}),
        ("support: expected the target of every token in its", {"ids": [5, 1, 1, 6, 2]}),
        (f"{OFFSETS}...(1 of them)", {"offsets": [1, 2, 4, 5]}),
        # Sets that overlap behind a masked token.
        (OFFSETS, {"offsets": [0, 3, 2, 5], "mask": torch.tensor([True, False, True])}),
        ("support.offsets: expected shape [4]; got [3]", {"offsets": [0, 2, 5]}),
        ("support.token_ids: expected shape [K]; got [1, 5]", {"ids": [SET_IDS]}),
        ("targets does not work with entries=True", {"entries": True}),
        ("support: expected a set of every token with entries=True",
         {"entries": True, "targets": None, "offsets": [0, 2, 2, 5]}),
        ("support does not work with several", {"targets": SET_TARGETS[:, None].expand(3, 2)}),
    ),
    *table(several,
        ("targets: expected at least one id per token; got", {"ids": torch.zeros(B, T, 0).long()}),
        ("targets: expected ids in [0, 7)", {"ids": torch.full((B, T, 2), V)}),
        ("entries=True needs a set for every token: pass support", {"ids": None, "entries": True}),
        ("entropy: expected a bool; got 1", {"ids": IDS, "entropy": 1})),
    *table(partial(grpo_kernels.linear_logprobs, HIDDEN, targets=IDS),
        ("head: ...; got Linear: pass LMHead(head.weight", {"head": torch.nn.Linear(H, V)})),
    *table(grpo_kernels.batch_support,
        ("length: expected as many as the longest completion", {"supports": [SETS], "length": 2})),
    *table(partial(grpo_kernels.selective_log_softmax, logits=STATES @ ROWS.T, targets=IDS),
        ("logits: expected shape [B, T, V] or [N, V]; got [7]", {"logits": torch.zeros(V)}),
        ("logits: expected a tensor with values", {"logits": torch.zeros(B, T, V, device="meta")}),
        ("targets: expected shape ...; got [2, 3]: cut logits ..., logits[:, -4:-1]",
         {"logits": torch.zeros(B, T + 2, V)}),
        ("targets: expected ids in [0, 7); got ids outside", {"targets": IDS - 100}),
        ("backend: expected one of auto, triton, torch; got 'cuda'", {"backend": "cuda"}),
        ("...a constant; got", {"temperature": torch.ones(B, T, requires_grad=True)})),
    *table(partial(grpo_kernels.group_advantages, rewards=torch.zeros(4), groups=2),
        ("rewards: expected shape [B] or [B, R]; got", {"rewards": torch.zeros(2, 2, 2)}),
        ("groups: expected a divisor of the number of rewards, 4; got 3", {"groups": 3}),
        ("rewards: expected finite numbers, or NaN ...; got infinite ones: clamp them",
         {"rewards": torch.tensor([1.0, INF, 0.0, 1.0])}),
        ("groups: expected shape [4]; got [6]", {"groups": torch.zeros(6).long()}),
        ("scale: expected one of group, batch, none; got 'mean'", {"scale": "mean"}),
        ("aggregation: expected one of ", {"aggregation": "mean"}),
        ("weights: expected one for each of 1 reward functions", {"weights": [1.0, 2.0]}),
        ("weights: expected finite numbers; got [nan]", {"weights": [NAN]}),
        ("eps: expected a number > 0; got 0.0", {"eps": 0.0}),
        ("scale='none' does not work with aggregation='normalize_then_sum', ...: pass scale='gr",
         {"aggregation": "normalize_then_sum", "scale": "none"}),
        ("weights: expected 1 numbers, or a tensor [1]; got str", {"weights": "x"}),
    ),
    *table(partial(grpo_kernels.per_token_kl, ref_logps=TWO),
        ("estimator: expected one of k1, abs, ...", {"logps": TWO, "estimator": "k4"}),
        ("clamp: expected a number > 0; got -1.0", {"logps": TWO, "clamp": -1.0}),
        ("mask: expected shape [2]; got [3]", {"logps": TWO, "mask": torch.ones(3)}),
        ("ref_logps: expected shape [3]; got [2]", {"logps": torch.zeros(3)}),
    ),
    *table(partial(kl_estimate, d=TWO, clamp=None),
        ("estimator: expected k1, abs, k2 or k3, or one with a +; got 'k4'", {"estimator": "k4"})),
    *table(partial(grpo_kernels.topk_kl, logps=LOGPS, teacher_logps=LOGPS),
        ("beta: expected a number in (0", {"beta": 1.0}),
        ("direction: expected one of reverse, forward, jsd; got 'up'", {"direction": "up"}),
        ("teacher_logps: expected shape [2, 3]; got [2]", {"teacher_logps": TWO}),
        ("offsets: expected those of the support with", {"logps": TWO, "teacher_logps": TWO}),
        ("offsets: expected a tensor", {"logps": TWO, "teacher_logps": TWO, "offsets": [0, 2]}),
        ("logps: expected shape [E], of the support's entries; got [2, 3]", {"offsets": [0, 2]}),
    ),
    *table(reference.grpo_loss,
        ("entropy_coef=0.1 needs the entropy of every token: pass entropy",
         {"logps": LOGPS, "advantages": torch.ones(B), **loss_of(entropy_coef=0.1)}),
    ),
    *table(partial(grpo_kernels.completion_mask, token_ids=IDS, end_ids=2),
        ("token_ids: expected a tensor; got list", {"token_ids": [[1]]}),
        ("token_ids: expected shape [B, T]; got [3]", {"token_ids": IDS[0]}),
        ("end_ids: expected an int, or several; got True", {"end_ids": True}),
        ("end_ids: expected a tensor on cpu; got one on meta", {"end_ids": META[0].long()})),
    *table(grpo_kernels.FusedGRPOLoss,
        ("config: expected a GRPOLossConfig; got float", {"config": 0.04}),
        ("execution: expected an Execution; got 1024", {"execution": 1024})),
    *table(partial(grpo_kernels.FusedGRPOLoss(), HIDDEN, WEIGHT, IDS, torch.ones(B)),
        ("config: a call takes none: pass it to FusedGRPOLoss(config=...)", {"config": 1}),
        ("fused_grpo_loss...'beta': pass config=GRPOLossConfig(beta=...)", {"beta": 0.04})),
    *table(partial(grpo_kernels.FusedGRPOLoss(), HIDDEN, targets=IDS, advantages=torch.ones(B)),
        ("fused_grpo_loss...'weight': pass head", {"weight": WEIGHT})),
    *table(partial(grpo_kernels.check_sampler, TWO, logps_fp32=TWO, logps_model=TWO),
        ("logps_model: expected shape [2]; got [3]", {"logps_model": torch.zeros(3)}),
        ("mask, sampling_logps: expected a token that counts; got none", {"mask": TWO}),
        ("mask: expected shape [2]; got [3]", {"mask": torch.zeros(3)})),
]  # fmt: skip

# Tensors that are none, by their names, and log-probs of another dtype

TENSORS = {
    "fused_grpo_loss": {
        "hidden": HIDDEN, "head": WEIGHT, "targets": IDS, "advantages": torch.ones(B), "mask": ONES,
        **dict.fromkeys(("old_logps", "ref_logps", "sampling_logps", "ce_weights"), LOGPS),
        "num_items": 3, "support": SETS,
    },
    "fused_distillation_loss": {
        "hidden": HIDDEN, "head": WEIGHT, "mask": ONES, "num_items": 3, "reference": REFERENCE,
    },
    "grpo_loss": {"logps": LOGPS, "advantages": torch.ones(B), "mask": ONES, "entropy": LOGPS},
    "selective_log_softmax": {"logits": torch.randn(B, T, V), "targets": IDS, "temperature": 1.0},
    "group_advantages": {"rewards": torch.randn(4), "groups": 2},
    "per_token_kl": {"logps": LOGPS, "ref_logps": LOGPS, "mask": ONES},
    "topk_kl": {"logps": LOGPS, "teacher_logps": LOGPS},
    "check_sampler": {
        **dict.fromkeys(("sampling_logps", "logps_fp32", "logps_model"), LOGPS), "mask": ONES,
    },
}  # fmt: skip
JUNK = SimpleNamespace(last_hidden_state=LOGPS)


def other_tensors() -> list[Row]:
    """Rows for each tensor of each call, those in a support or a reference too."""
    rows = []
    for call, good in TENSORS.items():
        function = getattr(grpo_kernels, call)
        function(**good)
        changes = {name: (name, JUNK) for name, x in good.items()}
        for name, x in good.items():
            for part in x._fields if isinstance(x, (Support, Reference)) else ():
                changes[f"{name}.{part}"] = (name, x._replace(**{part: JUNK}))
        rows += [
            Row(function, f"{name}: expected ...; got ...SimpleNamespace", good | {k: x})
            for name, (k, x) in changes.items()
        ]
        for name in [x for x in good if x.endswith("logps")]:
            error = f"{name}: expected dtype float32, ...; got complex64"
            wrong = good | {name: good[name] + 0j}
            rows.append(Row(function, error, wrong))
    return rows


# Keywords that calls lack, and what is said after them

UNKNOWN = (
    ("fused_grpo_loss", "beta", "pass config=GRPOLossConfig(beta=...)"),
    ("fused_grpo_loss", "chunk_bytes", "pass execution=Execution(chunk_bytes=...)"),
    ("fused_grpo_loss", "old_per_token_logps", "pass old_logps"),
    ("fused_grpo_loss", "old_logp", "did you mean old_logps?"),
    ("grpo_loss", "temperature", "pass LMHead(weight, temperature=...) as the head of a call"),
    ("TrainingConfig", "fp16", "set dtype to mixed, "),
    ("FusedGRPOLoss", "loss_type", "pass config=GRPOLossConfig(loss_type=...)"),
    ("GRPOLossConfig", "kl_clmp", "did you mean kl_clamp or dual_clip?"),
)
OF_KEYWORDS = [
    Row(TrainingConfig if name == "TrainingConfig" else getattr(grpo_kernels, name),
        f"{name}...() got an unexpected keyword argument '{keyword}': {hint}", {keyword: 1})
    for name, keyword, hint in UNKNOWN
]  # fmt: skip

# Options of a loss


def own(function: Callable = lambda tokens: tokens.logps, **claims: Any) -> Callable:
    """A callable that says this of itself."""

    def loss(tokens: Any) -> torch.Tensor:
        return function(tokens)

    vars(loss).update(claims)
    return loss


def own_loss(**members: Any) -> Loss:
    """A loss that is plain REINFORCE but for these members of its class."""
    plain = {"token_local": True, "per_token": lambda self, t: -t.advantages * t.logps}
    return type("Own", (Loss,), plain | members)()


@dataclass(frozen=True)
class Ranged(Loss):
    tau: float = option(0.1, "in [0, 2]")
    per_token = Clip.per_token


CISPO = {"loss_type": "cispo", "epsilon_high": 5.0}
MASK = {"is_correction": "token_mask"}
OF_A_CONFIG = [
    *table(GRPOLossConfig,
        ("loss_type: ...; got 'Dr. GRPO': did you mean dr_grpo?", {"loss_type": "Dr. GRPO"}),
        ("beta: expected a finite number; got nan", {"beta": NAN}),
        ("epsilon: expected a number in [0, 1]; got 1.5", {"epsilon": 1.5}),
        ("max_completion_length: expected a", {"loss_type": "dr_grpo", "max_completion_length": 0}),
        # Nothing uses them.
        ("delta=1.4 has no effect with loss_type='cispo': remove it", {**CISPO, "delta": 1.4}),
        ("aggregation='dapo' has no effect with", {"loss_type": "grpo", "aggregation": "dapo"}),
        ("is_clip_max=2.0 and is_clip_min=None have no effect with", {"is_clip_max": 2.0}),
        ("entropy_threshold=1.0 has no effect with top_entropy", {"entropy_threshold": 1.0}),
        ("max_completion_length=64 has no", {"loss_type": "grpo", "max_completion_length": 64}),
        ("kl_estimator='exact' has no effect with beta=0: set beta", {"kl_estimator": "exact"}),
        # They exclude each other.
        ("loss_type='cispo' needs epsilon_high", {"loss_type": "cispo"}),
        ("dual_clip=3.0 does not work with delta=2.0", {"delta": 2.0, "dual_clip": 3.0}),
        ("is_correction='sequence_mask'", {"loss_type": Vespo(), "is_correction": "sequence_mask"}),
        ("kl_clamp=1.0 does not work", {"beta": 0.1, "kl_estimator": "exact", "kl_clamp": 1.0}),
        ("is_gate: expected one of ratio, binary_kl, tv; got 'kl'", {"is_gate": "kl"}),
        ("is_gate='tv' does not work with", {"is_correction": "token_truncate", "is_gate": "tv"}),
        ("is_clip_min=0.1 does not work with", {**MASK, "is_gate": "tv", "is_clip_min": 0.1}),
        ("is_correction='token_mask' needs a bound", {**MASK, "is_clip_max": None}),
        ("is_clip_min: expected less than is_clip_max = 3.0; got 3", {**MASK, "is_clip_min": 3}),
        ("max_completion_length: expected a positive int, by", {**CISPO, "aggregation": "dr_grpo"}),
        # Losses that are passed as such.
        ("temperature_neg: expected a number > 0", {"loss_type": Sapo(temperature_neg=0.0)}),
        ("loss_type: option() of Ranged.tau: expected one of > 0,", {"loss_type": Ranged()}),
        ("loss_type.aggregation: expected one of grpo, ", {"loss_type": own(aggregation="mean")}),
        ("loss_type.ratio_level: expected one of", {"loss_type": own_loss(ratio_level="word")}),
        ("token_gradient: expected a bool; got 1", {"loss_type": Clip(token_gradient=1)}),
        ("loss_type: expected an instance, Sapo(); got the class", {"loss_type": Sapo}),
        ("loss_type: expected a per_token() of Loss, the loss of every", {"loss_type": Loss()}),
        ("loss_type.token_local: expected a bool; got 1", {"loss_type": own(token_local=1)}),
    ),
]  # fmt: skip


def with_loss(loss: object, packed: bool = False) -> None:
    """Calls `grpo_loss` with a loss of one's own, and values that have gradients."""
    shape = (N,) if packed else (B, T)
    logps, entropy = (torch.zeros(shape, requires_grad=True) for _ in range(2))
    grpo_loss(logps, torch.ones(shape), entropy=entropy, config=GRPOLossConfig(loss_type=loss))


def with_method(name: str, result: Callable) -> dict[str, Loss]:
    return {"loss": own_loss(**{name: lambda self, tokens, *ratio: result(tokens)})}


def of_sequences(tokens: Any) -> torch.Tensor:
    return tokens.sequence_mean(tokens.logps)


FUNCTION, OWN = "loss_type: <lambda>(): expected", "loss_type: Own."
OF_A_LOSS = [
    *table(with_loss,
        (f"{FUNCTION} shape [6]; got []", {"loss": lambda t: t.logps.sum()}),
        (f"{FUNCTION} a gradient for tokens.logps or tokens.entropy; got none",
         {"loss": lambda t: t.advantages}),
        ("loss_type: a loss with", {"loss": own(lambda t: -t.logps * t.entropy, token_local=True)}),
        ("loss_type: a loss with token_local=True must",
         {"loss": own(of_sequences, token_local=True)}),
        ("loss_type: this loss needs to know where", {"loss": of_sequences, "packed": True}),
        (f"{OWN}log_ratio(): expected shape [6]; got [1]",
         with_method("log_ratio", lambda t: t.logps[:1])),
        (f"{OWN}clipped()[0]: expected shape [6]",
         with_method("clipped", lambda t: (t.logps.sum() > 1, None))),
        (f"{OWN}metrics()['x']: expected shape [6]",
         with_method("metrics", lambda t: {"x": t.logps.mean()})),
        (f"{OWN}metrics(): expected names other than ...tokens, ...; got 'reward/noise'",
         with_method("metrics", lambda t: {"mine": t.logps, "reward/noise": t.logps})),
        (f"{FUNCTION} a tensor; got float", {"loss": lambda t: 1.0}),
        (f"{OWN}clipped(): expected a pair, ...; got Tensor",
         with_method("clipped", lambda t: t.logps > 1)),
        (f"{OWN}metrics(): expected a dict of tensors by name, ...; got tensor",
         with_method("metrics", lambda t: t.logps)),
    ),
]  # fmt: skip

# Ranks, of which there is one here


@contextlib.contextmanager
def one_rank():
    made = not dist.is_initialized()
    if made:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield dist.group.WORLD
    finally:
        if made:
            dist.destroy_process_group()


def on_ranks(call: str = "linear_logprobs", start: int | None = None, **changes: Any) -> None:
    """Calls on one rank, with some arguments as shards of the first dimension or of another."""
    with one_rank() as group:
        mesh = dist.init_device_mesh("cpu", (1,))
        shards = {k: x for k, x in changes.items() if type(x) is tuple}
        made = {k: distribute_tensor(x, mesh, [Shard(dim)]) for k, (x, dim) in shards.items()}
        batch_call(call, **{"ranks": VocabRanks(group, start), **changes, **made})


def gathered(x: object = ONES, group: object = None) -> None:
    with one_rank() as world:
        grpo_kernels.gather_tokens(x, group or world)


OF_RANKS = [
    *table(VocabRanks,
        ("ranks.group: expected a torch.distributed process group that", {"group": "tensor"}),
        ("ranks.hidden: expected one of replicated, partial; got", {"hidden": "tokens"}),
        ("ranks.start: expected an int, or None; got 0.5", {"start": 0.5}),
    ),
    *table(on_ranks,
        ("ranks.group: expected a process group, as weight is", {"ranks": VocabRanks(start=3)}),
        ("ranks.group: expected None with a DTensor, which has its own", {"weight": (WEIGHT, 0)}),
        ("ranks.start: expected every column on one rank; got columns 3 to 9", {"start": 3}),
        ("weight: expected a row or more", {"weight": WEIGHT[:0]}),
        ("weight: expected a DTensor with Shard(0) on a mesh of one dimension",
         {"weight": (WEIGHT, 1), "ranks": None}),
        ("bias: expected a DTensor, as another tensor of the head is one; got Tensor",
         {"weight": (WEIGHT, 0), "bias": BANS_0, "ranks": None}),
        ("hidden: expected a plain tensor; got a DTensor", {"hidden": (HIDDEN, 0)}),
        ("reference: expected a head whose rows the ranks share as they do the policy's, ...",
         {"reference": REFERENCE, "call": "fused_distillation_loss"}),
    ),
    *table(gathered,
        ("x: expected a tensor; got list", {"x": [1.0]}),
        ("x: expected real numbers or bools; got torch.complex64", {"x": ONES + 0j}),
        ("group: expected a torch.distributed process group that this rank is", {"group": "ranks"}),
        ("x: expected shape [B, T] or [N]; got [1, 2, 3]", {"x": ONES[None]})),
]  # fmt: skip

# Backends


def by_triton(installed: bool) -> None:
    """Asks for compiled kernels on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        patch.setattr(grpo_kernels.kernels, "_has_triton", lambda: installed)
        grpo_loss(LOGPS, torch.ones(B), backend="triton")


def unknown_divergence() -> None:
    from grpo_kernels.kernels import triton_divergences

    triton_divergences.functions_of(Divergence())


OF_BACKENDS = [
    *table(by_triton,
        ("backend: 'triton' needs the triton package, which is not", {"installed": False}),
        ("backend: 'triton' needs a GPU, or TRITON_INTERPRET=1 to run on", {"installed": True})),
    *table(unknown_divergence, ("divergence: expected one with Triton functions, ReverseKL", {})),
]  # fmt: skip
TABLE = [
    *ON_A_BATCH, *OF_A_REFERENCE, *OF_OTHER_CALLS, *other_tensors(), *OF_KEYWORDS, *OF_A_CONFIG,
    *OF_A_LOSS, *OF_RANKS, *OF_BACKENDS,
]  # fmt: skip

"""Compares a dozen whole calls with the float64 reference, one line each.

    python -m tests.tools.whole_calls [--device cuda|cpu] [--large V] [--json out.json]

A short stand-in for `pytest -m gpu` on a machine whose time is short: every kernel and every kind
of pass runs at least once. A call that is wrong or raises an exception has a line that says so, and
the next one follows; the exit status is then 1. With TRITON_INTERPRET=1 it runs on a CPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import grpo_kernels
from benchmarks.measure import new_result, parser_of, write_json
from grpo_kernels import Execution, GRPOLossConfig, LMHead, reference
from tests.helpers.batches import Batch, config, make_batch, relative_error
from tests.helpers.supports import make_support

V, R, K = 1003, 5, 7  # the vocabulary is odd: rows of logits are padded
LARGE = 151_936
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
LOGPS = 1e-4
# Relative errors of gradients on few tokens.
TOLERANCE = {FP32: 2e-5, BF16: 6e-3, FP16: 3e-3}
# Keeps gradients in the range of float16.
SCALE = 64.0


class Case:
    """A call's arguments: `x` has the trained tensors, `batch` the rest, `how` the execution."""

    def __init__(self, batch: Batch, dtype: torch.dtype, package: Any, how: dict[str, Any]) -> None:
        self.batch, self.package, self.how = batch, package, how
        g = torch.Generator().manual_seed(1)
        a_out = batch.hidden[..., :R]  # NaN where masked, as the rest is
        b = (0.3 * torch.randn(len(batch.weight), R, generator=g)).to(a_out.device, a_out.dtype)
        made = {"hidden": batch.hidden, "weight": batch.weight, "bias": batch.bias}
        made |= {"a_out": a_out, "b": b}
        self.x = SimpleNamespace(
            **{k: v.detach().to(dtype).clone().requires_grad_() for k, v in made.items()}
        )


Results = tuple[Tensor, Tensor]  # a loss, and log-probs


def loss(
    case: Case, head: Any = None, cfg: GRPOLossConfig | None = None, **options: Any
) -> Results:
    """The GRPO loss of a head, by default the weight alone."""
    batch, x = case.batch, case.x
    options |= case.how | {"old_logps": batch.old_logps, "config": cfg or config()}
    mask = options.pop("mask", batch.mask)
    head = x.weight if head is None else head
    out = case.package.fused_grpo_loss(
        x.hidden, head, batch.targets, batch.advantages, mask, **options
    )
    return out.loss, out.logps


def logps(case: Case, head: Any = None, targets: Tensor | None = None) -> Results:
    """The mean square of log-probs, and these."""
    batch, x = case.batch, case.x
    head = x.weight if head is None else head
    targets = batch.targets if targets is None else targets
    out = case.package.linear_logprobs(x.hidden, head, targets, batch.mask, **case.how)
    scored = batch.mask if targets.ndim == 2 else batch.mask[..., None]
    return torch.where(scored, out.logps, 0.0).square().mean(), out.logps


def every_token(case: Case) -> Results:
    """The loss where nothing is masked."""
    x, batch = case.x, case.batch
    with torch.no_grad():
        x.hidden.nan_to_num_()
    batch.targets, batch.old_logps = batch.targets.clamp(0, V - 1), batch.old_logps.nan_to_num(-2.0)
    return loss(case, mask=None)


def adapted(case: Case) -> Results:
    x = case.x
    return loss(case, LMHead(x.weight, x.bias, (x.a_out, x.b)))


def frozen(case: Case) -> Results:
    return logps(case, case.x.weight.detach())


def many_targets(case: Case) -> Results:
    steps = 11 * torch.arange(K, device=case.batch.targets.device)
    return logps(case, targets=(case.batch.targets[..., None] + steps) % V)


def with_support(case: Case) -> Results:
    return loss(case, support=_support(case, without=0.3))


def with_entries(case: Case) -> Results:
    """Every id of a token's set, where every token has one."""
    x, batch = case.x, case.batch
    with torch.no_grad():
        x.hidden.nan_to_num_()
    batch.mask, batch.targets = torch.ones_like(batch.mask), batch.targets.clamp(0, V - 1)
    support = _support(case, without=0.0)
    out = case.package.linear_logprobs(
        x.hidden, x.weight, None, support=support, entries=True, **case.how
    )
    return out.logps.square().mean(), out.logps


def _support(case: Case, without: float) -> grpo_kernels.Support:
    batch = case.batch
    sets = make_support(batch, without=without)
    return grpo_kernels.Support(*(x.to(batch.targets.device) for x in sets))


def at(**options: Any) -> Callable[[Case], Results]:
    """A loss with options of the objective."""
    return lambda case: loss(case, cfg=config(**options))


# The most telling first: name, dtype, call.
CASES: dict[str, tuple[torch.dtype, Callable[[Case], Results]]] = {
    "one pass, bf16": (BF16, loss),
    "one pass, fp32": (FP32, loss),
    "one pass, fp16": (FP16, loss),
    "large vocabulary, one pass": (BF16, loss),
    "large vocabulary, log-probs": (BF16, logps),
    "log-probs, bf16": (BF16, logps),
    "log-probs, fp32": (FP32, logps),
    "two passes": (BF16, at(loss_type="gspo")),
    "entropy": (BF16, at(entropy_coef=0.05)),
    "softcap": (BF16, lambda case: loss(case, LMHead(case.x.weight, softcap=5.0))),
    "bias and LoRA": (BF16, adapted),
    "frozen head": (BF16, frozen),
    "every token counts": (BF16, every_token),
    "capturable": (BF16, loss),
    "batch-invariant": (BF16, loss),
    "several targets": (BF16, many_targets),
    "support": (BF16, with_support),
    "entries of a support": (BF16, with_entries),
}
HOW = {"capturable": {"capturable": True}, "batch-invariant": {"batch_invariant": True}}


def compare(name: str, device: str, *, large: int = LARGE, tokens: int = 64) -> dict[str, float]:
    """Returns the errors of a call: of log-probs absolute, of loss and gradients relative."""
    dtype, call = CASES[name]
    sizes = {"T": tokens, "V": V}
    if name.startswith("large"):
        sizes |= {"H": 128, "V": large}
    execution = Execution(backend="triton", **HOW.get(name, {}))
    both = []
    for package, to, how in (
        (reference, torch.float64, {}),
        (grpo_kernels, dtype, {"execution": execution}),
    ):
        batch = make_batch(**sizes).to(device, dtype)
        case = Case(batch, to, package, how)
        value, scored = call(case)
        (SCALE * value).backward()
        both.append((value.detach(), scored.detach(), vars(case.x)))
    (value, exact, grads), (actual, scored, actual_grads) = both
    off = (actual - value).abs() / value.abs().clamp(min=1.0)
    row = {"loss": float(off), "logps": float((scored - exact).abs().max())}
    for key, x in grads.items():
        if (x.grad is None) != (actual_grads[key].grad is None):
            row[f"d_{key}"] = float("nan")
        elif x.grad is not None:
            row[f"d_{key}"] = relative_error(actual_grads[key].grad, x.grad)
    return row


def is_right(row: dict[str, float], dtype: torch.dtype) -> bool:
    """True if all errors are small; a NaN is not."""
    return all(x <= (TOLERANCE[dtype] if key.startswith("d_") else LOGPS) for key, x in row.items())


def results(device: str, large: int) -> Iterator[dict[str, Any]]:
    """Yields what became of each call."""
    # In the interpreter every row takes its time.
    sizes = {"large": large, "tokens": 5 if device == "cpu" else 64}
    for name, (dtype, _) in CASES.items():
        start, row = time.monotonic(), {}
        try:
            row = compare(name, device, **sizes)
            status = "ok" if is_right(row, dtype) else "wrong"
        except Exception as error:  # the next one may well be right
            status = f"{type(error).__name__}: {error}"
        seconds = round(time.monotonic() - start, 1)
        yield {"call": name, "status": status, "seconds": seconds, **row}


def main(argv: list[str] | None = None) -> None:
    parser = parser_of("tests.tools.whole_calls", __doc__)
    parser.add_argument("--large", type=int, default=LARGE, help=f"vocabulary (default: {LARGE})")
    args = parser.parse_args(argv)
    result = new_result(args.device)
    for row in results(args.device, args.large):
        result["rows"].append(row)
        errors = "  ".join(f"{key} {x:.1e}" for key, x in row.items() if isinstance(x, float))
        print(f"{row['call']:28} {row['status'][:300]:6}  {errors}", flush=True)
        write_json(args.json, result)
    bad = [row["call"] for row in result["rows"] if row["status"] != "ok"]
    print(f"{len(CASES) - len(bad)} of {len(CASES)} calls are right")
    sys.exit(f"failed: {', '.join(bad)}" if bad else 0)


if __name__ == "__main__":
    main()

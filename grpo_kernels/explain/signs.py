"""Signs in a log that the rules look for: each function returns their numbers as text, or ""."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from statistics import fmean as mean
from statistics import median, stdev
from typing import Any

from .steps import ExplainedSteps, not_finite, skipped_by_scaler

Row = Mapping[str, Any]
# Steps that count as "always", and steps within which a fall is fast.
WINDOW, FAST = 5, 20
WEIGHT = 0.02  # usual size of a language model's weight


@dataclass(frozen=True)
class Log:
    """Rows of steps with our names, the known options, and the run's first row."""

    rows: Sequence[Row]
    options: Mapping[str, Any] = field(default_factory=dict)
    first: Row = field(default_factory=dict)
    read: dict[tuple[str, ...], list[list[float]]] = field(default_factory=dict)

    def columns(self, *names: str) -> list[list[float]]:
        """Steps and values of metrics, from the rows where all of these are finite numbers."""
        if names not in self.read:
            rows = ([row.get("step", 0), *map(row.get, names)] for row in self.rows)
            known = [row for row in rows if all(isinstance(x, (int, float)) for x in row)]
            finite = [row for row in known if all(map(math.isfinite, row))]
            columns = [[*x] for x in zip(*finite, strict=True)]
            self.read[names] = columns or [[] for _ in range(len(names) + 1)]
        return self.read[names]

    def __getitem__(self, name: str) -> list[float]:
        return self.columns(name)[1]

    def span(self, name: str) -> str:
        low, high = f"{min(self[name]):.3g}", f"{max(self[name]):.3g}"
        return f"{name} is {low}" + f" to {high}" * (high != low)

    def top(self, limit: float, *names: str) -> str:
        """The first of these metrics with a value above the limit."""
        for name in names:
            value, step = max(zip(self[name], self.columns(name)[0], strict=True), default=(0.0, 0))
            if value > limit:
                return f"{name} is {value:.3g} at step {step:.0f}"
        return ""

    def change(self, name: str) -> tuple[float, float, float]:
        """Means of the first and of the last quarter of the steps, and the noise of both."""
        x, k = self[name], max(1, len(self[name]) // 4)
        if len(x) < 3:
            return 0.0, 0.0, math.inf
        noise = stdev(b - a for a, b in pairwise(x)) / k**0.5
        return mean(x[:k]), mean(x[-k:]), noise


def loss_zero(log: Log) -> str:
    moves = "grad_norm" if log["grad_norm"] else "reward_std"
    zero = bool(log["loss"]) and median(map(abs, log["loss"])) <= 5e-4 and any(log[moves])
    return f"{log.span('loss')}, {log.span(moves)}" if zero else ""


def loss_negative(log: Log) -> str:
    return log.span("loss") if min(log["loss"], default=0.0) < -5e-4 else ""


def loss_is_kl(log: Log) -> str:
    _, loss, kl = log.columns("loss", "kl")
    parts = [x / y for x, y in zip(loss, kl, strict=True) if y > 0 and x > 5e-4]
    beta = log.options.get("beta") or median(parts or [0.0])
    rest = [abs(x - beta * y) for x, y in zip(loss, kl, strict=True)]
    if len(parts) < 2 or mean(rest) > 0.1 * mean(map(abs, loss)) + 5e-5:
        return ""
    return f"loss is {beta:.2g} times kl, up to {max(loss):.3g}"


def kl_absent(log: Log) -> str:
    is_grpo = any(row.keys() & {"kl", "reward", "clip_ratio/region_mean"} for row in log.rows)
    if log.options.get("beta") or log["kl"] or not (log["loss"] and is_grpo):
        return ""
    return "kl is NaN" if any("kl" in row for row in log.rows) else "the log has no kl"


def kl_zero(log: Log) -> str:
    still = len(log["kl"]) >= WINDOW and not any(log["kl"])
    return f"kl is 0 at all {len(log['kl'])} steps" if still else ""


def kl_negative(log: Log, usual: bool = True) -> str:
    negative = [x for x in ("kl", "old_kl") if min(log[x], default=0.0) < 0]
    return next((log.span(x) for x in negative if (median(log[x]) >= -0.1) == usual), "")


def kl_large(log: Log) -> str:
    _, largest, average = log.columns("kl_max", "kl")
    peak, around = max(zip(largest, average, strict=True), default=(0.0, 0.0))
    share = peak / around if around > 0 else 0.0
    one = f"; one token has as much as {share:,.0f} average ones" if share > 2 else ""
    saw = log.top(10.0, "kl_max", "kl")
    return saw and saw + one


def entropy_low(log: Log) -> str:
    last, first = median(log["entropy"][-WINDOW:] or [1.0]), log.first.get("entropy") or 0.0
    late = log.first.get("step", 0) > FAST  # the log lacks the run's beginning
    low = last < 0.05 and (late or last < 0.2 * first)
    return f"entropy went from {first:.2f} to {last:.3f}" if low else ""


def entropy_falls(log: Log, learns: bool) -> str:
    """Compares means of `WINDOW` steps; `learns`: the reward must have risen, or must not have."""
    steps, entropy = log.columns("entropy")
    if len(steps) < 2 or (learns and entropy_low(log)):
        return ""
    known = dict(zip(*log.columns("reward"), strict=True))
    # A row may be the mean of several steps.
    size = max(1, round(WINDOW * (len(steps) - 1) / max(1, steps[-1] - steps[0])))
    parts = [slice(i, i + size) for i in range(len(steps) - size + 1)]
    means = [(mean(entropy[x]), mean(known.get(i, 0.0) for i in steps[x])) for x in parts]
    for end, (low, now) in enumerate(means):
        for start in range(max(0, end - FAST), end - size + 1):
            high, was = means[start]
            fast = steps[end] - steps[start] <= FAST
            if fast and low <= high / 2 and (now > was) == learns:
                last = steps[end + size - 1]
                saw = f"entropy fell from {high:.2f} to {low:.2f} by step {last:.0f}"
                return saw + (f", reward went from {was:.3g} to {now:.3g}" if known else "")
    return ""


def clip_zero(log: Log) -> str:
    clipped, option = log["clip_ratio/region_mean"], log.options.get
    once = option("epochs_per_rollout", 1) * option("minibatches", 1) == 1
    zero = once and clipped and not any(clipped) and max(log["ratio_max"], default=1.0) < 2
    return f"clip_ratio/region_mean is 0 at {len(clipped)} of {len(clipped)} steps" if zero else ""


def stretch(log: Log, name: str, least: float) -> str:
    """The longest stretch of values >= `least`, if it is the whole log, or too long for chance."""
    run = longest = end = 0
    steps, values = log.columns(name)
    for step, x in zip(steps, values, strict=True):
        run = run + 1 if x >= least else 0
        if run > longest:
            longest, end = run, int(step)
    # With one prompt per step, steps of equal rewards come in a row by chance.
    others = sum(x >= least for x in values) - longest
    share = (others + 1) / (len(values) - longest + 2)
    by_chance = len(values) * share**longest > 0.02
    if not longest or (longest < len(values) and (longest < WINDOW or by_chance)):
        return ""
    last = f"{longest} logged steps in a row, the last one {end}" if longest > 1 else f"step {end}"
    return f"{name} is {least:g}{' or more' * (least < 1)} at {last}"


def truncated(log: Log) -> str:
    saw, limit = stretch(log, "truncated", 0.95), log.options.get("max_completion_length")
    return saw and saw + (f", with max_completion_length = {limit}" if limit else "")


def bad_gradient(log: Log) -> str:
    bad = [
        # Our files have null for both.
        f"{name} is {'NaN or infinite' if row[name] is None else row[name]} at step {row['step']}"
        for row in log.rows
        for name in ("grad_norm", "loss") if not_finite(row, name) and not skipped_by_scaler(row)
    ]  # fmt: skip
    more = f", the first of {len(bad)} such values at {len(log.rows)} steps" * (len(bad) > 1)
    return bad[0] + more if bad else ""


def scaled(log: Log) -> str:
    scales = [row["loss_scale"] for row in log.rows if skipped_by_scaler(row)]
    return f"gradients are too large for float16 at a loss scale of {scales[0]:g}" if scales else ""


def grad_zero(log: Log) -> str:
    _, norms, spread = log.columns("grad_norm", "reward_std")
    if not norms or any(norms) or not any(spread):
        return ""
    return f"grad_norm is 0 at {len(norms)} of {len(norms)} steps, {log.span('reward_std')}"


def spikes(log: Log) -> str:
    """The spikes that the trainer explains."""
    watch = ExplainedSteps(".", most=len(log.rows))
    steps, norms = log.columns("grad_norm")
    why = [watch.why({"step": i, "grad_norm": x}) for i, x in zip(steps, norms, strict=True)]
    jumps = [f"at step {i:.0f} {x}" for i, x in zip(steps, why, strict=True) if x]
    return "; ".join(jumps[:3]) + f"; and {len(jumps) - 3} more" * (len(jumps) > 3)


def hacking(log: Log) -> str:
    """Falling accuracy beyond its noise: of held-out problems, if the log has two evaluations."""
    was, now, noise = log.change("reward")
    name = "held_out_accuracy" if len(log["held_out_accuracy"]) > 1 else "accuracy"
    k, sums = max(1, len(log[name]) // 4), [0.0, *accumulate(log[name])]
    means = [(b - a) / k for a, b in zip(sums, sums[k:], strict=False)] or [0.0]
    spread = [log.change(name)[2]] if len(log[name]) > 2 else []
    _, low, high = log.columns("held_out_low", "held_out_high")  # of 95 %
    spread += [(b - a) / 4 for a, b in zip(low, high, strict=True)]
    falls = max(means) - means[-1] > max(0.049, 3 * max(spread, default=0.0))
    if not falls or now - was <= max(0.05 * abs(was), 2 * noise):
        return ""
    return (
        f"reward went from {was:.3g} to {now:.3g}, {name} from {max(means):.3g} to {means[-1]:.3g}"
    )


def gap(log: Log, kind: str) -> str:
    """The difference between sampler and trainer, if it is of this kind."""
    gaps, largest = log["sampler_gap"], log["sampler_gap_max"] or [0.0]
    ratio = log["sampling/importance_sampling_ratio/mean"]
    if not gaps:
        return ""
    first, last, ratio_is = gaps[0], median(gaps[-WINDOW:]), median(ratio or [1.0])
    if first >= 1 or median(largest) >= 10:
        likely = "tokens"
    elif first >= 0.1 or (first >= 0.02 and 0.9 < ratio_is <= 0.97):
        likely = "temperature"
    elif last >= max(0.1, 4 * first):
        likely = "weights"
    else:
        likely = "product" if ratio_is <= 0.9 else "rounding" if last < 0.1 else ""
    saw = f"sampler_gap was {first:.2g} nats at first, {last:.2g} at last"
    saw += f", {max(largest):.2g} at most" * any(largest) + f"; mean ratio {ratio_is:.3g}" * bool(
        ratio
    )
    return saw if likely == kind else ""


def no_support(log: Log) -> str:
    option = log.options.get
    cuts = option("top_k", 0) > 0 or option("top_p", 1) < 1 or option("min_p", 0) > 0
    missing = cuts and option("replay_support") and not log["support/mean"]
    return "the rollout returns no support" if missing and log["reward"] else ""


def rounded_away(log: Log) -> str:
    """Updates that bf16 rounds away: Adam moves a weight by about the learning rate."""
    rates, option = log["learning_rate"], log.options.get
    size = option("weight_size") or WEIGHT
    lost = rates and option("dtype") == "bf16" and not option("lora_rank")
    if not lost or max(rates) >= size / 512:
        return ""
    return f"learning_rate is {max(rates):.2g} at most, a weight of {size:g} needs {size / 512:.1g}"

"""Explanation of a loss call from its arguments: columns per token, and their sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..base.checks import FLOATS, ValueChecks, as_number, check_tensor, flatten
from ..base.layout import Layout, check_targets
from ..base.outputs import GRPOLossOutput
from ..kernels import select_backend
from ..loss.config import GRPOLossConfig
from ..loss.cross_entropy import cross_entropy_terms
from ..loss.grpo_loss import d_kl, policy_loss_and_grads
from ..loss.inputs import check_entropy_given, loss_inputs
from ..loss.metrics import metric_values
from ..loss.objective import entropy_in_bonus, surrogate_scale, token_losses, tokens_of
from ..loss.tokens import Tokens
from .causes import Thresholds, rank
from .explanation import Explanation, group_sums, sequence_shares, shares, sums_of

# Columns with a value at tokens outside of the mask, which only `ce_weights` have.
_OF_ALL = ("gradient", "entropy_gradient", "gradient_share", "loss", "policy", "kl_loss", "ce_loss",
           "entropy_loss", "logp", "entropy", "moved", "d_hidden")  # fmt: skip

# Columns that are linear in the loss.
_SCALED = (
    "gradient", "entropy_gradient", "loss", "policy", "kl_loss", "ce_loss", "entropy_loss",
    "weight", "d_hidden",
)  # fmt: skip


def explain(
    out: GRPOLossOutput,
    targets: Tensor | None,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    sampling_logps: Tensor | None = None,
    ce_weights: Tensor | None = None,
    config: GRPOLossConfig = GRPOLossConfig(),  # noqa: B008 - frozen
    num_items: float | Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    groups: int | Tensor | Sequence[int] | None = None,
    rewards: Tensor | Sequence[float] | None = None,
    truncated: Tensor | Sequence[bool] | None = None,
    d_hidden: Tensor | None = None,
    next_logps: Tensor | None = None,
    prompts: Sequence[str] | None = None,
    texts: Sequence[Sequence[str]] | None = None,
    tokenizer: Any = None,
    thresholds: Thresholds = Thresholds(),  # noqa: B008 - frozen
) -> Explanation:
    """Shows which tokens a step's loss and gradient come from, and ranks the causes.

        hidden, weight = torch.randn(8, 24, 16, requires_grad=True), torch.randn(300, 16)
        targets, advantages = torch.randint(300, (8, 24)), torch.randn(8)
        out = fused_grpo_loss(hidden, weight, targets, advantages)
        print(explain(out, targets, advantages, groups=8))

    Computes columns on the tensors' device, without logits, and copies them to the CPU once.

    Args:
        out: the result of `fused_grpo_loss` or `grpo_loss`.
        targets: as in that call, like the arguments up to `cu_seqlens`; None if tokens have no ids.
        advantages: `[B]`, `[B, T]` or `[N]`.
        mask: in the shape of `out.logps`, as are the next four.
        old_logps: None: on-policy.
        ref_logps: None if the call had a `reference`.
        sampling_logps: NaN where the sampler reported none.
        ce_weights: weights of the cross-entropy term.
        config: the loss.
        num_items: the denominator.
        cu_seqlens: offsets of packed sequences.
        groups: the number of completions per prompt, which are consecutive; or `[B]`, the integer
            id of each completion's group. None: no groups.
        rewards: `[B]`, the reward of each completion.
        truncated: `[B]`, True if a completion ended at the length limit.
        d_hidden: `hidden.grad [..., H]`. `gradient_share` is then the share of the norms of its
            rows, instead of |gradient|: what each token sends into the layers below, before tokens
            cancel.
        next_logps: log-probs of the same tokens after the optimizer's step.
        prompts: `[B]` texts.
        texts: for each sequence the texts of its unmasked tokens, or of all positions up to the
            last unmasked one.
        tokenizer: instead of `texts`, an object with `decode(ids)`. A token's text is what it adds
            to the text before. If a character takes several tokens, the last one has its text and
            the others show U+FFFD.
        thresholds: limits from which a cause is named.

    Returns:
        Tokens in the mask or with a cross-entropy weight, and ranked `causes`; `print` shows the
        causes, `write` makes a page or a file. `columns["gradient"]` is the gradient of the loss
        with respect to the token's log-prob, with entropy and exact KL held fixed.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came; also if the
            columns do not add up to `out.loss`, because an argument differs from the call's.
    """
    if not isinstance(out, GRPOLossOutput):
        raise TypeError(f"out: expected a GRPOLossOutput; got {type(out).__name__}")
    if not isinstance(config, GRPOLossConfig):
        raise TypeError(f"config: expected a GRPOLossConfig; got {type(config).__name__}")
    checks = ValueChecks()
    layout = Layout.of("out.logps", check_tensor("out.logps", out.logps), cu_seqlens, checks)
    reference = out.kl if config.exact_kl else out.ref_logps
    constants = loss_inputs(
        config,
        layout,
        checks,
        advantages,
        layout.flat_mask(mask, checks),
        old_logps=old_logps,
        ref_logps=ref_logps,
        sampling_logps=sampling_logps,
        ce_weights=ce_weights,
        num_items=num_items,
        has_reference=reference is not None,
    )
    if reference is not None and config.exact_kl:
        constants = replace(constants, kl=layout.flat("out.kl", reference))
    elif reference is not None:
        constants = replace(constants, ref_logps=layout.flat("out.ref_logps", reference))
    check_entropy_given(config, out.entropy)
    entropy = None if out.entropy is None else layout.flat("out.entropy", out.entropy)
    columns = _columns(config, constants, layout.flat("out.logps", out.logps), entropy)
    if next_logps is not None:
        columns["moved"] = layout.flat("next_logps", next_logps) - columns["logp"]
    if d_hidden is not None:
        check_tensor("d_hidden", d_hidden, dtypes=FLOATS, device=layout.device)
        if d_hidden.shape[:-1] != layout.shape:
            expected = ", ".join(map(str, layout.shape))
            raise ValueError(
                f"d_hidden: expected shape [{expected}, H]; got {list(d_hidden.shape)}"
            )
        dtype = torch.promote_types(d_hidden.dtype, torch.float32)
        norms = torch.linalg.vector_norm(d_hidden.detach(), dim=-1, dtype=dtype)
        columns["d_hidden"] = flatten(norms.float())
    ids = None if targets is None else check_targets(targets, layout.shape, layout.device)
    checks.read()

    columns, sequence, position, ids, loss = _to_cpu(layout, constants, columns, ids, out.loss)
    _check_sum(columns["loss"], loss)
    gradient, count = columns.pop("gradient"), 1 if not layout.sequences else layout.sequences.count
    share = shares(columns.get("d_hidden", gradient))
    columns = {"gradient": gradient, "gradient_share": share, **columns}
    lengths = sequence.bincount(minlength=count).tolist()
    sequences = _sequences(columns, sequence, lengths, groups, rewards, truncated, prompts)
    words = None
    if tokenizer is not None:
        if ids is None:
            raise ValueError("targets: expected token ids for a tokenizer; got None")
        if texts is not None:
            raise ValueError("tokenizer: expected None with texts; got one")
        words = decoded(tokenizer, [x.tolist() for x in ids.split(lengths)])
    elif texts is not None:
        rows = zip(_per_sequence("texts", texts, count), position.split(lengths), strict=True)
        words = [_texts(i, *row) for i, row in enumerate(rows)]
    explanation = Explanation(
        columns, sequence, position, sequences, group_sums(sequences), [], words, ids, loss
    )
    return replace(explanation, causes=rank(explanation, thresholds))


def join(parts: Sequence[Explanation], scales: Sequence[float] | None = None) -> Explanation:
    """Joins the explanations of several calls whose losses add up to a step's.

    Args:
        parts: explanations of the calls, at least one, with the same columns. Pass each call's
            `groups` as ids that no two prompts share, not as a number.
        scales: factor of each call's loss in the step's, such as 1 / number of calls; None: 1.
    """
    if not parts:
        raise ValueError("parts: expected one explanation at least; got none")
    factors = [1.0] * len(parts) if scales is None else [as_number(x) for x in scales]
    if len(factors) != len(parts):
        raise ValueError(f"scales: expected {len(parts)}, one for each part; got {len(factors)}")
    for i, part in enumerate(parts):
        if part.columns.keys() != parts[0].columns.keys():
            raise ValueError(
                f"parts[{i}]: expected the columns of parts[0], {[*parts[0].columns]}; "
                f"got {[*part.columns]}"
            )
    columns = {
        name: torch.cat([
            part.columns[name] * (factor if name in _SCALED else 1.0)
            for part, factor in zip(parts, factors, strict=True)
        ])
        for name in parts[0].columns
    }  # fmt: skip
    columns["gradient_share"] = shares(columns.get("d_hidden", columns["gradient"]))
    firsts = [0, *accumulate(len(part.sequences) for part in parts)]
    sequence = torch.cat([x.sequence + first for x, first in zip(parts, firsts, strict=False)])
    known = sequence_shares(columns, sequence, firsts[-1])
    sequences = [
        row | {name: values[i] for name, values in known.items()}
        for i, row in enumerate(row for part in parts for row in part.sequences)
    ]
    texts, ids = [part.texts for part in parts], [part.token_ids for part in parts]
    joined = Explanation(
        columns, sequence, torch.cat([part.position for part in parts]), sequences,
        group_sums(sequences), [],
        None if None in texts else [row for rows in texts for row in rows or []],
        None if any(x is None for x in ids) else torch.cat([x for x in ids if x is not None]),
        math.fsum((part.loss or 0.0) * factor for part, factor in zip(parts, factors, strict=True)),
    )  # fmt: skip
    return replace(joined, causes=rank(joined))


def _columns(
    config: GRPOLossConfig, constants: Tokens, logps: Tensor, entropy: Tensor | None
) -> dict[str, Tensor]:
    """The columns that follow from the loss, `[N]`, by their names and in their order."""
    backend = select_backend("auto", logps.device)
    gradients = policy_loss_and_grads(config, constants, logps, entropy, backend, grad=True)
    with torch.no_grad():
        tokens = tokens_of(config, constants, logps, entropy)
        scale, chosen = surrogate_scale(config, tokens)
        policy, kl = token_losses(config, tokens, scale)
        values = metric_values(config, tokens, None, None).means
        parts = {"policy": tokens.weights * policy}
        if kl is not None:
            parts["kl_loss"] = tokens.weights * kl
        elif tokens.kl is not None and (slope := d_kl(config, tokens)) is not None:
            parts["kl_loss"] = slope * tokens.kl
        if tokens.ce_weights is not None:
            parts["ce_loss"] = cross_entropy_terms(tokens.ce_weights, logps)
        if config.entropy_coef and tokens.entropy is not None:
            bonus, count = entropy_in_bonus(tokens, chosen)
            parts["entropy_loss"] = -config.entropy_coef * bonus / count
    sampler, old = tokens.sampling_logps, tokens.old_logps
    columns = {
        "gradient": gradients.d_logps,
        "entropy_gradient": gradients.d_entropy,
        "loss": torch.stack([*parts.values()]).sum(0),
        **parts,
        "ratio": values["ratio_mean"],
        "clip": values["clip_high"].float() - values["clip_low"].float(),
        "kl": values.get("kl"),
        "logp": logps,
        "entropy": entropy,
        "advantage": constants.advantages,
        "weight": tokens.weights,
        "importance_weight": tokens.importance_sampling_weights,
        "dropped": None if scale is None else scale == 0,
        "sampler_gap": None if sampler is None else old - sampler,
        "log_ratio": None if constants.old_logps is None else tokens.log_ratio,
    }
    return {name: x.float() for name, x in columns.items() if x is not None}


def _to_cpu(
    layout: Layout, constants: Tokens, columns: dict[str, Tensor], ids: Tensor | None, loss: Tensor
) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor | None, float]:
    """The columns of the tokens that count, their sequences, positions and ids, and the loss."""
    index, sequences = torch.arange(layout.num_tokens, device=layout.device), layout.sequences
    sequence = torch.zeros_like(index)
    if sequences is not None:
        sequence = sequences.spread(torch.arange(sequences.count, device=layout.device))
    shown = torch.ones_like(index) if constants.unmasked is None else constants.unmasked.long()
    table = torch.stack([
        x if name in _OF_ALL else x.masked_fill(shown == 0, torch.nan)
        for name, x in columns.items()
    ])  # fmt: skip
    if constants.ce_weights is not None:
        shown = shown | (constants.ce_weights != 0)
    rows = [shown, sequence, index - torch.searchsorted(sequence, sequence)]
    whole = torch.stack(rows if ids is None else [*rows, ids]).cpu()
    numbers = torch.cat([table.flatten(), loss.detach().float().reshape(1)]).cpu()
    at = whole[0] != 0
    values = dict(zip(columns, numbers[:-1].view(table.shape)[:, at], strict=True))
    sequence, position, *rest = whole[1:, at]
    return values, sequence, position, rest[0] if rest else None, numbers[-1].item()


def _check_sum(losses: Tensor, loss: float) -> None:
    total, size = losses.sum(dtype=torch.float64), losses.abs().sum(dtype=torch.float64)
    if total.isfinite() and not abs(total - loss) <= 1e-3 * size + 1e-6:
        raise ValueError(
            "out.loss: expected the sum of the tokens' losses, "
            f"{total:.6g}; got {loss:.6g}: pass the same arguments as to the call that returned out"
        )


def _sequences(
    columns: dict[str, Tensor], sequence: Tensor, lengths: list[int], groups: Any, rewards: Any,
    truncated: Any, prompts: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """The sums and facts of each sequence."""
    count = len(lengths)
    facts: dict[str, list[Any]] = {
        "group": _groups(groups, count),
        "length": lengths,
        **sequence_shares(columns, sequence, count),
    }
    in_policy = ~columns["advantage"].isnan()
    sums = (sums_of(x, sequence, count) for x in (columns["advantage"].nan_to_num(), in_policy))
    facts["advantage"] = [x / n if n else None for x, n in zip(*sums, strict=True)]
    for name, x in (("reward", rewards), ("truncated", truncated), ("prompt", prompts)):
        if x is not None:
            argument = {"reward": "rewards", "prompt": "prompts"}.get(name, name)
            facts[name] = _per_sequence(argument, x, len(lengths))
    for x in facts.get("reward", []):
        if x is not None and not isinstance(x, (int, float)):
            raise TypeError(f"rewards: expected numbers; got {x!r}")
    if "truncated" in facts:
        facts["truncated"] = [None if x is None else bool(x) for x in facts["truncated"]]
    return [
        {name: x[i] for name, x in facts.items() if x[i] is not None or name == "group"}
        for i in range(len(lengths))
    ]


def _per_sequence(name: str, x: Any, count: int) -> list[Any]:
    if not isinstance(x, (Tensor, Sequence)) or isinstance(x, str):
        raise TypeError(f"{name}: expected a list or tensor; got {type(x).__name__}")
    shape = list(x.shape) if isinstance(x, Tensor) else [len(x)]
    if shape != [count]:
        raise ValueError(f"{name}: expected one for each of {count} sequences; got shape {shape}")
    return x.tolist() if isinstance(x, Tensor) else [as_number(value) for value in x]


def _groups(groups: Any, count: int) -> list[Any]:
    groups = as_number(groups)
    if groups is None:
        return [None] * count
    if not isinstance(groups, int) or isinstance(groups, bool):
        ids = _per_sequence("groups", groups, count)
        if not all(type(x) is int for x in ids):
            raise TypeError("groups: expected whole numbers; got others")
        return ids
    if groups < 1 or count % groups:
        raise ValueError(
            f"groups: expected a divisor of the number of sequences, {count}; got {groups}"
        )
    return [i // groups for i in range(count)]


def _texts(sequence: int, texts: Sequence[str], position: Tensor) -> list[str]:
    """The texts of the tokens that count."""
    if isinstance(texts, str):
        raise TypeError(f"texts[{sequence}]: expected a list of texts; got one text")
    if len(texts) == len(position):
        return [*texts]
    last = int(position[-1]) if len(position) else -1
    if len(texts) <= last:
        raise ValueError(
            f"texts[{sequence}]: expected {len(position)} texts, or {last + 1} and more for all "
            f"positions; got {len(texts)}"
        )
    return [texts[i] for i in position.tolist()]


def decoded(tokenizer: Any, sequences: Sequence[list[int]]) -> list[list[str]]:
    """The texts of each sequence's tokens.

    Raises:
        TypeError: the tokenizer has no `decode`.
    """
    if not callable(getattr(tokenizer, "decode", None)):
        kind = type(tokenizer).__name__
        raise TypeError(f"tokenizer: expected an object with decode(ids); got {kind}")
    decode = cache(lambda *ids: tokenizer.decode([*ids]))
    return [_decoded(decode, ids) for ids in sequences]


def _decoded(decode: Callable[..., str], ids: list[int]) -> list[str]:
    """A text per token: what it adds to that of the tokens before it.

    By itself a token may lose its space, and bytes of a character have no text until the last.
    """
    texts, known, pending = [], tuple[int, ...](), tuple[int, ...]()
    for token in ids:
        pending = (*pending, token)
        before, text = decode(*known) if known else "", decode(*known, *pending)
        text = text[len(before) :] if text.startswith(before) else decode(*pending)
        texts.append(text)
        if not text.endswith("\N{REPLACEMENT CHARACTER}") or len(pending) > 7:
            known, pending = pending, ()
        else:
            texts[-1] = "\N{REPLACEMENT CHARACTER}"
    return texts

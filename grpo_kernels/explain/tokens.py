"""Explanation of a loss call from its arguments: columns per token, and their sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..base.checks import FLOATS, ValueChecks, as_number, check_tensor
from ..base.layout import Layout, check_targets
from ..base.outputs import GRPOLossOutput
from ..kernels import select_backend
from ..loss.config import GRPOLossConfig
from ..loss.cross_entropy import cross_entropy_terms
from ..loss.grpo_loss import d_kl, policy_loss_and_grads
from ..loss.inputs import check_has_entropy, loss_inputs
from ..loss.metrics import metric_values
from ..loss.objective import entropy_in_bonus, surrogate_scale, token_losses, tokens_of
from ..loss.tokens import Tokens
from .causes import Thresholds, rank
from .explanation import Explanation, group_sums, sequence_shares, shares, sums_of

# Columns that are linear in the loss.
_SCALED = {"gradient", "entropy_gradient", "loss", "policy", "kl_loss", "ce_loss", "entropy_loss",
           "weight", "d_hidden"}  # fmt: skip
# Columns that `ce_weights` give values outside of the mask.
_OF_ALL = _SCALED - {"weight"} | {"gradient_share", "logp", "entropy", "moved"}


def explain(
    out: GRPOLossOutput, targets: Tensor | None, advantages: Tensor, mask: Tensor | None = None, *,
    old_logps: Tensor | None = None, ref_logps: Tensor | None = None,
    sampling_logps: Tensor | None = None, ce_weights: Tensor | None = None,
    config: GRPOLossConfig = GRPOLossConfig(),  # noqa: B008 - frozen
    num_items: float | Tensor | None = None,
    cu_seqlens: Tensor | None = None, groups: int | Tensor | Sequence[int] | None = None,
    rewards: Tensor | Sequence[float] | None = None,
    truncated: Tensor | Sequence[bool] | None = None, d_hidden: Tensor | None = None,
    next_logps: Tensor | None = None, prompts: Sequence[str] | None = None,
    texts: Sequence[Sequence[str]] | None = None, tokenizer: Any = None,
    thresholds: Thresholds = Thresholds(),  # noqa: B008 - frozen
) -> Explanation:  # fmt: skip
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
            rows, instead of |gradient|: each token's gradient into the layers below, before tokens
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
    for name, x, kind in (("out", out, GRPOLossOutput), ("config", config, GRPOLossConfig)):
        if not isinstance(x, kind):
            raise TypeError(f"{name}: expected a {kind.__name__}; got {type(x).__name__}")
    checks = ValueChecks()
    layout = Layout.of("out.logps", check_tensor("out.logps", out.logps), cu_seqlens, checks)
    known_as = "kl" if config.exact_kl else "ref_logps"
    reference: Tensor | None = getattr(out, known_as)
    constants = loss_inputs(
        config, layout, checks, advantages, layout.flat_mask(mask, checks), old_logps=old_logps,
        ref_logps=ref_logps, sampling_logps=sampling_logps, ce_weights=ce_weights,
        num_items=num_items, has_reference=reference is not None,
    )  # fmt: skip
    if reference is not None:
        known: dict[str, Any] = {known_as: layout.flat(f"out.{known_as}", reference)}
        constants = replace(constants, **known)
    check_has_entropy(config, out.entropy)
    entropy = None if out.entropy is None else layout.flat("out.entropy", out.entropy)
    columns = _columns(config, constants, layout.flat("out.logps", out.logps), entropy)
    if next_logps is not None:
        columns["moved"] = layout.flat("next_logps", next_logps) - columns["logp"]
    if d_hidden is not None:
        check_tensor("d_hidden", d_hidden, dtypes=FLOATS, device=layout.device)
        dtype = torch.promote_types(d_hidden.dtype, torch.float32)
        norms = torch.linalg.vector_norm(d_hidden.detach(), dim=-1, dtype=dtype)
        columns["d_hidden"] = layout.flat("d_hidden.norm(dim=-1)", norms.float())
    ids = None if targets is None else check_targets(targets, layout.shape, layout.device)
    checks.read()

    columns, sequence, position, ids, loss = _to_cpu(layout, constants, columns, ids, out.loss)
    total, size = (x.sum(dtype=torch.float64) for x in (columns["loss"], columns["loss"].abs()))
    if total.isfinite() and not abs(total - loss) <= 1e-3 * size + 1e-6:
        raise ValueError(
            f"out.loss: expected the sum of the tokens' losses, {total:.6g}; got {loss:.6g}: pass "
            "the same arguments as to the call that returned out"
        )
    gradient, count = columns.pop("gradient"), 1 if not layout.sequences else layout.sequences.count
    share = shares(columns.get("d_hidden", gradient))
    columns = {"gradient": gradient, "gradient_share": share, **columns}
    lengths = sequence.bincount(minlength=count).tolist()
    sequences = _sequences(columns, sequence, lengths, groups, rewards, truncated, prompts)
    words = _words(tokenizer, texts, ids, position, lengths)
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
    first = parts[0].columns
    for i, part in enumerate(parts):
        if part.columns.keys() != first.keys():
            names = f"{[*first]}; got {[*part.columns]}"
            raise ValueError(f"parts[{i}]: expected the columns of parts[0], {names}")
    columns = {name: torch.cat([part.columns[name] for part in parts]) for name in first}
    pairs = [*zip(parts, factors, strict=True)]
    each = torch.cat(
        [torch.full(x.sequence.shape, f, dtype=torch.float32, device="cpu") for x, f in pairs]
    )
    columns |= {name: x * each for name, x in columns.items() if name in _SCALED}
    columns["gradient_share"] = shares(columns.get("d_hidden", columns["gradient"]))
    firsts = [0, *accumulate(len(part.sequences) for part in parts)]
    sequence = torch.cat([x.sequence + first for x, first in zip(parts, firsts, strict=False)])
    known = sequence_shares(columns, sequence, firsts[-1])
    sequences = [row.copy() for part in parts for row in part.sequences]
    for i, row in enumerate(sequences):
        row |= {name: values[i] for name, values in known.items()}
    texts, ids = [part.texts for part in parts], [part.token_ids for part in parts]
    joined = Explanation(
        columns, sequence, torch.cat([part.position for part in parts]), sequences,
        group_sums(sequences), [],
        None if None in texts else [row for rows in texts for row in rows or []],
        None if any(x is None for x in ids) else torch.cat([x for x in ids if x is not None]),
        math.fsum((part.loss or 0.0) * factor for part, factor in pairs),
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
    stacked = torch.stack(rows if ids is None else [*rows, ids]).cpu()
    numbers = torch.cat([table.flatten(), loss.detach().float().reshape(1)]).cpu()
    at = stacked[0] != 0
    values = dict(zip(columns, numbers[:-1].view(table.shape)[:, at], strict=True))
    sequence, position, *rest = stacked[1:, at]
    return values, sequence, position, rest[0] if rest else None, numbers[-1].item()


def _sequences(
    columns: dict[str, Tensor], sequence: Tensor, lengths: list[int], groups: Any, rewards: Any,
    truncated: Any, prompts: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    count, in_policy = len(lengths), ~columns["advantage"].isnan()
    known = columns["advantage"].nan_to_num(), in_policy
    sums = (sums_of(x, sequence, count).tolist() for x in known)
    facts: dict[str, list[Any]] = {
        "group": _groups(groups, count),
        "length": lengths,
        **sequence_shares(columns, sequence, count),
        "advantage": [x / n if n else None for x, n in zip(*sums, strict=True)],
        "reward": _per_sequence("rewards", rewards, count),
        "truncated": _per_sequence("truncated", truncated, count),
        "prompt": _per_sequence("prompts", prompts, count),
    }
    if wrong := [x for x in facts["reward"] if not isinstance(x, (int, float, type(None)))]:
        raise TypeError(f"rewards: expected numbers; got {wrong[0]!r}")
    facts["truncated"] = [None if x is None else bool(x) for x in facts["truncated"]]
    rows = (zip(facts, values, strict=True) for values in zip(*facts.values(), strict=True))
    return [{name: x for name, x in row if x is not None or name == "group"} for row in rows]


def _per_sequence(name: str, x: Any, count: int) -> list[Any]:
    if x is None:
        return [None] * count
    if not isinstance(x, (Tensor, Sequence)) or isinstance(x, str):
        raise TypeError(f"{name}: expected a list or tensor; got {type(x).__name__}")
    shape = list(x.shape) if isinstance(x, Tensor) else [len(x)]
    if shape != [count]:
        raise ValueError(f"{name}: expected one for each of {count} sequences; got shape {shape}")
    return x.tolist() if isinstance(x, Tensor) else [as_number(value) for value in x]


def _groups(groups: Any, count: int) -> list[Any]:
    if type(groups := as_number(groups)) is not int:
        ids = _per_sequence("groups", groups, count)
        if groups is not None and {type(x) for x in ids} - {int}:
            raise TypeError("groups: expected whole numbers; got others")
        return ids
    if groups < 1 or count % groups:
        raise ValueError(
            f"groups: expected a divisor of the number of sequences, {count}; got {groups}"
        )
    return [i // groups for i in range(count)]


def _words(
    tokenizer: Any, texts: Any, ids: Tensor | None, position: Tensor, lengths: list[int]
) -> list[list[str]] | None:
    """The texts of the tokens that count, per sequence."""
    if tokenizer is not None:
        if ids is None:
            raise ValueError("targets: expected token ids for a tokenizer; got None")
        if texts is not None:
            raise ValueError("tokenizer: expected None with texts; got one")
        return decoded(tokenizer, [x.tolist() for x in ids.split(lengths)])
    rows = [] if texts is None else _per_sequence("texts", texts, len(lengths))
    words = []
    for i, (row, at) in enumerate(zip(rows, position.split(lengths), strict=False)):
        places = [*range(len(row))] if len(row) == len(at) else at.tolist()
        if isinstance(row, str):
            raise TypeError(f"texts[{i}]: expected a list of texts; got one text")
        if max(places, default=-1) >= len(row):
            raise ValueError(
                f"texts[{i}]: expected {len(at)} texts, or {places[-1] + 1} and more for all "
                f"positions; got {len(row)}"
            )
        words.append([row[place] for place in places])
    return None if texts is None else words


def decoded(tokenizer: Any, sequences: Sequence[list[int]]) -> list[list[str]]:
    """A text per token of each sequence: what it adds to the text of the tokens before.

    Decoded alone, a token may lose its space, and a byte of a character has no text.

    Raises:
        TypeError: the tokenizer has no `decode`.
    """
    if not callable(getattr(tokenizer, "decode", None)):
        kind = type(tokenizer).__name__
        raise TypeError(f"tokenizer: expected an object with decode(ids); got {kind}")
    decode = cache(lambda *ids: tokenizer.decode([*ids]))
    words = []
    for ids in sequences:
        texts, known, pending = list[str](), tuple[int, ...](), tuple[int, ...]()
        for token in ids:
            pending = (*pending, token)
            before, text = decode(*known) if known else "", decode(*known, *pending)
            text = text[len(before) :] if text.startswith(before) else decode(*pending)
            texts.append(text)
            if not text.endswith("\N{REPLACEMENT CHARACTER}") or len(pending) > 7:
                known, pending = pending, ()
            else:
                texts[-1] = "\N{REPLACEMENT CHARACTER}"
        words.append(texts)
    return words

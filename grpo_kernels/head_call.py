"""The arguments that every call over a linear head has, checked and flat."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from numbers import Integral, Real
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .backends import Backend, LogitTransform, select_backend
from .config import check_number
from .layout import (
    HEAD_DTYPES,
    Layout,
    ValueChecks,
    check_target_ids,
    check_targets,
    check_tensor,
)

if TYPE_CHECKING:
    from .support import Support
    from .vocab_shards import VocabShard

# Noise of the sampled backward, relative to the gradient.
DEFAULT_TOLERANCE = 5e-3
LOGITS_DTYPES = ("fp32", "model")
# Where rows are, if ranks share the vocabulary: all on every rank, their gradients added up here or
# by the caller; or each rank has its own, of one batch or of a batch of its own.
OWN_ROWS = ("sequence", "data")
LAYOUTS = ("replicated", "partial", *OWN_ROWS)
# Rows of every GEMM of a batch-invariant call: few lost in a call's last tile, and enough that the
# weight is not read, or packed, too often.
_TILE_ROWS = 256

Matmul = Callable[[Tensor, Tensor], Tensor]


class HeadOperands(NamedTuple):
    """The tensors of a linear head that may have gradients.

    Raw logits are `hidden @ weight.T + lora_a_out @ lora_b.T + bias`.
    """

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    lora_a_out: Tensor | None  # [N, r]
    lora_b: Tensor | None  # [V, r]

    def wants_grad(self) -> list[bool]:
        """True for each tensor whose gradient the current call is to prepare."""
        enabled = torch.is_grad_enabled()
        return [enabled and x is not None and x.requires_grad for x in self]


class ColumnSampling(NamedTuple):
    """Options of the sampled backward: relative gradient noise, and the source of the draws."""

    tolerance: float
    seed: int | torch.Generator | None


@dataclass(frozen=True)
class HeadCall:
    """A call over a linear head, checked and flat: all but its operands.

    `checks` are still to be read from the device, with the row counts.
    """

    targets: Tensor  # int64 [N]
    mask: Tensor | None  # bool [N], the tokens that take part; None: every token
    transform: LogitTransform
    layout: Layout
    checks: ValueChecks
    backend: Backend
    dtype: torch.dtype  # of the GEMMs' operands
    sampling: ColumnSampling | None
    capturable: bool  # reads nothing from the device: every row takes part
    chunk_bytes: int | None
    columns: int  # rows of the weight
    rounding: torch.dtype | None  # what logits are rounded to; None: they are float32
    tile: int | None  # rows of every GEMM whose result is of rows; None: any
    matmul: Matmul | None  # the caller's own product; None: torch's
    support: Support | None = None  # of tokens that are then not in `mask`
    with_grad: Tensor | None = None  # bool [N], those of them that may have a gradient; None: all
    shard: VocabShard | None = None  # of the vocabulary, if ranks share it
    # bool [N], the targets in the shard, for which column 0 stands; None: they have not been placed
    here: Tensor | None = None
    target_ids: Tensor | None = None  # int64 [N], of those that have been placed, in the vocabulary

    def zeroed(self, *per_token: Tensor) -> None:
        """Sets values `[N]` of masked rows to 0 where these took part."""
        if self.capturable and self.mask is not None:
            for x in per_token:
                x.masked_fill_(~self.mask, 0.0)


def head_call(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    *,
    bias: Tensor | None,
    low_rank: tuple[Tensor, Tensor] | None,
    temperature: float | Tensor,
    logit_scale: float,
    softcap: float | None,
    cu_seqlens: Tensor | None,
    backward: str,
    tolerance: float | None,
    seed: int | torch.Generator | None,
    backend: str,
    chunk_bytes: int | None,
    capturable: bool,
    logits_dtype: str = "fp32",
    batch_invariant: bool = False,
    matmul: Matmul | None = None,
    vocab_group: object = None,
    vocab_start: object = None,
    hidden_layout: str = "replicated",
    agreed: Mapping[str, float] = MappingProxyType({}),
) -> tuple[HeadOperands, HeadCall]:
    """Checks and flattens the arguments that all calls over a linear head share.

    `agreed`: what else has to be the same on all ranks that share the vocabulary.
    """
    if hasattr(weight, "full_tensor") or hasattr(bias, "full_tensor"):
        from .vocab_shards import local_parts

        weight, bias, low_rank, vocab_group = local_parts(weight, bias, low_rank, vocab_group)
    _check_head(hidden, weight, bias, least=int(vocab_group is None))
    if hidden.device.type == "meta":
        raise ValueError("hidden: expected a tensor with values; got one on the meta device")
    lora_a_out, lora_b = _low_rank(low_rank, hidden, weight)
    _check_logit_scalars(logit_scale, softcap)
    if chunk_bytes is not None and (
        isinstance(chunk_bytes, bool) or not isinstance(chunk_bytes, int) or chunk_bytes < 1
    ):
        raise ValueError(f"chunk_bytes: expected a positive int, or None; got {chunk_bytes!r}")
    sampling = _column_sampling(backward, tolerance, seed)
    if not isinstance(capturable, bool):
        raise TypeError(f"capturable: expected a bool; got {capturable!r}")
    if capturable and sampling is not None:
        raise ValueError(
            "backward: expected 'exact' with capturable=True, as the other one reads how many "
            "columns it keeps; got 'sampled'"
        )
    tile = _tile(batch_invariant)
    if matmul is not None and not callable(matmul):
        raise TypeError(f"matmul: expected a function of two tensors, or None; got {matmul!r}")
    if sampling is not None and (tile or matmul):
        raise ValueError(
            "backward: expected 'exact' with batch_invariant=True or a matmul, as which columns "
            "are drawn depends on the whole batch; got 'sampled'"
        )
    V = len(weight)
    rounding = _rounding(logits_dtype, hidden, weight)
    selected = select_backend(backend, hidden.device)
    flat_targets = check_targets(targets, hidden.shape[:-1], hidden.device)
    checks = ValueChecks()
    layout = Layout.of("targets", targets, cu_seqlens, checks)
    flat_mask = layout.flat_mask(mask, checks)
    here, ids, shard, dtype = None, None, None, _gemm_dtype(hidden, weight)
    if vocab_group is not None:
        from .vocab_shards import shard_of

        whole = HeadOperands(hidden, weight, bias, lora_a_out, lora_b)
        refused = {"backward": ("exact", backward), "capturable": (False, capturable)}
        shard = shard_of(
            vocab_group, vocab_start, hidden_layout, whole, flat_targets, dtype, refused,
            {
                "temperature per token": isinstance(temperature, Tensor),
                "temperature": 1.0 if isinstance(temperature, Tensor) else temperature,
                "logit_scale": logit_scale, "softcap (0: none)": softcap or 0.0,
                "logits_dtype='model'": rounding is not None,
                "batch_invariant": tile is not None, **agreed,
            },
        )  # fmt: skip
        V = shard.columns
    elif vocab_start is not None or hidden_layout != "replicated":
        raise ValueError(
            "vocab_start, hidden_layout: expected None and 'replicated' without a vocab_group; got "
            f"{vocab_start!r} and {hidden_layout!r}"
        )
    check_target_ids(flat_targets, flat_mask, V if shard is None else shard.size, checks)
    if shard is not None and not shard.own_rows:
        ids = flat_targets
        flat_targets, here = shard.place(ids, V)
    transform = LogitTransform(
        # Rounded logits have it from the head.
        bias=None if bias is None or rounding else bias.detach()[:V].contiguous(),
        logit_scale=float(logit_scale),
        softcap=softcap,
        temperature=layout.flat_temperature(temperature, flat_mask, checks),
    )
    hidden = hidden.reshape(-1, weight.shape[1])
    if capturable and flat_mask is not None:
        # Masked rows take part, and may hold anything.
        hidden, flat_targets = _selected(flat_mask, hidden), _selected(flat_mask, flat_targets)
        lora_a_out = None if lora_a_out is None else _selected(flat_mask, lora_a_out)
        if isinstance(transform.temperature, Tensor):
            ones = torch.ones_like(transform.temperature)
            temperature = torch.where(flat_mask, transform.temperature, ones)
            transform = replace(transform, temperature=temperature)
    operands = HeadOperands(hidden, weight, bias, lora_a_out, lora_b)
    call = HeadCall(
        targets=flat_targets,
        mask=flat_mask,
        transform=transform,
        layout=layout,
        checks=checks,
        backend=selected,
        dtype=dtype,
        sampling=sampling,
        capturable=capturable,
        chunk_bytes=chunk_bytes,
        columns=V,
        rounding=rounding,
        tile=tile,
        matmul=matmul,
        shard=shard,
        here=here,
        target_ids=ids,
    )
    return operands, call


def _selected(mask: Tensor, x: Tensor) -> Tensor:
    """The rows of `x` in `mask`, the others 0."""
    return torch.where(mask if x.ndim == 1 else mask[:, None], x, torch.zeros_like(x[:1]))


def _gemm_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The dtype of the GEMMs' operands.

    CUDA tensor cores take bf16 and fp16 operands and give float32. Elsewhere the result would be
    rounded to the operands' dtype, so they are upcast, a slice of the vocabulary at a time.
    Autocast asks for its dtype on CUDA; on a CPU it is ignored, to the result's benefit.
    """
    if hidden.device.type != "cuda" or torch.version.hip is not None:
        return torch.float32
    if torch.is_autocast_enabled("cuda"):
        autocast = torch.get_autocast_dtype("cuda")
        if autocast in (torch.bfloat16, torch.float16):
            return autocast
    return hidden.dtype if hidden.dtype == weight.dtype else torch.float32


def _rounding(logits_dtype: object, hidden: Tensor, weight: Tensor) -> torch.dtype | None:
    """The dtype that the model's own head would have its logits in, if it is asked for."""
    if logits_dtype not in LOGITS_DTYPES:
        raise ValueError(
            f"logits_dtype: expected {' or '.join(map(repr, LOGITS_DTYPES))}; got {logits_dtype!r}"
        )
    if logits_dtype == "fp32":
        return None
    device = hidden.device.type
    own = hidden.dtype if hidden.dtype == weight.dtype else torch.float32
    if torch.is_autocast_enabled(device):
        own = torch.get_autocast_dtype(device)
    return None if own == torch.float32 else own


def _tile(batch_invariant: object) -> int | None:
    if not isinstance(batch_invariant, bool):
        raise TypeError(f"batch_invariant: expected a bool; got {batch_invariant!r}")
    return _TILE_ROWS if batch_invariant else None


def _check_head(hidden: object, weight: object, bias: object, least: int) -> None:
    hidden = check_tensor("hidden", hidden, dtypes=HEAD_DTYPES)
    weight = check_tensor("weight", weight, dtypes=HEAD_DTYPES, device=hidden.device)
    for name, x in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if hasattr(x, "full_tensor"):
            raise TypeError(
                f"{name}: expected a plain tensor, whole; got a DTensor: call this inside the "
                f"wrapped module's forward, or pass {name}.full_tensor()"
            )
    if hidden.ndim not in (2, 3):
        raise ValueError(f"hidden: expected shape [B, T, H] or [N, H]; got {list(hidden.shape)}")
    if weight.ndim != 2 or weight.shape[0] < least or weight.shape[1] != hidden.shape[-1]:
        hint = (
            "; an empty weight is what ZeRO-3 shows outside the wrapped module's forward"
            if weight.numel() == 0
            else ""
        )
        raise ValueError(
            f"weight: expected shape [V, {hidden.shape[-1]}]; got {list(weight.shape)}{hint}"
        )
    if bias is not None:
        check_tensor("bias", bias, shape=weight.shape[:1], dtypes=HEAD_DTYPES, device=hidden.device)


def _check_logit_scalars(logit_scale: object, softcap: object) -> None:
    check_number("logit_scale", logit_scale)
    if softcap is not None:
        check_number("softcap", softcap)
        if softcap <= 0:  # type: ignore[operator]
            raise ValueError(f"softcap: expected a number > 0, or None; got {softcap}")


def _low_rank(
    low_rank: object, hidden: Tensor, weight: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Returns `lora_a_out [N, r]` and `lora_b [V, r]`, or None twice."""
    if low_rank is None:
        return None, None
    if not isinstance(low_rank, (tuple, list)) or len(low_rank) != 2:
        raise TypeError(
            "low_rank: expected a pair of tensors, lora_a_out and lora_b, or None; got "
            f"{low_rank!r}"
        )
    lora_a_out, lora_b = (
        check_tensor(f"low_rank[{i}]", x, dtypes=HEAD_DTYPES, device=hidden.device)
        for i, x in enumerate(low_rank)
    )
    if lora_b.ndim != 2 or lora_b.shape[0] != weight.shape[0]:
        raise ValueError(
            f"low_rank[1]: expected shape [{weight.shape[0]}, r]; got {list(lora_b.shape)}"
        )
    expected = [*hidden.shape[:-1], lora_b.shape[1]]
    if list(lora_a_out.shape) != expected:
        raise ValueError(f"low_rank[0]: expected shape {expected}; got {list(lora_a_out.shape)}")
    return lora_a_out.reshape(-1, lora_b.shape[1]), lora_b


def _column_sampling(backward: object, tolerance: object, seed: object) -> ColumnSampling | None:
    """The options of the sampled backward; None for the exact one."""
    if backward not in ("exact", "sampled"):
        raise ValueError(f"backward: expected 'exact' or 'sampled'; got {backward!r}")
    if backward == "exact":
        for name, value in (("tolerance", tolerance), ("seed", seed)):
            if value is not None:
                raise ValueError(f"{name}: expected None unless backward='sampled'; got {value!r}")
        return None
    if tolerance is None:
        tolerance = DEFAULT_TOLERANCE
    number = isinstance(tolerance, Real) and not isinstance(tolerance, bool)
    if not number or not 0 < float(tolerance) < 1:  # type: ignore[arg-type]
        raise ValueError(f"tolerance: expected a number between 0 and 1; got {tolerance!r}")
    if isinstance(seed, Integral) and not isinstance(seed, bool):
        seed = int(seed)
    elif not (seed is None or isinstance(seed, torch.Generator)):
        raise TypeError(
            f"seed: expected an int, a torch.Generator or None; got {type(seed).__name__}"
        )
    return ColumnSampling(float(tolerance), seed)  # type: ignore[arg-type]

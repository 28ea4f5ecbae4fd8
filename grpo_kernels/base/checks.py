"""Checks of tensors, at once, and of values on the device, all in one transfer.

Reading values (target ids, NaN advantages, masks that are not 0 or 1, `cu_seqlens`) synchronizes.
`ValueChecks` collects their checks: a call reads them together with its row counts, or asserts them
on the device.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

_T = TypeVar("_T", bound=Callable[..., Any])
# Modules of torch.Tensor's subclasses that compute as plain tensors do.
_AS_TENSORS = ("torch.distributed.", "torch._subclasses.", "torch.testing.")
HEAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
FLOATS = (*HEAD_DTYPES, torch.float64)
_FLOAT32 = torch.finfo(torch.float32)
RANGES: dict[str, Callable[[float], bool]] = {
    "> 0": lambda x: x > 0,
    "> 0, as a float32": lambda x: _FLOAT32.tiny <= x <= _FLOAT32.max,
    ">= 0": lambda x: x >= 0,
    "> 1": lambda x: x > 1,
    "in [0, 1]": lambda x: 0 <= x <= 1,
    "in (0, 1)": lambda x: 0 < x < 1,
    "of any size": lambda x: True,
}


def check_tensor(
    name: str,
    x: object,
    *,
    shape: Sequence[int] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Returns `x`, a tensor of this shape, one of these dtypes and on this device, or raises."""
    if not isinstance(x, Tensor):
        hint = ": pass its last_hidden_state" if hasattr(x, "last_hidden_state") else ""
        raise TypeError(f"{name}: expected a tensor; got {type(x).__name__}{hint}")
    if not is_dense(x):
        raise TypeError(
            f"{name}: expected a dense tensor that is not quantised; got {type(x).__name__} "
            f"({x.layout}): dequantise it, or make it dense"
        )
    if shape is not None and tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name}: expected shape {list(shape)}; got {list(x.shape)}")
    if dtypes is not None and x.dtype not in dtypes:
        expected = ", ".join(map(dtype_name, dtypes))
        is_wide = x.dtype == torch.float64 and torch.float64 not in dtypes
        hint = ": cast it, or use grpo_kernels.reference" if is_wide else ""
        raise TypeError(f"{name}: expected dtype {expected}; got {dtype_name(x.dtype)}{hint}")
    if device is not None and x.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}; got one on {x.device}")
    return x


def suggests_names(call: _T) -> _T:
    """Adds what to use instead to a function's or class's TypeError for an unknown keyword."""
    function: Callable[..., Any] = call.__init__ if isinstance(call, type) else call  # type: ignore

    @functools.wraps(function)
    def answering(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            called = error.__traceback__ and error.__traceback__.tb_next
            unknown = [x for x in kwargs if x not in inspect.signature(function).parameters]
            if called or not unknown:  # it is about something else
                raise
            from .hints import hint_for_keyword

            hint = hint_for_keyword(unknown[0], call)
            said = str(error).split(". Did you mean")[0]  # Python's own hint, from 3.13 on
            raise (TypeError(f"{said}: {hint}") if hint else error) from None

    if isinstance(call, type):
        call.__init__ = answering  # type: ignore[misc]
        return call
    return cast(_T, answering)


def is_dense(x: Tensor) -> bool:
    """Returns False for a sparse or nested tensor, and for a subclass that overrides operators.

    Quantised weights are such subclasses: they claim a floating-point dtype.
    """
    cls = type(x)
    is_plain = cls.__torch_dispatch__ is Tensor.__torch_dispatch__
    known = is_plain or cls.__module__.startswith(_AS_TENSORS)
    return known and x.layout == torch.strided and not x.is_nested


def check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool; got {value!r}")


def as_number(value: Any) -> Any:
    """Returns Python's number for NumPy's and the like, also from a 0-d array.

    Returns everything else as it is, tensors and bools too.
    """
    if type(value) in (bool, int, float, str, type(None)) or isinstance(value, Tensor):
        return value
    is_scalar = getattr(value, "ndim", None) == 0 and hasattr(value, "item")
    number = value.item() if is_scalar else value
    if isinstance(number, bool) or not isinstance(number, Real):
        return value
    return int(number) if isinstance(number, Integral) else float(number)


def convert_numbers(options: Any) -> None:
    """Converts the numbers in a dataclass's fields to Python's, also in lists and dicts."""
    for option in fields(options):
        value = getattr(options, option.name)
        number: Any = as_number(value)
        if type(value) is list and any(as_number(x) is not x for x in value):
            number = [as_number(x) for x in value]
        elif type(value) is dict and any(as_number(x) is not x for x in value.values()):
            number = {key: as_number(x) for key, x in value.items()}
        if number is not value:
            object.__setattr__(options, option.name, number)  # it may be frozen


def check_number(name: str, value: object, expected: str = "of any size") -> float:
    """Returns the value as Python's number, finite and within one of `RANGES`, or raises."""
    value = as_number(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number; got {type(value).__name__} {value!r}")
    if not -math.inf < value < math.inf:  # which torch.compile knows of a number that varies
        raise ValueError(f"{name}: expected a finite number; got {value}")
    if not RANGES[expected](value):
        raise ValueError(f"{name}: expected a number {expected}; got {value}")
    return value


def check_choice(name: str, value: object, choices: tuple[object, ...], hint: str = "") -> None:
    # Of one type: an array is equal to nothing.
    if not any(isinstance(value, type(x)) and value == x for x in choices):
        from .hints import hint_for_choice

        raise ValueError(
            f"{name}: expected one of {', '.join(map(str, choices))}{hint}; got {value!r}"
            f"{hint_for_choice(value, choices)}"
        )


def scalar(name: str, value: object, device: torch.device) -> float | Tensor:
    """Returns a number, or a 0-d tensor on `device`; one on the CPU is read without waiting."""
    if isinstance(value, Tensor):
        check_tensor(name, value)
        if value.ndim != 0:
            raise ValueError(f"{name}: expected a 0-d tensor; got shape {list(value.shape)}")
        if value.is_complex() or value.dtype == torch.bool:
            raise TypeError(f"{name}: expected a real number; got {dtype_name(value.dtype)}")
        if value.device == device:
            return value.detach()
        if value.device.type != "cpu":
            raise ValueError(f"{name}: expected a tensor on {device}; got one on {value.device}")
        value = value.item()
    return check_number(name, value)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def version_numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(x) for x in re.findall(r"\d+", version)[:2])


def flatten(x: Tensor) -> Tensor:
    """Flattens to `[N]`, contiguous, as kernels address it: reshape may return a strided view.

    Copies a tensor made in inference mode, which autograd would not save.
    """
    return saveable(x.reshape(-1).contiguous())


def saveable(x: Tensor) -> Tensor:
    """`x`, or its copy if it was made in inference mode: autograd saves no such constant."""
    tracing = torch.compiler.is_dynamo_compiling()  # which knows of no such mode
    return x.clone() if not tracing and x.is_inference() else x


@dataclass
class Sizes:
    """Integers, int64 `[K]` on the device; `numbers` has them once they have been read."""

    on_device: Tensor
    numbers: list[int] = field(default_factory=list)


@dataclass
class ValueChecks:
    """Checks of values on the device, each a count of offenders and a message; sizes to read."""

    counts: list[Tensor] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    sizes: list[Sizes] = field(default_factory=list)

    def add(self, offenders: Tensor, message: str) -> None:
        self.counts.append(offenders.sum())
        self.messages.append(message)

    def ask(self, *sizes: Tensor) -> Sizes:
        """Adds sizes, 0-d or `[K]`, to read together with the checks."""
        answer = Sizes(torch.cat([size.reshape(-1) for size in sizes]))
        self.sizes.append(answer)
        return answer

    def read(self, *further: Tensor) -> list[int]:
        """Reads checks, sizes and `further` 0-d counts in one transfer; raises for offenders."""
        questions = [x.reshape(1) for x in (*self.counts, *further)]
        questions += [answer.on_device for answer in self.sizes]
        answers = iter(torch.cat(questions).tolist() if questions else ())
        for message in self.messages:
            if count := next(answers):
                raise ValueError(f"{message} ({count} of them)")
        further_counts = [next(answers) for _ in further]
        for answer in self.sizes:
            answer.numbers = [next(answers) for _ in range(len(answer.on_device))]
        return further_counts

    def check_without_sync(self) -> None:
        """Raises on a CPU; leaves a device-side assertion on a GPU, as torch's own gather does."""
        for count, message in zip(self.counts, self.messages, strict=True):
            if count.device.type != "cpu":
                torch._assert_async(count == 0, message)
            elif int(count):
                raise ValueError(f"{message} ({int(count)} of them)")

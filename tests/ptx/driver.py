"""Triton driver without a GPU: Triton compiles as always, and the emulator runs the PTX."""

from __future__ import annotations

import os
import re
import struct
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

# Triton decides when its own functions are defined, too.
_INTERPRET = os.environ.pop("TRITON_INTERPRET", None)

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.driver import DriverBase  # noqa: E402

if _INTERPRET is not None:
    os.environ["TRITON_INTERPRET"] = _INTERPRET

from .counters import Counts  # noqa: E402
from .machine import Machine  # noqa: E402
from .memory import POISON, Finding, Memory, View  # noqa: E402
from .parse import Program, parse  # noqa: E402

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class SanitizerError(AssertionError):
    """Findings of a launch, raised where checks are strict."""


@dataclass
class Settings:
    """Checks that launches run under, and statistics of the launches so far."""

    races: bool = True
    strict_warps: bool = False  # see `races`
    strict: bool = True  # faults raise at the end of the launch
    error: float = 0.0  # see `operations.operation`
    order: str | int = "together"  # see `Machine`
    counts: bool = False  # whether `counted` is filled in
    blocks: Callable[[tuple[int, int, int]], np.ndarray] | None = None  # those to run of a grid
    edit: Callable[[str], str] | None = None  # changes the PTX before it runs
    findings: list[Finding] = field(default_factory=list)
    launches: Counter[str] = field(default_factory=Counter)
    opcodes: Counter[str] = field(default_factory=Counter)
    counted: dict[str, Counts] = field(default_factory=lambda: defaultdict(Counts))  # by kernel
    executed: int = 0  # instructions times threads
    seconds: float = 0.0


@cache
def _parsed(ptx: str) -> Program:
    return parse(ptx)


class _Launcher:
    """Called with the grid and all arguments, constants included."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self.signature, self.shared, self.name = src.signature, metadata.shared, metadata.name
        self.without_other = getattr(metadata, "loads_without_other", [])

    def __call__(
        self, x: int, y: int, z: int, stream: Any, function: str, packed: Any, launch: Any,
        enter: Any, leave: Any, *args: Any,
    ) -> None:  # fmt: skip
        settings = EmulatedDriver.settings
        began = time.perf_counter()
        program = _parsed(function if settings.edit is None else settings.edit(function))
        pairs = zip(self.signature.items(), args, strict=True)
        items = [(name, kind, value) for (name, kind), value in pairs if kind != "constexpr"]
        arguments: dict[str, int] = {}
        machine = Machine(
            program, self.shared, arguments, (x, y, z), races=settings.races,
            strict_warps=settings.strict_warps, error=settings.error, order=settings.order,
            counted=settings.counted[program.name] if settings.counts else None,
        )  # fmt: skip
        addresses = _place(machine.memory, [(name, v) for name, kind, v in items if kind[0] == "*"])
        values = [addresses[name] if name in addresses else _bits(kind, value)
                  for name, kind, value in items]  # fmt: skip
        # Triton adds pointers to scratch memory, which kernels here do not have.
        scratch = [0] * (len(program.params) - len(values))
        arguments.update(zip(program.params, [*values, *scratch], strict=True))
        if settings.blocks is None:
            number = np.arange(x * y * z)
            blocks = np.stack([number % x, number // x % y, number // (x * y)], 1)
        else:
            blocks = settings.blocks((x, y, z))
        machine.run(blocks)
        faults = list(machine.findings.values())
        for place in self.without_other:
            # 0 in the PTX of NVIDIA, today; Triton's language leaves it open.
            faults.append(Finding("masked load without other", self.name, place, "tt.load", 1, "-"))
        settings.findings += faults
        settings.launches[program.name] += 1
        settings.opcodes.update(i.op for i in program.instructions)
        settings.executed += machine.executed
        settings.seconds += time.perf_counter() - began
        if faults and settings.strict:
            raise SanitizerError("\n".join(map(str, faults)))


def _bits(kind: str, value: Any) -> int:
    if kind in ("fp32", "f32"):
        return struct.unpack("<I", struct.pack("<f", value))[0]
    if kind == "fp64":
        return struct.unpack("<Q", struct.pack("<d", value))[0]
    if not re.fullmatch(r"[iu]\d+", kind):
        raise NotImplementedError(f"an argument of type {kind}")
    return int(value)


def _place(memory: Memory, pointers: list[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """Gives each storage a region and each argument its address; marks what its tensors have."""
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = defaultdict(list)
    for name, tensor in pointers:
        by_storage[tensor.untyped_storage().data_ptr()].append((name, tensor))
    addresses = {}
    for start, named in by_storage.items():
        tensors = [tensor for _, tensor in named]
        raw = torch.empty(0, dtype=torch.uint8).set_(tensors[0].untyped_storage()).numpy()
        unit = min(tensor.element_size() for tensor in tensors)
        region = memory.add("/".join(name for name, _ in named), raw, start, unit)
        if not any(t.is_contiguous() and t.nbytes == len(raw) for t in tensors):
            region.views = [_view(tensor, unit) for tensor in tensors]
        for name, tensor in named:
            addresses[name] = region.base + tensor.storage_offset() * tensor.element_size()
    return addresses


def _view(tensor: torch.Tensor, unit: int) -> View:
    times = tensor.element_size() // unit  # where views of a storage differ in their dtypes
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    # Expanded dimensions add no elements.
    dims = [(times * stride, size) for stride, size in strides if stride]
    dims = sorted((d for d in [*dims, (1, times)] if d[1] > 1), reverse=True)
    return View(times * tensor.storage_offset(), dims)


def _ptx_only(
    backend: Any = None, stages: Any = None, options: Any = None, language: Any = None,
    capability: Any = None,
) -> Any:  # fmt: skip
    """Triton's hook on the stages of compilation: ptxas has nothing to do."""
    if stages is None:
        return "emulated", "emulated"
    stages["cubin"] = lambda src, metadata: src.encode()
    make_ttir = stages["ttir"]

    def ttir(src: Any, metadata: dict[str, Any]) -> Any:
        module = make_ttir(src, metadata)
        metadata["loads_without_other"] = _loads_without_other(str(module))
        return module

    stages["ttir"] = ttir
    return None


def _loads_without_other(ttir: str) -> list[str]:
    """Returns the source lines of masked loads without an `other` value."""
    places = dict(re.findall(r'^#(loc\d*) = loc\("([^"]*":\d+):\d+\)', ttir, re.M))
    named = re.findall(r'^#(loc\d*) = loc\((?:"[^"]*"\(|callsite\()#(loc\d*)', ttir, re.M)
    inner = dict(named)
    loads = re.findall(r"tt\.load ([^:{]*?)(?: \w+ = .*?)? : .* loc\(#(loc\d*)\)", ttir)
    lines = []
    for operands, place in loads:
        if operands.count(",") == 1:
            while place in inner:
                place = inner[place]
            lines.append(places.get(place, "?").rsplit("/", 1)[-1].replace('"', ""))
    return lines


class EmulatedDriver(DriverBase):
    """Triton's driver of a GPU that is not there.

    Args:
        capability: the GPU compiled for, 90 for sm_90.
    """

    settings = Settings()

    def __init__(self, capability: int = 90) -> None:
        self.capability = capability
        self.launcher_cls = _Launcher
        properties = {"max_shared_mem": 227 << 10, "multiprocessor_count": 132, "warpSize": 32}
        # The binary is the PTX itself, and what is loaded of it is the text.
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: properties,
            load_binary=lambda name, ptx, shared, device: (ptx, ptx.decode(), 0, 0, 1024),
        )
        super().__init__()

    @classmethod
    def activate(cls, capability: int = 90, **settings: Any) -> EmulatedDriver:
        """Makes a driver the one that kernels are launched with; they must not be interpreted."""
        cls.settings = Settings(**settings)
        driver = cls(capability)
        triton.runtime.driver.set_active(driver)
        knobs = triton.knobs
        knobs.runtime.__dict__["interpret"] = False  # not in the environment, which others read
        knobs.runtime.add_stages_inspection_hook = _ptx_only
        # Compiled here is PTX in the place of a binary.
        if Path(knobs.cache.dir).name != "emulated":
            knobs.cache.__dict__["dir"] = str(Path(knobs.cache.dir) / "emulated")
        return driver

    @classmethod
    def is_active(cls) -> bool:
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("there is nothing to time")


def mark(x: torch.Tensor) -> torch.Tensor:
    """Fills a tensor with the bits of uninitialised memory."""
    held = getattr(x, "held", x)  # of tensors that say that they are on a GPU
    size = x.element_size()
    plain = type(held) is torch.Tensor and held.device.type == "cpu" and not held.is_complex()
    if plain and size in _INTEGERS and held.numel():
        held.detach().view(_INTEGERS[size]).fill_(POISON[size])
    return x


def mark_allocations(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Makes torch mark memory that it does not fill; `replace` may be a monkeypatch's."""

    def marked(allocate: Any) -> Any:
        return lambda *args, **kwargs: mark(allocate(*args, **kwargs))

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        replace(owner, name, marked(getattr(owner, name)))

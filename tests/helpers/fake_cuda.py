"""CUDA without a GPU: fake tensors that record what calls do, and others that hold values.

    with FakeCUDA(answer_with(900)) as gpu:
        out = fused_grpo_loss(...)  # of tensors made in here, with device="cuda"
        backward(out.loss)
    assert len(gpu.transfers) == 1, gpu.report()

Tensors of `FakeCUDA` have shapes, dtypes and strides alone; the library takes its paths for a GPU.
Recorded is what reaches torch's dispatcher or launches a Triton kernel, and the line that asked:

- transfers: what makes the CPU wait for the device, copies between the two or mixes their tensors;
- launches: kernels of Triton, and operations that are neither views nor allocations;
- keys: what Triton specializes a kernel for, by Triton's own function.

In `EmulatedCUDA()` tensors hold values, in memory of the CPU; torch's operations run on these,
products of halves as a GPU rounds them, and Triton's kernels by the emulator of `tests.ptx`.
"""

from __future__ import annotations

import ctypes
import linecache
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, KernelInterface, create_function_from_signature

ROOT = Path(__file__).parents[2]
TARGET = GPUTarget("cuda", 90, 32)
# Operations that launch nothing; views are known to torch.
_FREE = {
    "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided",
    "_unsafe_view", "_reshape_alias", "lift_fresh",
}  # fmt: skip
_PINS = (torch.ops.aten._pin_memory.default, torch.ops.aten.pin_memory.default)
_READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Event(NamedTuple):
    """An operation or a launch, and the line of the library (or the test) that asked for it."""

    name: str
    operands: str
    where: str


def answer_with(*row_counts: int) -> Callable[[Tensor], Any]:
    """Makes up the values that the library reads.

    A vector has counts of offending values, 0, and ends in `row_counts`; all else is 1.
    """

    def answer(x: Tensor) -> Any:
        if x.dim() == 1 and not x.is_floating_point() and x.dtype != torch.bool:
            return [0] * (len(x) - len(row_counts)) + list(row_counts)
        return torch.ones(x.shape, dtype=x.dtype, device="cpu").tolist()

    return answer


class _Pretends(TorchDispatchMode):
    """Has torch find a GPU in here."""

    def pretend(self, major: int) -> pytest.MonkeyPatch:
        self._stack = ExitStack()
        self._stack.enter_context(_device_guard())
        patch = self._stack.enter_context(pytest.MonkeyPatch.context())
        properties = SimpleNamespace(
            name="NVIDIA H200", total_memory=140 << 30, multi_processor_count=132, major=major
        )
        patch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        patch.setattr(torch.cuda, "device_of", lambda _: nullcontext())
        patch.setattr(torch, "Generator", _Generator)
        return patch

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._stack.close()


class FakeCUDA(_Pretends):
    """Runs what is inside on fake CUDA tensors, and records it.

    Args:
        answer: returns the value of a device tensor that is read: a number, or nested lists.
    """

    def __init__(self, answer: Callable[[Tensor], Any] = answer_with()) -> None:  # noqa: B008
        super().__init__()
        self.answer = answer
        self.transfers: list[Event] = []
        self.launches: list[Event] = []
        # (kernel, constants and options of the launch): specializations of the other arguments
        self.keys: dict[tuple[str, str], set[str]] = defaultdict(set)

    def report(self) -> str:
        """The transfers, one per line."""
        lines = (f"{where}  {name}({operands})" for name, operands, where in self.transfers)
        return "\n".join(lines) or "no transfer"

    def counts(self) -> Counter[str]:
        """The launches by name."""
        return Counter(event.name for event in self.launches)

    def __enter__(self) -> FakeCUDA:
        if TorchVersion(torch.__version__) < (2, 13) and not _adds_in_float32():
            pytest.skip("this torch's fake tensors have no addmm(out_dtype=)")
        patch = self.pretend(major=9)
        # Without the engine there is no graph task; in a plain backward the answer is False.
        patch.setattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: False)
        # In one read, where torch asks for value after value.
        patch.setattr(FakeTensor, "tolist", lambda x: self._read("tolist", x))
        # `kernel[grid]` returns what launches the kernel.
        launch = self._launch
        patch.setattr(KernelInterface, "__getitem__", lambda kernel, _: partial(launch, kernel))
        self._stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        devices = _device_types(inputs)
        if kwargs.get("device") is not None:
            devices.add(torch.device(kwargs["device"]).type)
        if "cuda" not in devices:
            with unset_fake_temporarily():
                # There is no pinned memory either.
                return inputs[0] if func in _PINS else func(*args, **kwargs)
        if func.namespace == "prim":
            return func(*args, **kwargs)
        name = func.name().removeprefix("aten::")
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._read(name, inputs[0])
        if (
            func is torch.ops.aten._to_copy.default
            and "cpu" in devices
            and isinstance(inputs[0], FakeTensor)
        ):
            values = self._read(name, inputs[0])
            with unset_fake_temporarily():
                return torch.tensor(values, dtype=kwargs.get("dtype", inputs[0].dtype))
        if _transfers(func, devices, inputs):
            self.transfers.append(_event(name, inputs))
        if not func.is_view and func.overloadpacket.__name__ not in _FREE:
            self.launches.append(_event(name, inputs))
        try:
            return func(*args, **kwargs)
        except ValueError as error:
            # A view that cannot be: what torch raises, and the library expects.
            raise RuntimeError(*error.args) from error

    def _read(self, name: str, x: Tensor) -> Any:
        self.transfers.append(_event(name, [x]))
        with unset_fake_temporarily():
            return self.answer(x)

    def _launch(self, kernel: Any, *args: Any, **kwargs: Any) -> None:
        tensors = _tensors((args, kwargs))
        event = _event(kernel.__name__, tensors)
        self.launches.append(event)
        if "cpu" in _device_types(tensors):
            self.transfers.append(event)
        constexprs, bind = _binder(kernel)
        params, specialization, options = bind(*map(_pointer, args), **kwargs)
        kinds = dict(zip(params, specialization, strict=True))
        constants = {name: params[name] for name in constexprs}
        key = {name: kind for name, kind in kinds.items() if name not in constants}
        self.keys[kernel.__name__, str(constants | options)].add(str(key))


class OnCUDA(Tensor):
    """A tensor that says that it is on CUDA; `held` has its values, on the CPU.

    To C++ it is on the CPU, so that autograd's engine takes it.
    """

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnCUDA:
        x = Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(),
            dtype=held.dtype, layout=held.layout, device=held.device,
        )  # fmt: skip
        x.held = held
        return x

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _on_held(func, args, kwargs or {})

    device = property(lambda self: torch.device("cuda", 0))  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self) -> Any:
        return self.held.tolist()

    def cpu(self, *_: Any, **__: Any) -> Tensor:
        return _FromCUDA.apply(self)

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        places = [x for x in (*args, *kwargs.values()) if isinstance(x, (str, torch.device))]
        if any(torch.device(x).type == "cpu" for x in places):
            moved = self.cpu()
            rest = [x for x in args if isinstance(x, torch.dtype)]
            rest += [kwargs["dtype"]] if "dtype" in kwargs else []
            return moved.to(*rest) if rest else moved
        return super().to(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OnCUDA({self.held!r})"


class _FromCUDA(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: OnCUDA) -> Tensor:
        return x.held.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return OnCUDA(gradient)


class EmulatedCUDA(_Pretends):
    """Runs what is inside on CUDA tensors that hold values.

    Operations on tensors of both devices are refused, as on a GPU. Needs the driver of `tests.ptx`.

    Args:
        major: compute capability of the GPU, that the library sees.
    """

    def __init__(self, major: int = 9) -> None:
        super().__init__()
        self.major = major

    def __enter__(self) -> EmulatedCUDA:
        patch = self.pretend(self.major)
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr(Tensor, "pin_memory", lambda x, *_: x)
        run = JITFunction.run

        def launch(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = _tensors((args, kwargs))
            assert all(isinstance(x, OnCUDA) for x in tensors), f"{kernel}: a tensor on the CPU"
            return run(kernel, *map(_held, args), **{k: _held(v) for k, v in kwargs.items()})

        patch.setattr(JITFunction, "run", launch)
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _on_held(func, args, kwargs or {})


def _held(x: Any) -> Any:
    return x.held if isinstance(x, OnCUDA) else x


def _on_held(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an operation on the held tensors; what comes of it is where CUDA would have it."""
    inputs = _tensors((args, kwargs))
    wrappers = [x for x in inputs if isinstance(x, OnCUDA)]
    name = func.name().removeprefix("aten::")
    on_cuda = bool(wrappers)
    if kwargs.get("device") is not None:
        on_cuda = torch.device(kwargs["device"]).type == "cuda" or (
            on_cuda and not name.startswith("_to_copy")
        )
        kwargs = {**kwargs, "device": torch.device("cpu")}
    elif name.startswith("copy_") and inputs:
        on_cuda = isinstance(inputs[0], OnCUDA)
    # What autograd's own formulas make is where C++ has their operands.
    in_backward = torch._C._current_graph_task_id() != -1
    others = [x for x in inputs if not isinstance(x, OnCUDA) and x.dim() and not in_backward]
    if wrappers and others and not name.startswith(("copy_", "_to_copy", "index", "_index")):
        raise RuntimeError(f"{name}: tensors on the CPU beside tensors on CUDA, at {_where()}")
    kwargs.pop("pin_memory", None)
    plain, options = tree_map(_held, (args, kwargs))
    if name in ("mm.dtype", "addmm.dtype", "mm.dtype_out", "addmm.dtype_out"):
        out = _half_product(name, list(plain), dict(options))
    else:
        out = func(*plain, **options)
    known = {id(x.held): x for x in wrappers}

    def placed(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        # What was written to is what was given.
        return known[id(x)] if id(x) in known else OnCUDA(x) if on_cuda else x

    return tree_map(placed, out)


def _half_product(name: str, args: list[Any], options: dict[str, Any]) -> Tensor:
    """Products of halves that are added up in float32, which a CPU has not."""
    out = options.pop("out", None)
    dtype = next((a for a in args if isinstance(a, torch.dtype)), options.get("out_dtype"))
    tensors = [a.float() for a in args if isinstance(a, Tensor)]
    factors = {k: options[k] for k in ("alpha", "beta") if k in options}
    result = (torch.mm if name.startswith("mm") else torch.addmm)(*tensors, **factors).to(dtype)
    return result if out is None else out.copy_(result)


def reads_nothing(call: Callable[[], Any]) -> FakeCUDA:
    """Asserts that `call`, which makes its own tensors, has no transfer, as a CUDA graph needs."""
    with FakeCUDA() as gpu:
        call()
    assert not gpu.transfers, gpu.report()
    return gpu


def backward(output: Tensor, *gradients: Tensor | None) -> Any:
    """Runs the backward of the library's autograd Function that `output` comes from, its first.

    By hand, as autograd's engine wants a device; without `gradients` that of `output` is 1.
    """
    node = output.grad_fn
    assert node is not None
    while not hasattr(node, "_forward_cls"):
        node = node.next_functions[0][0]
    with torch.no_grad():
        return node.apply(*(gradients or (torch.ones_like(output),)))


def backward_of_all(*outputs: Tensor) -> None:
    """Runs the whole graph of the outputs by hand, each with a gradient of 1."""
    given: dict[Any, dict[int, Tensor]] = {}
    order: list[Any] = []

    def visit(node: Any) -> None:
        if node not in given:
            given[node] = {}
            for before, _ in node.next_functions:
                if before is not None:
                    visit(before)
            order.append(node)

    for output in outputs:
        visit(output.grad_fn)
        given[output.grad_fn][output.output_nr] = torch.ones_like(output)
    with torch.no_grad():
        for node in reversed(order):
            own = hasattr(node, "_forward_cls")
            if not given[node] or not (own or node.next_functions):
                continue
            last = max(given[node])
            # Of a Function all of its outputs are asked for.
            count = max(last + 1, len(node._input_metadata) if own else 0)
            gradients = [given[node].get(i) for i in range(count)]
            found = node.apply(*gradients) if own else node(*gradients)
            found = found if isinstance(found, tuple) else (found,)
            for (before, place), x in zip(node.next_functions, found, strict=False):
                if before is not None and x is not None:
                    sums = given[before]
                    sums[place] = x if place not in sums else sums[place] + x


def _transfers(func: Any, devices: set[str], inputs: list[Tensor]) -> bool:
    """True if an operation waits for the device, copies between it and the CPU, or mixes them."""
    if func is torch.ops.aten.fill_.Tensor and inputs[0].device.type == "cuda":
        return False  # A number from the CPU goes with the launch.
    if "cpu" in devices and inputs:
        return True
    if func.overloadpacket.__name__ in ("index", "index_put", "index_put_"):
        # By a mask, whose size is unknown.
        return any(x.dtype in (torch.bool, torch.uint8) for x in inputs[1:])
    return any(tag in func.tags for tag in _READS)


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _device_types(tensors: list[Tensor]) -> set[str]:
    return {x.device.type for x in tensors}


def _event(name: str, tensors: list[Tensor]) -> Event:
    operands = ", ".join(f"{x.device.type}{list(x.shape)}" for x in tensors)
    return Event(name, operands, _where())


def _where() -> str:
    """The innermost line of this repository, but for this file."""
    frame = sys._getframe()
    while frame is not None:
        name = _name_in_repository(frame.f_code.co_filename)
        if name is not None:
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            return f"{name}:{frame.f_lineno}: {line}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


@cache
def _name_in_repository(filename: str) -> str | None:
    path = Path(filename)
    if filename == __file__ or not path.is_relative_to(ROOT) or "site-packages" in path.parts:
        return None
    return str(path.relative_to(ROOT))


@dataclass(frozen=True)
class _Pointer:
    """A tensor as Triton sees it; CUDA's allocator aligns where its memory begins."""

    dtype: torch.dtype
    offset: int

    def data_ptr(self) -> int:
        return self.offset


def _pointer(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return _Pointer(x.dtype, x.storage_offset() * x.element_size())


@cache
def _binder(kernel: Any) -> tuple[list[str], Callable[..., Any]]:
    """The constants of a kernel, and Triton's function from arguments to their specializations."""
    if not isinstance(kernel, JITFunction):  # but the interpreter's
        kernel = JITFunction(kernel.fn, **kernel.kwargs)
    constexprs = [param.name for param in kernel.params if param.is_constexpr]
    backend = make_backend(TARGET)
    return constexprs, create_function_from_signature(kernel.signature, kernel.params, backend)


class _Generator(torch.Generator):
    """Draws on the CPU, and says that it is the device's."""

    def __new__(cls, device: Any = "cpu") -> Any:
        generator = super().__new__(cls, "cpu")
        generator.said = torch.device(device)
        return generator

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.said


@cache
def _adds_in_float32() -> bool:
    """Whether fake tensors know products of half precision that are added up in float32."""
    half = torch.ones(8, 8, dtype=torch.bfloat16)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            acc = half.float()
            torch.addmm(acc, half, half, out_dtype=torch.float32, beta=1.0, out=acc)
    except TypeError:
        return False
    return True


@contextmanager
def _device_guard() -> Iterator[None]:
    """Has torch use its no-op guard of CUDA devices, as its CUDA builds do where there is no GPU.

    Indexing enters the guard of its tensors' device, and a CPU build has none for CUDA: it gets a
    table of functions that return 0, and is left without, as for a guard autograd starts threads.
    """
    if torch.backends.cuda.is_built():
        torch._C._ensureCUDADeviceGuardSet()
        yield
        return
    cuda, name = 1, "DeviceGuardImplRegistrarC1ENS_10DeviceTypeEPKNS0_24DeviceGuardImplInterfaceE"
    try:
        register = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libc10.so"))[
            f"_ZN3c104impl24{name}"
        ]
        ensure_set = torch._C._ensureCUDADeviceGuardSet
    except (OSError, AttributeError) as error:
        pytest.skip(f"no way to give torch {torch.__version__} a guard of CUDA devices: {error}")
    register.argtypes, register.restype = (ctypes.c_void_p, ctypes.c_int8, ctypes.c_void_p), None
    zero = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: 0)
    functions = (ctypes.c_void_p * 64)(*[ctypes.cast(zero, ctypes.c_void_p).value] * 64)
    guard, registrar = ctypes.c_void_p(ctypes.addressof(functions)), ctypes.c_byte()
    register(ctypes.byref(registrar), cuda, ctypes.byref(guard))
    ensure_set()
    try:
        yield
    finally:
        register(ctypes.byref(registrar), cuda, None)

"""CUDA without a GPU: tensors that hold values, and others that are counted.

Tensors of `EmulatedCUDA()` say that they are on CUDA and hold values in memory of the CPU; torch's
operations run on these, products of halves as a GPU rounds them, and Triton's kernels by the
emulator of `tests.ptx`.

Those of `CountedCUDA()` hold tensors on torch's "meta" device: shapes, dtypes and strides alone.

    with CountedCUDA([900]) as gpu:  # rows: the answer to the first read
        out = fused_grpo_loss(...)  # of tensors made in here, with device="cuda"
        out.loss.backward()
    assert len(gpu.transfers) == 1, gpu.transfers

- transfers: reads of the device, copies between it and the CPU, operations that mix their tensors;
  what needs values to go on (a mask as an index, `nonzero`) torch refuses on "meta";
- launches: kernels of Triton, and torch's operations that are neither views nor allocations;
- keys: what Triton specializes a kernel for, by Triton's own function.

To C++ both are on the CPU, so that autograd's engine takes them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, KernelInterface, create_function_from_signature

CUDA = torch.device("cuda", 0)
Answer = Callable[[Tensor], Tensor] | Sequence[int]
# Operations that launch nothing; views are known to torch.
_FREE = {
    "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided",
    "_unsafe_view", "_reshape_alias", "lift_fresh",
}  # fmt: skip


class OnCUDA(Tensor):
    """A tensor that says that it is on CUDA; `held` has its values, on the CPU, or on "meta"."""

    # A subclass of others that has operators of its own is refused as quantised.
    __module__ = "torch.testing._internal.on_cuda"

    held: Tensor
    gpu: EmulatedCUDA

    @staticmethod
    def __new__(cls, held: Tensor, gpu: EmulatedCUDA) -> OnCUDA:
        x = Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(),
            dtype=held.dtype, layout=held.layout, device=torch.device("cpu"),
        )  # fmt: skip
        x.held, x.gpu = held, gpu
        return x

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        gpu = next(x.gpu for x in _tensors((args, kwargs)) if isinstance(x, OnCUDA))
        return gpu.__torch_dispatch__(func, types, args, kwargs)

    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    def data_ptr(self) -> int:
        """On "meta" the offset: CUDA's allocator aligns where memory begins."""
        return self.held.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def cpu(self, *_: Any, **__: Any) -> Tensor:
        return _FromCUDA.apply(self)

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        places = [x for x in (*args, *kwargs.values()) if isinstance(x, (str, torch.device))]
        to_cpu = any(torch.device(x).type == "cpu" for x in places)
        return (self.cpu() if to_cpu else super()).to(*args, **kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OnCUDA({self.held!r})"


class _FromCUDA(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: OnCUDA) -> Tensor:
        ctx.gpu = x.gpu
        return x.gpu.read(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return OnCUDA(gradient, ctx.gpu)


class EmulatedCUDA(TorchDispatchMode):
    """Runs what is inside on CUDA tensors that hold values.

    Operations on tensors of both devices are refused, as on a GPU. Needs the driver of `tests.ptx`.

    Args:
        major: compute capability of the GPU, that the library sees.
    """

    holds = torch.device("cpu")

    def __init__(self, major: int = 9) -> None:
        super().__init__()
        self.properties = SimpleNamespace(
            name="NVIDIA H200", total_memory=140 << 30, multi_processor_count=132, major=major,
            minor=0,
        )  # fmt: skip

    def __enter__(self) -> EmulatedCUDA:
        self._patch = patch = pytest.MonkeyPatch()
        patch.setattr(torch.cuda, "get_device_properties", lambda _: self.properties)
        patch.setattr(torch.cuda, "device_of", lambda _: nullcontext())
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr(Tensor, "pin_memory", lambda x, *_: x)
        # To C++ "cuda" is the current device, which a build for CPUs does not know.
        to = Tensor.to
        patch.setattr(Tensor, "to", lambda x, *args, **kwargs: to(x, *_numbered(args), **kwargs))
        patch.setattr(Tensor, "cuda", lambda x, *_: to(x, CUDA))
        # `kernel[grid]` returns what launches the kernel.
        launch = self.launch
        patch.setattr(KernelInterface, "__getitem__", lambda *where: partial(launch, *where))
        # `torch.tensor(values, device=)` makes a tensor on the CPU, and copies it.
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        torch._C._set_only_lift_cpu_tensors(False)
        self._patch.undo()

    def launch(self, kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
        """Launches a kernel of Triton's."""
        assert _all_on_cuda(args, kwargs), f"{kernel}: a tensor on the CPU"
        held, options = tree_map(_held, (args, kwargs))
        kernel.run(*held, grid=grid, warmup=False, **options)

    def read(self, x: OnCUDA) -> Tensor:
        """The values of a tensor, on the CPU."""
        return x.held.clone()

    def mixed(self, name: str, on_cpu: list[Tensor]) -> None:
        """Handles an operation on CUDA tensors and CPU tensors."""
        # Autograd's formulas in C++ make tensors on their operands' device, not on "CUDA".
        in_backward = torch._C._current_graph_task_id() != -1
        copies = name.startswith(("copy_", "_to_copy", "index", "_index"))
        if not copies and not in_backward and any(x.dim() for x in on_cpu):
            raise RuntimeError(f"{name}: tensors on the CPU beside tensors on CUDA")

    def hold(self, x: Any) -> Any:
        return _held(x)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs an operation on the held tensors; what comes of it is where CUDA would have it."""
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        ours = [x for x in inputs if isinstance(x, OnCUDA)]
        name = func.name().removeprefix("aten::")
        on_cuda = bool(ours)
        if kwargs.get("device") is not None:
            # C++ asks for the CPU where its operands are: what leaves CUDA takes `OnCUDA.cpu`.
            on_cuda |= torch.device(kwargs["device"]).type == "cuda"
            kwargs = {**kwargs, "device": self.holds if on_cuda else kwargs["device"]}
        elif name.startswith("copy_") and inputs:
            on_cuda = isinstance(inputs[0], OnCUDA)
        if not (ours or on_cuda):
            out = func(*args, **kwargs)
            if name == "scalar_tensor":
                out.by_formula = True
            return out
        on_cpu = [x for x in inputs if not isinstance(x, OnCUDA) and not hasattr(x, "by_formula")]
        if on_cpu:
            self.mixed(name, on_cpu)
        kwargs.pop("pin_memory", None)
        plain, options = tree_map(self.hold, (args, kwargs))
        if name in ("mm.dtype", "addmm.dtype", "mm.dtype_out", "addmm.dtype_out"):
            out = _half_product(name, list(plain), dict(options))
        else:
            out = func(*plain, **options)
        known = {id(x.held): x for x in ours}

        def placed(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            # Outputs that are inputs, written in place, stay the same objects.
            return known[id(x)] if id(x) in known else OnCUDA(x, self) if on_cuda else x

        return tree_map(placed, out)


class CountedCUDA(EmulatedCUDA):
    """Runs what is inside on CUDA tensors without values, and counts what it asks of a GPU.

    Args:
        answers: to each read in turn, the last of its numbers, where the others are 0; or a
            function that makes all of them.
    """

    holds = torch.device("meta")

    def __init__(self, *answers: Answer, major: int = 9) -> None:
        super().__init__(major)
        self.answers = list(answers)
        self.transfers: list[str] = []
        self.launches: Counter[str] = Counter()
        # (kernel, constants and options of the launch): specializations of the other arguments
        self.keys: dict[tuple[str, str], set[str]] = defaultdict(set)

    def read(self, x: OnCUDA) -> Tensor:
        self.transfers.append(f"read of {list(x.shape)}")
        answer = self.answers.pop(0) if self.answers else ()
        if callable(answer):
            return answer(x.held)
        return torch.tensor([0] * (x.numel() - len(answer)) + [*answer]).view(x.shape)

    def mixed(self, name: str, on_cpu: list[Tensor]) -> None:
        if name != "fill_.Tensor":  # a number from the CPU, which goes with the launch
            self.transfers.append(f"{name} with {on_cpu}")

    def hold(self, x: Any) -> Any:
        return _held(x).to(self.holds) if isinstance(x, Tensor) else x

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        inputs, name = _tensors((args, kwargs)), func.overloadpacket.__name__
        on_cuda = any(isinstance(x, OnCUDA) for x in (*inputs, *_tensors(out)))
        if on_cuda and not func.is_view and name not in _FREE:
            self.launches[func.name().removeprefix("aten::")] += 1
        # A GPU reads the size of the mask; "meta" does not.
        if name == "index_put_" and inputs[1].dtype == torch.bool:
            self.transfers.append(f"{name} by a mask, whose size is unknown")
        return out

    def launch(self, kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
        """Counts a launch, and notes what of its arguments Triton would compile the kernel for."""
        assert _all_on_cuda(args, kwargs), f"{kernel}: a tensor on the CPU"
        per_row = [x for x in _tensors((args, kwargs)) if x.dim() == 1]
        assert all(x.is_contiguous() for x in per_row), f"{kernel}: values that do not lie together"
        self.launches[kernel.__name__] += 1
        constexprs, bind = _binder(kernel)
        params, specialization, options = bind(*args, **kwargs)
        kinds = dict(zip(params, specialization, strict=True))
        constants = {name: params[name] for name in constexprs}
        key = {name: kind for name, kind in kinds.items() if name not in constants}
        self.keys[kernel.__name__, str(constants | options)].add(str(key))


def _numbered(args: tuple[Any, ...]) -> Iterator[Any]:
    for x in args:
        yield CUDA if isinstance(x, (str, torch.device)) and torch.device(x).type == "cuda" else x


def _all_on_cuda(*arguments: Any) -> bool:
    return all(isinstance(x, OnCUDA) for x in _tensors(arguments))


def _held(x: Any) -> Any:
    return x.held if isinstance(x, OnCUDA) else x


def _half_product(name: str, args: list[Any], options: dict[str, Any]) -> Tensor:
    """Products of halves that are added up in float32, which a CPU has not."""
    out = options.pop("out", None)
    dtype = next((a for a in args if isinstance(a, torch.dtype)), options.get("out_dtype"))
    tensors = [a.float() for a in args if isinstance(a, Tensor)]
    factors = {k: options[k] for k in ("alpha", "beta") if k in options}
    result = (torch.mm if name.startswith("mm") else torch.addmm)(*tensors, **factors).to(dtype)
    return result if out is None else out.copy_(result)


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


@cache
def _binder(kernel: Any) -> tuple[list[str], Callable[..., Any]]:
    """The constants of a kernel, and Triton's function from arguments to their specializations."""
    if not isinstance(kernel, JITFunction):  # but the interpreter's
        kernel = JITFunction(kernel.fn, **kernel.kwargs)
    constexprs = [param.name for param in kernel.params if param.is_constexpr]
    backend = make_backend(GPUTarget("cuda", 90, 32))
    return constexprs, create_function_from_signature(kernel.signature, kernel.params, backend)

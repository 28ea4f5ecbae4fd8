"""CUDA without a GPU: tensors that hold values, and others that are counted.

Tensors of `EmulatedCUDA()` say that they are on CUDA and hold values on the CPU, on which torch's
operations run, and Triton's kernels in the emulator of `tests.ptx`. To C++ they are on the CPU, so
that autograd's engine takes them. Those of `CountedCUDA()` hold tensors on "meta":

    with CountedCUDA([900]) as gpu:  # rows: the answer to the first read
        out = fused_grpo_loss(...)  # of tensors made in here, with device="cuda"
        out.loss.backward()
    assert len(gpu.transfers) == 1, gpu.transfers
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CUDA = torch.device("cuda", 0)
Answer = Callable[[Tensor], Tensor] | Sequence[int]


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
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        gpu = next(x.gpu for x in _tensors((args, kwargs)) if isinstance(x, OnCUDA))
        return gpu.__torch_dispatch__(func, types, args, kwargs)

    device = property(lambda self: self.gpu.device)  # type: ignore[assignment]
    is_cuda = property(lambda self: self.device.type == "cuda")  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    def data_ptr(self) -> int:
        """On "meta" the offset: CUDA's allocator aligns where memory begins."""
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def cpu(self, *_: Any, **__: Any) -> Tensor:
        return _FromCUDA.apply(self)

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        places = [x for x in (*args, *kwargs.values()) if isinstance(x, (str, torch.device))]
        to_cpu = any(torch.device(x).type == "cpu" for x in places)
        return (self.cpu() if to_cpu else super()).to(*args, **kwargs)


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

    Operations on tensors of both devices are refused, as on a GPU; Triton's kernels need the driver
    of `tests.ptx`. `major`: the compute capability.
    """

    holds, device = torch.device("cpu"), CUDA

    def __init__(self, major: int = 9) -> None:
        super().__init__()
        sizes = {"total_memory": 140 << 30, "multi_processor_count": 132}
        self.properties = SimpleNamespace(name="NVIDIA H200", major=major, minor=0, **sizes)

    def __enter__(self) -> EmulatedCUDA:
        self._patch = patch = pytest.MonkeyPatch()
        patch.setattr(torch.cuda, "get_device_properties", lambda _: self.properties)
        patch.setattr(torch.cuda, "device_of", lambda _: nullcontext())
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr(Tensor, "pin_memory", lambda x, *_: x)
        # To C++ "cuda" is the current device, which a build for CPUs does not know.
        to = Tensor.to
        patch.setattr(Tensor, "to", lambda x, *places, **how: to(x, *map(_numbered, places), **how))
        patch.setattr(Tensor, "cuda", lambda x, *_: to(x, CUDA))
        with suppress(ImportError):  # macOS and Windows have no Triton
            from triton.runtime.jit import KernelInterface

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
        inputs = _tensors((args, kwargs))
        assert all(isinstance(x, OnCUDA) for x in inputs), f"{kernel}: a tensor on the CPU"
        args, kwargs = tree_map(self._held, (args, kwargs))
        self.run(kernel, grid, *args, **kwargs)

    def run(self, kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
        kernel.run(*args, grid=grid, warmup=False, **kwargs)

    def _held(self, x: Any) -> Any:
        """Returns a tensor's values where those of CUDA are, also of a tensor on the CPU."""
        x = x.held if isinstance(x, OnCUDA) else x
        return x.to(self.holds) if isinstance(x, Tensor) else x

    def read(self, x: OnCUDA) -> Tensor:
        return x.held.clone()

    def mixed(self, name: str, on_cpu: list[Tensor]) -> None:
        # Autograd's formulas in C++ make tensors on their operands' device, not on "CUDA".
        in_backward = torch._C._current_graph_task_id() != -1
        copies = name.startswith(("copy_", "_to_copy", "index", "_index"))
        if not copies and not in_backward and any(x.dim() for x in on_cpu):
            raise RuntimeError(f"{name}: tensors on the CPU beside tensors on CUDA")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Runs an operation on the held tensors; what comes of it is where CUDA would have it."""
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        ours = [x for x in inputs if isinstance(x, OnCUDA)]
        name, on_cuda = func.name().removeprefix("aten::"), bool(ours)
        if kwargs.get("device") is not None:
            # C++ asks for the CPU where its operands are: what leaves CUDA takes `OnCUDA.cpu`.
            on_cuda |= torch.device(kwargs["device"]).type == self.device.type
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
        plain, options = tree_map(self._held, (args, kwargs))
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


class EmulatedMPS(EmulatedCUDA):
    """Runs what is inside on tensors of an Apple GPU, which has no float64."""

    device = torch.device("mps", 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if any(isinstance(x, OnCUDA) and x.dtype == torch.float64 for x in _tensors(out)):
            raise TypeError(f"{func}: MPS has no float64")
        return out


class CountedCUDA(EmulatedCUDA):
    """Runs what is inside on CUDA tensors without values, and counts what it asks of a GPU.

    Args:
        answers: to each read, its last numbers, where the others are 0; or a function that makes
            all of them.
    """

    # Besides views, which torch knows, operations that launch nothing.
    free = (
        "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided",
        "_unsafe_view", "_reshape_alias", "lift_fresh",
    )  # fmt: skip
    holds = torch.device("meta")

    def __init__(self, *answers: Answer, major: int = 9) -> None:
        super().__init__(major)
        self.answers = list(answers)
        self.transfers: list[str] = []
        self.launches: Counter[str] = Counter()
        self.kernels: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def read(self, x: OnCUDA) -> Tensor:
        self.transfers.append(f"read of {list(x.shape)}")
        answer = self.answers.pop(0) if self.answers else ()
        if callable(answer):
            return answer(x.held)
        return torch.tensor([0] * (x.numel() - len(answer)) + [*answer]).view(x.shape)

    def mixed(self, name: str, on_cpu: list[Tensor]) -> None:
        if name != "fill_.Tensor":  # a number goes with the launch
            self.transfers.append(f"{name} with {on_cpu}")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        inputs, name = _tensors((args, kwargs)), func.overloadpacket.__name__
        on_cuda = any(isinstance(x, OnCUDA) for x in (*inputs, *_tensors(out)))
        if on_cuda and not func.is_view and name not in self.free:
            self.launches[func.name().removeprefix("aten::")] += 1
        # A GPU reads the size of the mask; "meta" does not.
        if name == "index_put_" and inputs[1].dtype == torch.bool:
            self.transfers.append(f"{name} by a mask, whose size is unknown")
        return out

    def run(self, kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
        per_row = [x for x in _tensors((args, kwargs)) if x.dim() == 1]
        assert all(x.is_contiguous() for x in per_row), f"{kernel}: values that do not lie together"
        self.launches[kernel.__name__] += 1
        self.kernels.append((kernel, args, kwargs))


def _numbered(x: Any) -> Any:
    kind = torch.device(x).type if isinstance(x, (str, torch.device)) else None
    return torch.device(kind, 0) if kind in ("cuda", "mps") else x


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

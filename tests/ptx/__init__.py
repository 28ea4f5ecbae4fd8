"""Runs the PTX that Triton emits, on a CPU, with the checks of a compute-sanitizer.

    from tests.ptx import EmulatedDriver
    driver = EmulatedDriver.activate()      # before kernels are defined
    kernel[grid](cpu_tensor, ...)           # compiled by Triton for sm_90, executed from its PTX

`parse` reads PTX, `decode` and `operations` say what instructions do, `machine` executes them on
numpy arrays with one element per thread, `memory` and `races` have the tensors and what is known of
each element, `copies` those to shared memory that are waited for later, `tensor_cores` the products
of a warp's fragments, `counters` what a profiler counts, `driver` is what Triton asks for, `plugin`
is pytest's.
"""

from .counters import Counts
from .driver import EmulatedDriver, SanitizerError, Settings, mark, mark_allocations
from .memory import Finding

__all__ = [
    "Counts", "EmulatedDriver", "Finding", "SanitizerError", "Settings", "mark", "mark_allocations",
]  # fmt: skip

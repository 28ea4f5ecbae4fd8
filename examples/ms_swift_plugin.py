"""Plug-in that gives ms-swift this library's loss, with `--use_liger_kernel true`.

    swift rlhf --rlhf_type grpo --use_liger_kernel true --external_plugins ms_swift_plugin.py ...

Its trainer then constructs this library's loss where it would have constructed Liger's.
"""

from grpo_kernels.integrations.liger import patch_liger

patch = patch_liger()

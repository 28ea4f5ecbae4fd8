"""Plug-in that verl loads in each of its processes, by this package's entry point `verl.plugins`.

verl logs a plug-in's errors at its lowest level; here they are warnings.
"""

import warnings

try:
    from .verl import patch_verl

    if not patch_verl.active():
        patch_verl()
except Exception as error:
    warnings.warn(f"verl has no backend grpo_kernels: {error}", stacklevel=2)

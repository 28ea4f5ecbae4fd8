"""The versions of TRL that are supported, checked before TRL is imported."""

from __future__ import annotations

import warnings
from importlib import metadata

from ...base.checks import version_numbers
from ..private import TESTED_VERSIONS

OLDEST, NEWEST = TESTED_VERSIONS["trl"].split(" to ")
INSTALL = f"pip install 'trl>={OLDEST}'"
_FROM = "grpo_kernels.integrations.trl"


def check_version(installed: str) -> None:
    """Raises ImportError for a version that is too old, warns for one newer than tested."""
    if version_numbers(installed) < version_numbers(OLDEST):
        raise ImportError(f"{_FROM}: expected TRL {OLDEST} or newer; got {installed}: {INSTALL}")
    if version_numbers(installed) > version_numbers(NEWEST):
        warnings.warn(
            f"{_FROM}: expected TRL {OLDEST} to {NEWEST}, the tested versions; got {installed}. "
            "Its loss is compared with ours in some micro-batches; training stops if they differ",
            stacklevel=4,
        )


try:
    check_version(metadata.version("trl"))
except metadata.PackageNotFoundError as error:
    raise ImportError(f"{_FROM}: expected TRL {OLDEST} or newer; got none: {INSTALL}") from error

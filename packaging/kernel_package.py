"""Lays the core out as Hugging Face's `kernels` loads it, beside the source of `kernel-builder`.

    python packaging/kernel_package.py [FOLDER]           # build/kernel, if none is named

    from kernels import get_local_kernel
    grpo_kernels = get_local_kernel(Path("build/kernel"))

A folder of an earlier run is replaced; one with anything else in it is refused.
`build/torch-<backend>/` is what is loaded; `kernel-builder` makes the same of `build.toml`,
`CARD.md` and `torch-ext/`. The core needs torch and Triton alone, and imports itself relatively, so
that it works under any name. Trainer and integrations, which need more, are left out.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "grpo_kernels"
LEFT_OUT = ("integrations", "training")
# Names in the folder, in the order in which they are written.
WRITTEN = ("build.toml", "LICENSE", "CARD.md", "build", "torch-ext")
BACKENDS = ("cpu", "cuda", "rocm")  # those that the kernels are compiled for
VERSION = 0  # the hub's number for calls that may still change
CARD = """\
---
library_name: kernels
license: mit
---
# grpo_kernels

The GRPO loss and its gradients from hidden states and the LM head, without the logits. An alpha:
calls may change, and no GPU has run it yet.

```python
{code}```

From a publisher that the hub does not list as trusted, `get_kernel` also needs
`trust_remote_code=True`. Python 3.10 or newer, PyTorch 2.10 or newer and, on a GPU, Triton.
"""


def files() -> list[Path]:
    """Returns the core's files, relative to the package: all that a wheel has of it."""
    paths = (path.relative_to(PACKAGE) for path in PACKAGE.rglob("*") if path.is_file())
    core = (path for path in paths if path.parts[0] not in LEFT_OUT)
    return sorted(path for path in core if path.suffix != ".pyc")


def copy_to(folder: Path) -> None:
    """Copies the core into a folder."""
    for path in files():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(PACKAGE / path, folder / path)


def lay_out(folder: Path) -> None:
    """Writes the variant of each backend, and what `kernel-builder` makes them of.

    Raises:
        ValueError: the folder has something that another run of this did not write.
    """
    there = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    others = there if "build.toml" not in there else sorted(set(there) - set(WRITTEN))
    if others:
        raise ValueError(
            f"FOLDER: expected a new folder, or one of an earlier run; {folder} has "
            f"{', '.join(others[:5])}"
        )
    for path in (folder / name for name in there):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    extensions = sorted({path.suffix[1:] for path in files()})
    (folder / "build.toml").write_text(
        f'[general]\nname = "grpo-kernels"\nversion = {VERSION}\nedition = 5\nlicense = "MIT"\n'
        f'backends = {json.dumps(BACKENDS)}\n\n[general.hub]\nrepo-id = "OWNER/grpo-kernels"\n\n'
        f"[torch-noarch]\npyext = {json.dumps(extensions)}\n"
    )
    shutil.copyfile(ROOT / "LICENSE", folder / "LICENSE")
    (folder / "CARD.md").write_text(CARD.format(code=_code()))
    _write_variants(folder)
    copy_to(folder / "torch-ext/grpo_kernels")


def _write_variants(folder: Path) -> None:
    """Writes what is loaded: the core for each backend, with its metadata."""
    hashes = {path: hashlib.sha256((PACKAGE / path).read_bytes()) for path in files()}
    digest = {path.as_posix(): base64.b64encode(h.digest()).decode() for path, h in hashes.items()}
    unique = hashlib.sha256(json.dumps(digest).encode()).hexdigest()[:8]
    for backend in BACKENDS:
        variant = folder / f"build/torch-{backend}"
        copy_to(variant)
        metadata = {
            "id": f"_grpo_kernels_{backend}_{unique}",
            "name": "grpo-kernels",
            "version": VERSION,
            "license": "MIT",
            "python-depends": [],
            "backend": {"type": backend},
            "digest": {"algorithm": "sha256", "files": digest},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def _code() -> str:
    """Returns the guide's first example, with the package loaded from the hub."""
    guide = (ROOT / "docs" / "guide.md").read_text()
    first = re.search(r"```python\n(.*?)```", guide, re.DOTALL)
    assert first is not None
    (names,) = re.findall(r"^from grpo_kernels import (.*)$", first[1], re.MULTILINE)
    loaded = [
        "from kernels import get_kernel\n",
        'grpo_kernels = get_kernel("{{ repo_id }}", version={{ version }})',
        *(f"{name} = grpo_kernels.{name}" for name in names.split(", ")),
    ]
    return first[1].replace(f"from grpo_kernels import {names}", "\n".join(loaded))


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "build/kernel")
    try:
        lay_out(target)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(f"{len(files())} files for {', '.join(BACKENDS)} in {target}")

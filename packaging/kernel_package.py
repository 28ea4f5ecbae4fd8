"""Lays the core out as Hugging Face's `kernels` loads it, in a folder that could be uploaded.

    python packaging/kernel_package.py [FOLDER]           # build/kernel, if none is named

    from kernels import get_local_kernel
    grpo_kernels = get_local_kernel(Path("build/kernel"))

The core needs torch and Triton alone, and imports itself relatively, so that it works under any
name. Trainer and integrations, which need more, are left out.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "grpo_kernels"
LEFT_OUT = ("integrations", "training")
BACKENDS = ("cpu", "cuda", "rocm", "xpu")
VERSION = 1  # of what the hub serves, which goes up where calls change


def files() -> list[Path]:
    """The core's modules, relative to the package."""
    found = (path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
    return sorted(path for path in found if path.parts[0] not in LEFT_OUT)


def lay_out(folder: Path) -> None:
    """Writes `build/torch-<backend>/` for each backend, `build.toml`, the card and the license."""
    shutil.rmtree(folder, ignore_errors=True)
    digest = hashlib.sha256(b"".join((PACKAGE / path).read_bytes() for path in files()))
    for backend in BACKENDS:
        variant = folder / f"build/torch-{backend}"
        for path in files():
            (variant / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(PACKAGE / path, variant / path)
        metadata = {
            "id": f"_grpo_kernels_{backend}_{digest.hexdigest()[:8]}",
            "name": "grpo-kernels",
            "version": VERSION,
            "license": "MIT",
            "python-depends": [],
            "backend": {"type": backend},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    (folder / "build.toml").write_text(
        f'[general]\nname = "grpo-kernels"\nversion = {VERSION}\nlicense = "MIT"\n'
        f"backends = {json.dumps(BACKENDS)}\n\n[torch-noarch]\n"
    )
    shutil.copyfile(ROOT / "LICENSE", folder / "LICENSE")
    quickstart = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert quickstart is not None
    code = quickstart[1].replace(
        "from grpo_kernels import fused_grpo_loss, group_advantages\n",
        'from kernels import get_kernel\n\ngrpo_kernels = get_kernel("OWNER/grpo-kernels", '
        f"version={VERSION})\nfused_grpo_loss = grpo_kernels.fused_grpo_loss\n"
        "group_advantages = grpo_kernels.group_advantages\n",
    )
    (folder / "README.md").write_text(
        "---\nlicense: mit\ntags: [kernels]\n---\n# grpo_kernels\n\nThe GRPO loss and its gradients"
        f" from hidden states and the LM head, without the logits.\n\n```python\n{code}```\n"
    )


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "build/kernel")
    lay_out(target)
    print(f"{len(files())} modules for {', '.join(BACKENDS)} in {target}")

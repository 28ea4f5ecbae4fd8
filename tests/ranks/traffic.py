"""Records what the ranks send each other."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Traffic(TorchDispatchMode):
    """Notes each collective: its name, and the bytes of its largest tensor."""

    def __init__(self):
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            sizes = [x.nbytes for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
            if sizes:
                self.seen.append((func.name().split("::")[1].replace("_", ""), max(sizes)))
        return func(*args, **(kwargs or {}))

"""Private parts of other packages: they are there in this version, and named where they are not."""

import re
from importlib import import_module
from types import SimpleNamespace

import peft
import pytest
import torch

from grpo_kernels.base import autograd
from grpo_kernels.base.checks import version_numbers
from grpo_kernels.integrations import private

VARIANTS = "use_dora" if version_numbers(peft.__version__) < (0, 16) else "lora_variant"


def test_views_share_a_storage_without_memory():
    with private.without_memory():
        x, other = torch.empty(1 << 20, 1 << 20), torch.empty(3)
    storages = {y.untyped_storage() for y in (x, x[1:], x.T, other)}
    assert sum(storage.nbytes() for storage in storages) == (4 << 40) + 12


@pytest.mark.parametrize(
    ("package", "function", "without", "name"),
    (
        ("torch", "forget_forward", {"reducer": object()}, "reducer._reset_state"),
        ("torch", "is_unit_within", {"_get_fsdp_state": SimpleNamespace}, "_is_root"),
        ("transformers", "is_recurrent", {}, "_is_stateful"),
        ("peft", "variants_of_lora", {}, VARIANTS),
    ),
)
def test_a_version_without_it_is_named(package, function, without, name):
    message = (
        f"{package}: expected {private.TESTED_VERSIONS[package]}, which have "
        f"SimpleNamespace.{name}; got {import_module(package).__version__}"
    )
    with pytest.raises(RuntimeError, match=re.escape(message)):
        getattr(private, function)(SimpleNamespace(**without))


def test_a_torch_that_does_not_tell_of_graphs(monkeypatch):
    monkeypatch.delattr(torch._C._autograd, "_get_current_graph_task_keep_graph")
    assert autograd.graph_is_retained()  # copies, which are right and take more memory

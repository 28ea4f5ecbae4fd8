"""Runs before every test: Triton on the CPU, and no memory that happens to be zero.

The tiers and how to see the tests fail: `docs/testing.md`. Functions import torch, as the process
that only hands out tests to pytest-xdist's workers starts two seconds earlier without it.
"""

import contextlib
import gc
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("tests.helpers", "tests.refusals")
HERE = Path(__file__).parent

# A machine with a GPU may have no hypothesis; `-m gpu` does not need it.
with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    # The poisoned-memory fixture is the same for every example.
    shared = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}
    settings.register_profile("fast", derandomize=True, max_examples=40, **shared)
    settings.register_profile("full", derandomize=True, max_examples=300, **shared)
    settings.register_profile("fuzz", max_examples=2000, print_blob=True, **shared)
    settings.load_profile("fast")


def pytest_configure(config: pytest.Config) -> None:
    """`pytest -m gpu` runs the kernels as compiled; without it they run in the interpreter.

    Triton decides when the kernels are defined, so before the test modules are imported.
    """
    if config.option.markexpr != "gpu":
        os.environ["TRITON_INTERPRET"] = "1"
    if getattr(config.option, "numprocesses", None):  # this process hands out tests
        return
    import torch

    # `with torch.device` keeps the functions that it changes as they are on its first use, which
    # must not be those of `poisoned_memory`: a model on "meta" then takes real memory.
    with torch.device("meta"):
        torch.empty(0)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A machine with a GPU may lack what the other modules import; `ptx/` needs its plugin."""
    if collection_path.name == "ptx" and not config.pluginmanager.has_plugin("tests.ptx.plugin"):
        return True
    module = config.option.markexpr == "gpu" and collection_path.suffix == ".py"
    return True if module and "mark.gpu" not in collection_path.read_text() else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what this machine cannot run, and marks slow tests.

    Slow are those in folders and, with many examples, those that hypothesis draws.
    """
    import torch

    from tests.helpers.tiers import INTERPRETED

    emulated = config.getoption("--ptx-cuda", False)
    gpu_selected = "gpu" in config.option.markexpr.split()
    if gpu_selected and not (emulated or torch.cuda.is_available()):
        raise pytest.UsageError("-m gpu: no CUDA device")
    elsewhere = {"gpu": not gpu_selected, "real_gpu": emulated, "compiled": INTERPRETED}
    absent = {name for name, holds in elsewhere.items() if holds}
    config.hook.pytest_deselected(items=[x for x in items if absent & _marks(x)])
    items[:] = [x for x in items if not absent & _marks(x)]
    many = config.getoption("--hypothesis-profile", None) in ("full", "fuzz")
    for item in items:
        drawn = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
        if item.path.parent not in (HERE, HERE / "ptx") or (many and drawn):
            item.add_marker("slow")


def _marks(item: pytest.Item) -> set[str]:
    return {mark.name for mark in item.iter_markers()}


def pytest_collection_finish() -> None:
    """Freezes imported modules: trainers collect garbage often, and need not look at those."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised floats are NaN, so that an element nobody wrote fails the test."""
    import torch

    def poison(allocate):
        def allocate_poisoned(*args, **kwargs):
            x = allocate(*args, **kwargs)
            if x.is_floating_point():
                x.detach().fill_(float("nan"))
            return x

        return allocate_poisoned

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))


@pytest.fixture(autouse=True)
def emulated_cuda(request: pytest.FixtureRequest) -> Iterator[None]:
    """With `-p tests.ptx.plugin --ptx-cuda`: tensors on CUDA that hold values."""
    if not request.config.getoption("--ptx-cuda", False):
        yield
        return
    from tests.helpers.fake_cuda import EmulatedCUDA

    with EmulatedCUDA():
        yield


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Any]:
    """A process group of this process alone."""
    import torch.distributed as dist

    made = not dist.is_initialized()
    if made:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield dist.group.WORLD
    if made:
        dist.destroy_process_group()


@pytest.fixture
def real_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Model code of others may well rely on what torch.empty returns being finite."""
    monkeypatch.undo()


@pytest.fixture
def own_precision() -> Iterator[None]:
    """Lets a test choose accelerate's precision, which the first of a process chooses for all."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a language model of a few thousand parameters, and its tokenizer."""
    from tests.helpers.tiny_models import make_model, make_tokenizer

    folder = tmp_path_factory.mktemp("tiny")
    make_model("llama").save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def make(tiny_model: Path, tmp_path: Path):
    """Makes a trainer of the tiny model in a folder of the test: `make(name="a", steps=1)`."""
    from tests.helpers.trainer_runs import trainer_with

    return partial(trainer_with, tiny_model, tmp_path)


@pytest.fixture(scope="session")
def undisturbed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory):
    """The rows and the weights of a run of `STEPS` without a fault."""
    from tests.helpers.trainer_runs import STEPS, rows_of, trainer_with, weights_of

    trainer = trainer_with(tiny_model, tmp_path_factory.mktemp("undisturbed"), **STEPS)
    return rows_of(trainer.train()), weights_of(trainer)

"""Configures what pytest-benchmark stores and prints."""

from typing import Any

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    cpu = machine_info.get("cpu", {})
    kept = {name: machine_info.get(name) for name in ("system", "machine", "python_version")}
    machine_info.clear()
    machine_info |= kept | {"cpu": {name: cpu.get(name) for name in ("brand_raw", "count")}}


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_scale_unit(
    config: Any, unit: str, benchmarks: Any, best: Any, worst: Any, sort: Any
) -> tuple[str, float] | None:
    return ("eager time", 1.0) if unit == "seconds" else ("", 1.0)

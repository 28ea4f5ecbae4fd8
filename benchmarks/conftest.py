"""Options, header and summary of `pytest benchmarks`."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest

from benchmarks.contenders import CONTENDERS
from benchmarks.measure import add_device_and_shape, header, table

COLUMNS = ["median", "min", "max", "rounds"]
GROUPS = pytest.StashKey[list[Any]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rounds", type=int, default=3, help="of each contender (default: 3)")
    add_device_and_shape(parser.addoption, "--shape")


def pytest_configure(config: pytest.Config) -> None:
    # Threads that spin at barriers take four times as long beside another process.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    if getattr(config.option, "benchmark_columns", None) is None:
        config.option.benchmark_columns = COLUMNS


def pytest_report_header(config: pytest.Config) -> str:
    values = header(config.getoption("--device"))
    values |= values.pop("peers")
    return " | ".join(f"{name}: {value}" for name, value in values.items())


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(
    config: pytest.Config, machine_info: dict[str, Any]
) -> None:
    values = header(config.getoption("--device"))
    del values["commit"]  # which is in `commit_info`; here, runs of two commits would not compare
    machine_info.update(values)


@pytest.hookimpl(optionalhook=True, wrapper=True)
def pytest_benchmark_group_stats(config: pytest.Config) -> Generator[None, list[Any], list[Any]]:
    groups = yield
    config.stash[GROUPS] = groups
    return groups


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Prints time and memory beside eager's and the bare GEMMs, and the largest error."""
    for name, rows in config.stash.get(GROUPS, []):
        # Rows of the run compared with have a path.
        by_name = {x["extra_info"].get("contender"): x for x in rows if x["path"] is None}
        lines = [row_of(by_name[x]) for x in CONTENDERS if x in by_name]
        for line in (f"\n{name}", *table(lines, max(x["limit"] for x in lines))):
            terminalreporter.write_line(line)


def row_of(stats: dict[str, Any]) -> dict[str, Any]:
    """Returns what `table` takes of a test's statistics."""
    info = stats["extra_info"]
    return {
        "name": info["contender"], "limit": info["limit"], **info["errors"],
        "seconds": [stats["min"], stats["median"], stats["max"]],
        "floor_seconds": [info["floor_seconds"]], "extra_bytes": info["peak_bytes"],
    }  # fmt: skip

"""pytest -p tests.ptx.plugin: kernels run as the PTX of a GPU, checked, instead of interpreted.

Tests are unchanged: they see TRITON_INTERPRET, which is hidden from Triton.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from . import EmulatedDriver, mark_allocations


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ptx")
    group.addoption("--ptx-arch", type=int, default=90, help="compute capability to compile for")
    group.addoption("--ptx-error", type=float, default=0.0, help="error of approximations, 0 to 1")
    group.addoption("--ptx-order", default="together", help="of warps: rising, falling or a seed")
    group.addoption("--ptx-collect", action="store_true", help="list faults at the end, fail none")
    group.addoption("--ptx-cuda", action="store_true", help="CUDA tensors that hold values")
    group.addoption("--ptx-no-races", action="store_true", help="do not look for races")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    order = config.getoption("--ptx-order")
    EmulatedDriver.activate(
        config.getoption("--ptx-arch"),
        error=config.getoption("--ptx-error"),
        order=int(order) if order.isdigit() else order,
        strict=not config.getoption("--ptx-collect"),
        races=not config.getoption("--ptx-no-races"),
    )


@pytest.fixture(autouse=True)
def marked_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that torch allocates without filling it holds a pattern that loads recognise."""
    if "poisoned_memory" in request.fixturenames:
        request.getfixturevalue("poisoned_memory")
    mark_allocations(monkeypatch.setattr)


@pytest.fixture(autouse=True)
def no_findings() -> Iterator[None]:
    """Fails a test with findings, even if it caught the error of the launch."""
    settings = EmulatedDriver.settings
    if settings.strict:
        settings.findings.clear()
    yield
    assert not (settings.strict and settings.findings), "\n".join(map(str, settings.findings))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    s = EmulatedDriver.settings
    kinds = Counter((f.kind, f.kernel, f.place) for f in s.findings)
    for (kind, kernel, place), count in kinds.most_common():
        terminalreporter.write_line(f"{count} launches: {kind} in {kernel} at {place}")
    if s.launches:
        rate = s.executed / max(s.seconds, 1e-9) / 1e6
        terminalreporter.write_line(
            f"emulated: {sum(s.launches.values())} launches of {len(s.launches)} kernels, "
            f"{s.seconds:.1f} s, {s.executed / 1e9:.2f} G instructions x threads, {rate:.0f} M/s; "
            f"{len(s.opcodes)} opcodes"
        )

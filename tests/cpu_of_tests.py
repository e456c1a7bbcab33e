"""A pytest plugin that prints which tests cost the most CPU time, and what a whole run costs.

    python -m pytest -p tests.cpu_of_tests --dearest 30 tests/unit

CPU time, not wall time, since tests run beside each other. It counts the process that runs the test
and all its child processes, so a server that tests share counts where it works, and its start
counts for the first test that needs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest

_PROPERTY = "CPU seconds"
_seconds: Counter[str] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that says how many rows to print."""
    parser.addoption("--dearest", type=int, default=30, help="tests to print by CPU time")


def _cpu_seconds() -> float:
    """Return the CPU time of this process and its descendants, those that have ended too."""
    own = psutil.Process()
    total = 0.0
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.Error):
            total += sum(process.cpu_times()[:4])
    return total


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Remember when the test began, for its last report."""
    began = _cpu_seconds()
    item.config.stash[_began] = began
    return (yield)


_began = pytest.StashKey[float]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Iterator[None]:
    """Put the test's CPU time into its last report, which xdist hands on to the main process."""
    report: Any = yield
    if report.when == "teardown":
        spent = _cpu_seconds() - item.config.stash[_began]
        report.user_properties.append((_PROPERTY, spent))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect the figures, in the main process."""
    for name, value in report.user_properties:
        if name == _PROPERTY:
            _seconds[report.nodeid] += float(value)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the dearest tests and the sum by folder."""
    rows = config.getoption("--dearest")
    terminalreporter.section("CPU seconds")
    for test, spent in _seconds.most_common(rows):
        terminalreporter.write_line(f"{spent:8.2f}  {test}")
    folders: Counter[str] = Counter()
    for test, spent in _seconds.items():
        folders[test.partition("::")[0]] += spent
    terminalreporter.section("CPU seconds by file")
    for file, spent in folders.most_common(rows):
        terminalreporter.write_line(f"{spent:8.2f}  {file}")
    terminalreporter.write_line(f"{sum(_seconds.values()):8.2f}  all {len(_seconds)} tests")

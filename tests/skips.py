"""A test that is skipped for a reason nobody listed fails the run: what is silently not tried is not tested.

A plugin of pytest that conftest.py loads. Expected failures count as skipped too.
"""

from __future__ import annotations

import re

import pytest

ALLOWED = {
    "install clang": "the kernels are compiled by a second compiler where there is one",
    "install a cross compiler and an emulator: .*": "the kernels for ARM run emulated where that is installed",
    "this processor has no .*": "the kernels' variants ask for instructions that the machine must have",
    "other systems tell no more than ru_maxrss": "Linux's account of memory",
    "of glibc": "what its malloc gives back",
    "counts pages as Linux does": "Linux's account of page faults",
}
"""Pattern of the whole reason -> why such a test may be skipped."""


class UnlistedSkips:
    """Collects skipped tests and modules, under pytest-xdist in the process that starts the workers."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def _note(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        if not report.skipped:
            return
        at = report.longrepr
        reason = getattr(report, "wasxfail", None) or (str(at[2]) if isinstance(at, tuple) else str(at))
        reason = reason.removeprefix("Skipped: ")
        if not any(re.fullmatch(pattern, reason) for pattern in ALLOWED):
            self.found.append(f"{report.nodeid}: {reason}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.found and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.found:
            terminalreporter.section("skipped for a reason that tests/skips.py does not list", red=True)
            for line in self.found:
                terminalreporter.line(line)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(UnlistedSkips())

"""Reports skips with their reason. With KVCACHEPOOL_REQUIRE=all only those of allowed-skips.txt are accepted."""

from __future__ import annotations

import os
from collections.abc import Generator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ALLOWED = [
    line.strip()
    for line in (Path(__file__).parent / "allowed-skips.txt").read_text().splitlines()
    if line.strip() and not line.startswith("#")
]


def _refused(nodeid: str) -> bool:
    return os.environ.get("KVCACHEPOOL_REQUIRE") == "all" and not any(fnmatch(nodeid.lower(), p) for p in ALLOWED)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.CallInfo, None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.skipped and not hasattr(report, "wasxfail") and _refused(item.nodeid):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"skipped, but tests/allowed-skips.txt does not name it: {reason}"


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.skipped and _refused(collector.nodeid):
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid} is skipped whole, but tests/allowed-skips.txt does not name it"

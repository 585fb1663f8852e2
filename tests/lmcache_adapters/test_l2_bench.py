"""The benchmark of L2 adapters (`bench/lmcache_l2.py`) runs LMCache's command, and fails if objects were lost."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

pytest.importorskip("lmcache")

from bench import lmcache_l2
from bench.lmcache_l2 import OPERATIONS, OTHERS, Setting, rates, rows

SETTING = Setting("tiny", 4, 2, 256, rounds=2, memory_mib=64)


def report(**changes: Any) -> dict[str, Any]:
    """What the command writes after 2 rounds of 8 objects."""
    operations = [
        {"operation": name.title(), "total_success": 16, "rounds_timed_out": 0, "duration_p50_ms": 2.0, **changes}
        for name in OPERATIONS
    ]
    return {"metrics": {"config": {"num_keys": 4}, **{f"op_{at}": each for at, each in enumerate(operations)}}}


def test_ours_is_measured_by_lmcaches_command() -> None:
    measured = lmcache_l2.run("ours", SETTING)
    assert set(measured) == set(OPERATIONS)
    assert all(rate > 0 for rate in measured.values())


def test_rates_are_those_of_the_median_round() -> None:
    speed = 2 * 1.048576 / 2  # 8 objects of 256 KiB in 2 ms.
    assert rates("ours", SETTING, report()) == pytest.approx({"store": speed, "load": speed, "lookup": 4.0})


@pytest.mark.parametrize("changes", [{"total_success": 15}, {"rounds_timed_out": 1}])
def test_a_lost_object_or_round_is_an_error(changes: dict[str, int]) -> None:
    with pytest.raises(RuntimeError, match="store with resp: expected 16 objects"):
        rates("resp", SETTING, report(**changes))


def test_a_report_without_an_operation_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="has no store, load, lookup"):
        rates("resp", SETTING, report(operation="Erase"))


def test_a_failing_command_is_an_error_with_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Setting, "command", lambda *_: ["sh", "-c", "echo the disk is full >&2; exit 3"])
    with pytest.raises(RuntimeError, match=r"with fs failed:\s+the disk is full"):
        lmcache_l2.run("fs", SETTING)
    monkeypatch.setattr(Setting, "command", lambda *_: ["sleep", "10"])
    monkeypatch.setattr(lmcache_l2, "RUN_SECONDS", 0.1)
    with pytest.raises(subprocess.TimeoutExpired):
        lmcache_l2.run("fs", SETTING)


def test_every_row_has_a_bar() -> None:
    from bench.__main__ import BARS

    one = dict.fromkeys(OPERATIONS, 1.0)
    medians = {"ours": dict.fromkeys(OPERATIONS, 3.0), **dict.fromkeys(OTHERS, one)}
    made = [row for setting in lmcache_l2.SETTINGS for row in rows(setting, medians, 5)]
    assert {row["ratio"] for row in made} == {3.0}
    assert {row["name"] for row in made} == {name for name in BARS if name.startswith("lmcache_l2_")}

"""Runs test suites (see `commands`), streams their output and ends with one summary.

Each argument is a stage: suites (`cluster,vllm,chart`), two at a time, in their order. Most tests wait for a server, a
node or a deadline while another suite uses the processor.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from servers import lmcache  # noqa: E402

RUST_RESULT = re.compile(r"^test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored")
RUST_FAILED = re.compile(r"^test (\S+)(?: - .*)? \.\.\. FAILED")
RUST_IGNORED = re.compile(r"^test (\S+) \.\.\. ignored(?:, (.*))?")
PYTEST_COUNT = re.compile(r"(\d+) (passed|failed|error|errors|skipped)\b")
PYTEST_LAST = re.compile(r"^=+ .*\b(passed|failed|error|errors|skipped|no tests ran)\b.* in [\d.]+s")
PYTEST_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.*)")
PYTEST_SKIP = re.compile(r"^SKIPPED (.*)")


class Result(NamedTuple):
    """What one suite did."""

    suite: str
    passed: int
    failed: int
    failures: list[str]
    skipped: list[str]
    seconds: float
    status: int


def commands(suite: str) -> list[list[str]]:
    """Commands of a suite, run one after the other until one fails."""
    pytest = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    # Without examples, which the suites that use them build, and which the lints of `make check` compile.
    rust = ["cargo", "test", "--no-fail-fast", "--lib", "--bins", "--tests"]
    # Tests of Rust have built the same already: no feature of a dependency is theirs alone.
    sidecar = ["cargo", "build", "--bin", "kvcachepool-sidecar"]
    everything = ["cargo", "build", "--bins", "--example", "stand_in_engine"]
    load = ["cargo", "build", "--bin", "kvcachepool-sidecar", "--example"]
    # Where LMCache is not installed, its tests are skipped by name.
    python = str(lmcache.PYTHON) if lmcache.PYTHON.exists() else sys.executable
    adapters = [python, *pytest[1:], "tests/lmcache_adapters"]
    server = "tests/lmcache_adapters/test_lmcache_server.py"
    return {
        "rust": [rust],
        "connector": [[*sidecar, "--example", "gpu_check", "--example", "gpu_bench"], [*pytest, "tests/connector"]],
        "chart": [[*pytest, "tests/chart"]],
        "cluster": [everything, [*pytest, "--durations=8", "tests/cluster"]],
        "lmcache": [sidecar, [*adapters, f"--ignore={server}"]],
        "lmcache-server": [sidecar, [python, *pytest[1:], "--durations=8", server]],
        "soak": [[*load, "soak_engine"], [*pytest, "tests/soak"]],
        "stress": [sidecar, [*pytest, "-s", "tests/stress"]],
        "vllm": [sidecar, [*pytest, "--durations=8", "tests/vllm"]],
    }[suite]


def run(suite: str, prefix: str) -> Result:
    """Runs a suite; its output goes through as it comes, with a prefix before each line."""
    start = time.monotonic()
    passed = failed = status = 0
    failures: list[str] = []
    skipped: list[str] = []
    for command in commands(suite):
        print(f"\n{prefix}=== {suite}: {' '.join(command)}", flush=True)
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(prefix + line)
            sys.stdout.flush()
            if found := RUST_RESULT.match(line):
                passed += int(found[1])
                failed += int(found[2])
            elif found := RUST_FAILED.match(line) or PYTEST_FAILED.match(line):
                failures.append(found[1].rstrip()[:300])
            elif found := RUST_IGNORED.match(line):
                skipped.append(f"{found[1]}: {found[2] or 'ignored'}")
            elif found := PYTEST_SKIP.match(line):
                skipped.append(found[1])
            elif PYTEST_LAST.match(line):
                counts = {word: int(number) for number, word in PYTEST_COUNT.findall(line)}
                passed += counts.get("passed", 0)
                failed += counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)
        status = process.wait()
        if status:
            break
    if status and not failed:
        failed = 1
    return Result(suite, passed, failed, failures, skipped, time.monotonic() - start, status)


def run_stage(stage: str) -> list[Result]:
    """Runs the suites of a stage, two at a time. If there are several, each line begins with its suite."""
    suites = stage.split(",")
    prefixes = [f"{suite} | " if len(suites) > 1 else "" for suite in suites]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, suites, prefixes))


def main(stages: list[str]) -> int:
    """Runs all stages, also after a suite failed, and prints what came out."""
    os.environ.setdefault("CARGO_TERM_COLOR", "never")
    os.environ.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    # Many tests wait for a server or a deadline: with two at once, two cores are half idle.
    os.environ.setdefault("RUST_TEST_THREADS", str(max(4, os.cpu_count() or 1)))
    results = [result for stage in stages for result in run_stage(stage)]
    print("\n=== summary")
    for result in results:
        state = "ok" if result.status == 0 else f"FAILED (exit status {result.status})"
        print(f"{result.suite:10} {result.passed:5} passed {result.failed:4} failed {result.seconds:7.0f} s   {state}")
    for result in results:
        for failure in result.failures:
            print(f"failed    {result.suite}: {failure}")
    skips = [f"{result.suite}: {skip}" for result in results for skip in result.skipped]
    for skip in skips:
        print(f"skipped   {skip}")
    ignored_rust = sum(len(r.skipped) for r in results if r.suite == "rust")
    refused = os.environ.get("KVCACHEPOOL_REQUIRE") == "all" and ignored_rust > 0
    if refused:
        print("ignored Rust tests are failures with KVCACHEPOOL_REQUIRE=all")
    failed = sum(r.failed for r in results)
    print(f"tests: {sum(r.passed for r in results)} passed, {failed} failed, {len(skips)} skipped", flush=True)
    return 1 if failed or refused or any(r.status for r in results) else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

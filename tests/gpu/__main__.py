"""Everything that can be checked on a GPU: the program `gpu_check`, then the tests of this folder.

    python -m gpu [PART-OF-A-NAME...]

One line a check; the last line says how many passed, failed and were skipped. Ends with 1 where one failed.
"""

from __future__ import annotations

import subprocess
import sys
import unittest
from pathlib import Path
from typing import Any

from gpu import place
from servers import paths


class Lines(unittest.TestResult):
    """Prints a line per test, in the format of the program."""

    def __init__(self) -> None:
        super().__init__()
        self.passed = 0

    def _say(self, outcome: str, test: Any, why: str = "") -> None:
        name = test.id() if hasattr(test, "id") else str(test)
        print(f"{outcome:4} {name}{': ' + why if why else ''}", flush=True)

    def addSuccess(self, test: Any) -> None:
        self.passed += 1
        self._say("ok", test)

    def addSkip(self, test: Any, reason: str) -> None:
        super().addSkip(test, reason)
        self._say("skip", test, reason)

    def addFailure(self, test: Any, err: Any) -> None:
        super().addFailure(test, err)
        self._say("FAIL", test, self.failures[-1][1])

    def addError(self, test: Any, err: Any) -> None:
        super().addError(test, err)
        self._say("FAIL", test, self.errors[-1][1])

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._say("FAIL", subtest, str(err[1]))


def program(chosen: list[str]) -> int:
    """Runs `gpu_check` and prints its lines."""
    path = paths.example("gpu_check")
    return subprocess.run([str(path), *chosen], check=False).returncode


def every(suite: unittest.TestSuite) -> list[unittest.TestCase]:
    """The tests of a suite, one by one."""
    found: list[unittest.TestCase] = []
    for test in suite:
        found += every(test) if isinstance(test, unittest.TestSuite) else [test]
    return found


def main(chosen: list[str]) -> int:
    """Runs the tests with one of `chosen` in their names, or all."""
    status = program(chosen)
    folder = Path(__file__).parent
    loader = unittest.TestLoader()
    found = every(loader.discover(str(folder), pattern="test_*.py", top_level_dir=str(folder.parent)))
    result = Lines()
    tests = [test for test in found if not chosen or any(part in test.id() for part in chosen)]
    ready = []
    for test in tests:
        # One line per test, not per class.
        if why := place.missing(*getattr(test, "needs", ())):
            result.addSkip(test, why)
        else:
            ready.append(test)
    unittest.TestSuite(ready).run(result)
    failed = len(result.failures) + len(result.errors)
    print(f"tests: {result.passed} passed, {failed} failed, {len(result.skipped)} skipped")
    return 1 if failed or status else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Writes the tables of models in docs/reference/compatibility.md from what tests proved; `--check` only compares.

`compatibility.py record` runs these tests before, and records their results in tests/vllm/families.json. Further
arguments are options of pytest: with `-k gdn` the results of other tests stay as they are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from servers import families  # noqa: E402
from servers.families import ONE_RANK, Family  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "compatibility.md"
BEGIN, END = "<!-- tables: tools/compatibility.py -->\n", "<!-- end of tables -->\n"
#: The test of the page, which is not written yet while the others run.
_OWN = "tests/vllm/test_families.py::test_the_page_says_what_these_tests_prove_and_nothing_else"
#: Files with the tests that call `families.prove`.
_TESTS = ("tests/vllm/test_families.py", "tests/vllm/test_models.py")


def record(options: list[str]) -> None:
    """Runs the tests, with these options of pytest, and records what they proved. Exits if one fails."""
    with tempfile.NamedTemporaryFile("r") as proved:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *_TESTS, "--deselect", _OWN, *options]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | {families.PROVED: proved.name})
        if done.returncode:
            sys.exit(done.returncode)
        found = {(name, mode): facts for name, mode, facts in map(json.loads, proved)}
    recorded = families.record()["families"]
    kept = {(name, mode): facts for name, modes in recorded.items() for mode, facts in modes.items()}
    results = {
        each.name: {mode: facts for mode in each.modes if (facts := (kept | found).get((each.name, mode)))}
        for each in families.FAMILIES
    }
    tested = {name: modes for name, modes in results.items() if modes}
    families.RECORD.write_text(json.dumps({"vllm": families.vllm_version(), "families": tested}, indent=2) + "\n")


def page() -> str:
    """The page as it should be."""
    before, rest = PAGE.read_text().split(BEGIN)
    recorded = families.record()
    return (
        f"{before}{BEGIN}\n"
        + "\n".join(_lines(recorded["vllm"], recorded["families"]))
        + f"\n\n{END}"
        + rest.split(END)[1]
    )


def _lines(vllm: str, proved: dict[str, dict[str, dict[str, int]]]) -> list[str]:
    lines = ["| model | state | how it is known |", "|---|---|---|"]
    for each in families.FAMILIES:
        lines.append(f"| {each.kind} | {_state(each, each.name in proved)} |")
    for kind in families.UNTESTED:
        lines.append(_row(kind.kind, "*expected*", f"vLLM for CPUs does not run {kind.like}: `{kind.error}`"))
    for reason, specs in _refused().items():
        lines.append(
            f"| layers with {' or '.join(f'`{spec}`' for spec in specs)} | *no*: `{reason}` | a class of vLLM |"
        )
    titles = ["vLLM's own hit", "from memory", "vLLM restarted", "from disk", "bytes loaded", "loaded / needed"]
    lines += ["", f"One rank, with vLLM {vllm}:", "", *_head("model", *titles)]
    for each in families.FAMILIES:
        if facts := proved.get(each.name, {}).get(ONE_RANK):
            hits = [f"{facts[of]:,}" for of in ("memory", "restarted", "disk")]
            ratio = f"{facts['loaded_bytes'] / facts['needed_bytes']:.2f}"
            lines.append(_row(each.like, _hit(facts, "local"), *hits, f"{facts['loaded_bytes']:,}", ratio))
    modes = dict.fromkeys(mode for each in families.FAMILIES for mode in each.modes if mode != ONE_RANK)
    lines += ["", "From memory in other topologies, and with speculative decoding:", "", *_head("model", *modes)]
    for each in families.FAMILIES:
        if each.name in proved:
            lines.append(_row(each.like, *(_cell(each, proved[each.name].get(mode), mode) for mode in modes)))
    return lines


def _head(*titles: str) -> list[str]:
    return [_row(*titles), "|" + "---|" * len(titles)]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _state(family: Family, proved: bool) -> str:
    if proved:
        return f"*tested* | {family.like}"
    return f"*expected*, and in `make test` where the CPU has `{family.cpu_flag}` | {family.like}"


def _hit(facts: dict[str, int], of: str) -> str:
    return f"{facts[of]:,} of {facts['prompt']:,}"


def _cell(family: Family, facts: dict[str, int] | None, mode: str) -> str:
    if facts is not None:
        return _hit(facts, "memory")
    if mode in family.refused:
        return f"*expected*: vLLM for CPUs fails, `{family.refused[mode]}`"
    return "*expected*"


def _refused() -> dict[str, list[str]]:
    """Classes of KV groups that the connector refuses, by reason."""
    reasons: dict[str, list[str]] = {}
    for row in json.loads((ROOT / "sidecar/protocol/layouts.json").read_text())["specs"]:
        if row["reason"]:
            reasons.setdefault(row["reason"], []).append(row["spec"])
    return reasons


if __name__ == "__main__":
    if sys.argv[1:2] == ["record"]:
        record(sys.argv[2:])
    if "--check" not in sys.argv:
        PAGE.write_text(page())
    elif PAGE.read_text() != page():
        sys.exit("docs/reference/compatibility.md differs from tests/vllm/families.json: run tools/compatibility.py")

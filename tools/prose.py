"""Checks the Markdown of this repository: lines, sentences, phrases, links, and pages that no table of contents lists.

`prose.py` names every finding as `file:line: what` and exits with 1 if there is one.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = 100
WORDS = 40
#: What to write instead of a phrase that a reader stumbles over.
PHRASES = {
    r"as it is anyway": "by default",
    r"in vain": "without effect",
    r"none of ours": "foreign",
    r"\bmend": "fix",
    r"\ba look\b": "a check",
    r"\btold\b": "reported",
    r"\bshall\b": "should, or must",
    r"\bstands\b|\blies\b": "is",
    r"\bwho asks\b": "the caller",
}
_FENCE = re.compile(r" *```")
#: A table, a heading, a marker of generated text, or a definition of a link: no prose.
_NO_PROSE = re.compile(r" *(\||#|<!--|\[[^]]+\]:)")
_ITEM = re.compile(r"^ *([-*]|\d+\.) ")
_GENERATED = re.compile(r"<!-- (reasons|tables):")
_LINK = re.compile(r"\[([^]]*)\]\(([^)\s]+)\)")


def pages() -> list[Path]:
    """Every Markdown file of the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return [page for name in listed.stdout.split() if (page := ROOT / name).exists()]


def _prose(text: str) -> Iterator[tuple[int, str]]:
    """Lines of prose with their numbers; empty ones where a paragraph or an item of a list ends."""
    code = generated = False
    for number, line in enumerate(text.splitlines(), 1):
        if _FENCE.match(line):
            code = not code
        if _GENERATED.match(line):
            generated = True
        if code or generated or _FENCE.match(line) or _NO_PROSE.match(line):
            generated = generated and not line.startswith("<!-- end")
            yield number, ""
            continue
        if _ITEM.match(line):
            yield number, ""
        yield number, line


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Paragraphs in one line each, with the number of their first line."""
    first, lines = 0, list[str]()
    for number, line in [*_prose(text), (0, "")]:
        if line.strip():
            first = first if lines else number
            lines.append(_ITEM.sub("", line).strip())
        elif lines:
            yield first, " ".join(lines)
            lines.clear()


def _heading_links(page: Path) -> set[str]:
    """Anchors of a page, as GitHub and mdbook make them."""
    anchors = set()
    for line in page.read_text().splitlines():
        if line.startswith("#"):
            text = _LINK.sub(r"\1", line.lstrip("#").strip().replace("`", "")).lower()
            anchors.add(re.sub(r"[^\w\- ]", "", text).replace(" ", "-"))
    return anchors


def _wording(text: str) -> Iterator[tuple[int, str]]:
    for number, line in _prose(text):
        if len(line) > COLUMNS and " " in line.strip():
            yield number, f"{len(line)} columns, more than {COLUMNS}"
    for number, paragraph in _paragraphs(text):
        plain = re.sub(r"`[^`]*`", "code", _LINK.sub(r"\1", paragraph))
        for phrase, better in PHRASES.items():
            if found := re.search(phrase, plain, re.IGNORECASE):
                yield number, f"{found[0]!r}: write {better}"
        for sentence in re.split(r"(?<=[.!?:;])\s", plain):
            if (words := len(sentence.split())) > WORDS:
                yield number, f"a sentence of {words} words, more than {WORDS}: {sentence[:60]}..."


def _links(page: Path, text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        for _, target in _LINK.findall(line):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.exists():
                yield number, f"no such file: {target}"
            elif anchor and file.suffix == ".md" and anchor not in _heading_links(file):
                yield number, f"no such heading: {target}"


def _orphans() -> Iterator[str]:
    docs = ROOT / "docs"
    summary = docs / "SUMMARY.md"
    listed = {(docs / target).resolve() for _, target in _LINK.findall(summary.read_text())}
    for page in pages():
        if docs in page.parents and page != summary and page not in listed:
            yield f"{page.relative_to(ROOT)}: not in docs/SUMMARY.md"


def findings() -> list[str]:
    """Everything that is wrong, as `file:line: what`."""
    found = []
    for page in pages():
        text = page.read_text()
        for number, what in [*_wording(text), *_links(page, text)]:
            found.append(f"{page.relative_to(ROOT)}:{number}: {what}")
    return [*found, *_orphans()]


if __name__ == "__main__":
    found = findings()
    print("\n".join(found))
    sys.exit(bool(found))

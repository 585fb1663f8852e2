"""Pages follow the rules of `tools/prose.py`, are in the table of contents, and have valid links."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from servers.paths import ROOT


def _prose() -> Any:
    spec = importlib.util.spec_from_file_location("prose", ROOT / "tools" / "prose.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_page_has_a_finding() -> None:
    assert _prose().findings() == []


def test_every_kind_of_finding_is_reported(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    bad = {
        "a " * 60: "119 columns",
        "It waits in vain.": "'in vain': write without effect",
        f"[x](page.md#other) {'word ' * 5}": "no such heading: page.md#other",
        "[x](nowhere.md)": "no such file: nowhere.md",
        "\n".join(["one two three four five six seven eight nine ten"] * 5): "a sentence of 50 words",
    }
    prose = _prose()
    for text, finding in bad.items():
        page.write_text(f"# Page\n\n{text.strip()}\n\n```\n{'code ' * 50} in vain\n```\n\n| {'cell ' * 50} |\n")
        content = page.read_text()
        found = [what for _, what in [*prose._wording(content), *prose._links(page, content)]]
        assert any(what.startswith(finding) for what in found), (text, found)
    page.write_text("# A page\n\nA sentence. [x](#a-page)\n")
    assert not [*prose._wording(page.read_text()), *prose._links(page, page.read_text())]

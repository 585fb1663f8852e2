"""Paths of the sidecar, which are in the folder on PYTHONPATH that contains this package."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def folder() -> Path:
    """The folder with the package, the socket and `settings.json`."""
    return Path(__file__).resolve().parent.parent


def socket_path() -> str:
    """The sidecar's socket; `KVCACHEPOOL_SOCKET` overrides."""
    return os.environ.get("KVCACHEPOOL_SOCKET") or str(folder() / "sidecar.sock")


def settings() -> dict[str, Any]:
    """Settings beside the package (`existingConnector`). Empty if the file is missing or unreadable."""
    try:
        loaded = json.loads((folder() / "settings.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}

"""A file system that stops answering, like a hard-mounted NFS without its server."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest


class HangingDisk:
    """Folders under one path are not listed until `answers` is set. `callers`: names of the calling threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.answers = threading.Event()
        self.answers.set()
        self.callers: list[str] = []
        scandir = os.scandir

        def hangs(path: Any = ".") -> Any:
            if str(path).startswith(str(folder)):
                self.callers.append(threading.current_thread().name)
                self.answers.wait(10)
            return scandir(path)

        monkeypatch.setattr(os, "scandir", hangs)

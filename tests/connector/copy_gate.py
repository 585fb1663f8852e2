"""A gate that stops the copies of object clients."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvcachepool import object_copy


class Gate:
    """Stops copies at their first byte."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        runs = object_copy.runs

        def stopped(*arguments: Any) -> Any:
            self.entered.set()
            assert self.opened.wait(20)
            return runs(*arguments)

        monkeypatch.setattr(object_copy, "runs", stopped)

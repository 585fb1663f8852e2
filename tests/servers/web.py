"""Small HTTP calls to servers on this machine."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any


def get(url: str, seconds: float = 5) -> tuple[int, str]:
    """Status and body. Status 0 without a response."""
    try:
        with urllib.request.urlopen(url, timeout=seconds) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except OSError:
        return 0, ""


def post(url: str, body: dict[str, Any] | None = None, seconds: float = 300) -> tuple[int, str]:
    """Posts JSON; returns status and body."""
    data = json.dumps(body).encode() if body is not None else b""
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")

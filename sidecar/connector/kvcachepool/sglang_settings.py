"""What an SGLang server was started with: the backend's settings, SGLang's arguments, and the start itself."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, NamedTuple


class Options(NamedTuple):
    """Settings in `--hicache-storage-backend-extra-config`."""

    socket: str | None = None
    namespace: str = ""
    model_id: str | None = None
    timeout_s: float = 2.0
    interface_v1: bool = False

    @classmethod
    def of(cls, extra_config: dict[str, Any] | None) -> Options:
        """Names that are not ours are SGLang's. Raises `ValueError`."""
        given = extra_config or {}
        for name in ("socket", "namespace", "model_id"):
            if not isinstance(given.get(name, ""), str):
                raise ValueError(f"extra_config: {name} is {given[name]!r}, expected a string")
        timeout_s = given.get("timeout_s", cls._field_defaults["timeout_s"])
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not 0 < timeout_s <= 600:
            raise ValueError(f"extra_config: timeout_s is {timeout_s!r}, expected more than 0 and at most 600 seconds")
        return cls(
            given.get("socket") or None,
            given.get("namespace", ""),
            given.get("model_id") or None,
            float(timeout_s),
            bool(given.get("interface_v1", 0)),
        )


def server_args() -> Any:
    """The arguments of the SGLang server in this process, or None."""
    try:
        from sglang.srt.runtime_context import get_server_args

        return get_server_args()
    except (ImportError, AttributeError, ValueError, RuntimeError):
        return None


def server_start() -> str:
    """The same in all ranks of one server on a node, and different after a restart: its launcher's start."""
    parent = os.getppid()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        ticks = Path(f"/proc/{parent}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        boot, ticks = "", str(time.time_ns())
    return f"{boot}-{parent}-{ticks}"

"""What an SGLang server was started with: the backend's settings, SGLang's arguments, variables, and its start."""

from __future__ import annotations

import dataclasses
import os
import time
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

from kvcachepool import sglang_identity as table
from kvcachepool.identity import is_service_link


class Options(NamedTuple):
    """Settings in `--hicache-storage-backend-extra-config`."""

    socket: str | None = None
    namespace: str = ""
    model_id: str | None = None
    timeout_s: float = 2.0
    interface_v1: bool = False
    trust_mm_hashes: bool = False

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
        trust = given.get("trust_mm_hashes", False)
        if not isinstance(trust, bool):
            raise ValueError(f"extra_config: trust_mm_hashes is {trust!r}, expected true or false")
        return cls(
            given.get("socket") or None,
            given.get("namespace", ""),
            given.get("model_id") or None,
            float(timeout_s),
            bool(given.get("interface_v1", 0)),
            trust,
        )


def server_args() -> Any:
    """The arguments of the SGLang server in this process, or None."""
    try:
        from sglang.srt.runtime_context import get_server_args

        return get_server_args()
    except (ImportError, AttributeError, ValueError, RuntimeError):
        return None


class Settings(NamedTuple):
    """Arguments and variables of a server, by what they mean for its KV."""

    #: They decide KV.
    arguments: dict[str, str]
    environment: dict[str, str]
    #: They bring weights or code from elsewhere.
    foreign: list[str]
    #: In no table.
    unknown: list[str]

    @classmethod
    def of(cls, args: Any) -> Settings:
        """Raises `ValueError` if these are not SGLang's arguments."""
        changed = _changed(args)
        variables = _variables()
        foreign = {*table.FOREIGN_ARGUMENTS, *table.FOREIGN_ENVIRONMENT}
        known = table.ARGUMENTS.names() | table.ENVIRONMENT.names() | foreign
        return cls(
            {name: str(getattr(args, name, None)) for name in table.ARGUMENTS.identity},
            {name: value for name, value in variables.items() if name in table.ENVIRONMENT.identity},
            sorted(foreign & {*changed, *(name for name, value in variables.items() if value)}),
            sorted({*changed, *variables} - known),
        )


def _changed(args: Any) -> set[str]:
    """Names of the arguments that do not have SGLang's default. Raises `ValueError`."""
    kind: Any = type(args)
    fields: Any
    if dataclasses.is_dataclass(kind):
        fields = dataclasses.fields(kind)
    else:
        import msgspec

        try:
            fields = msgspec.structs.fields(kind)
        except TypeError:
            raise ValueError(f"SGLang's arguments are not available: {kind.__name__} has no defaults") from None
    defaults = {
        field.name: field.default_factory() if callable(field.default_factory) else field.default for field in fields
    }
    return {name for name, default in defaults.items() if getattr(args, name, default) != default}


def _variables() -> dict[str, str]:
    """Set variables that SGLang reads. `SGL_` is its old prefix, which it still accepts."""
    known = {*table.ENVIRONMENT.names(), *table.FOREIGN_ENVIRONMENT}
    found = {
        ("SGLANG_" + name[4:] if name.startswith("SGL_") else name): value
        for name, value in os.environ.items()
        if not is_service_link(name, os.environ)
    }
    return {name: value for name, value in found.items() if name in known or name.startswith("SGLANG_")}


def plugins() -> list[str]:
    """SGLang's installed plugins. They may replace any function."""
    return sorted(
        f"{one.name}={one.value} {one.dist.version if one.dist else ''}"
        for group in ("sglang.srt.plugins", "sglang.srt.platforms")
        for one in entry_points(group=group)
    )


def server_start() -> str:
    """The same in all ranks of one server on a node, and different after a restart: its launcher's start."""
    parent = os.getppid()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        # Launchers of two containers may have one number, and start at the same time.
        return f"{boot}-{os.readlink('/proc/self/ns/pid')}-{parent}-{_ticks(parent)}"
    except (OSError, IndexError, ValueError):
        return f"-{parent}-{time.time_ns()}"


def start_time() -> float | None:
    """When this process started, as a Unix time: a rank reads the model's files later. None if the system does not say
    it. The launcher's start is no measure: a shell that downloads the model may become the launcher.
    """
    try:
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - _ticks("self") / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return None
    return time.time() - age_s


def _ticks(process: int | str) -> int:
    """The start of a process, in ticks since the system's. Raises `OSError`, `IndexError` and `ValueError`."""
    return int(Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])

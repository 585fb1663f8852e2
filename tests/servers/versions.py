"""Which vLLM the tests run with."""

from __future__ import annotations

from importlib.metadata import version

# The oldest supported vLLM, and the newest that the tests have run with.
OLDEST = (0, 30)
NEWEST = (0, 32)
#: The version that is upgraded to the newest (VLLM_BEFORE in the Makefile).
BEFORE = "0.31.0"


def too_old() -> bool:
    """Whether this vLLM is too old for the connector."""
    return not at_least(OLDEST)


def newest() -> bool:
    """Whether this vLLM has all names that the connector knows. An older one lacks some."""
    return at_least(NEWEST)


def at_least(minor: tuple[int, int]) -> bool:
    """Whether this vLLM is of this minor version or a newer one."""
    return _minor() >= minor


def _minor() -> tuple[int, ...]:
    return tuple(int(part) for part in version("vllm").split("+")[0].split(".")[:2])

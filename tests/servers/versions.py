"""Which vLLM the tests run with."""

from __future__ import annotations

from importlib.metadata import version

# The oldest vLLM whose connector API is served.
OLDEST = (0, 30)


def too_old() -> bool:
    """Whether this vLLM is one that the cache leaves alone."""
    return tuple(int(part) for part in version("vllm").split("+")[0].split(".")[:2]) < OLDEST

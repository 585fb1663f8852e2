"""The Redis tier and redis-benchmark, both with TLS."""

from __future__ import annotations

from contextlib import AbstractContextManager

from bench.tiers import redis

REFERENCE = "redis-benchmark --tls"


def subject() -> AbstractContextManager[redis.Redis]:
    """A server with a certificate."""
    return redis.subject(tls=True)

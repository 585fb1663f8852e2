"""The S3 tier and a bare HTTP client, both with TLS."""

from __future__ import annotations

from contextlib import AbstractContextManager

from bench.tiers import s3

REFERENCE = "bare HTTP client with TLS"


def subject() -> AbstractContextManager[s3.S3]:
    """A server with a certificate."""
    return s3.subject(tls=True)

"""Errors of requests to a store's server, and its log lines."""

from __future__ import annotations

import logging

log = logging.getLogger("kvcachepool.store")
#: Limit of a text of the user's class in messages.
SHOWN = 200


class Refused(Exception):
    """The response to a request that fails: an HTTP status, and a code that the S3 tier maps to its own causes."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"{status} {code}: {message}")
        self.status, self.code, self.message = status, code, message


def field(name: str, value: object) -> str:
    """A field of a log line; quoted if it has other characters than a word."""
    text = str(value)[:SHOWN]
    plain = text and all(c.isalnum() or c in "-_./:+*" for c in text)
    quoted = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return f"{name}={text}" if plain else f'{name}="{quoted}"'


def line(message: str, **fields: object) -> str:
    """A fixed message and its fields."""
    return " ".join([message, *(field(name, value) for name, value in fields.items())])

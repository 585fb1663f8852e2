"""Calls of the object client for engines that compute what they do not get: an error is a miss."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from .object_types import Error

logger = logging.getLogger("kvcachepool")
_T = TypeVar("_T")


class Calls:
    """Calls of the client whose errors become an answer. The first error and the next success are logged."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._failing = False

    def ask(self, call: Callable[[], _T], otherwise: _T) -> _T:
        """The result of the call, or `otherwise` if the sidecar does not answer or refuses."""
        try:
            answer = call()
        except Error as error:
            self.failed(error)
            return otherwise
        self.succeeded()
        return answer

    def failed(self, error: Error) -> None:
        """Logs the error, unless the call before failed too."""
        if not self._failing:
            logger.warning("%s: the cache does not answer, misses until it does: %s", self._what, error)
        self._failing = True

    def succeeded(self) -> None:
        """Logs that the cache answers again."""
        if self._failing:
            logger.info("%s: the cache answers again", self._what)
        self._failing = False

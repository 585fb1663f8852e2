"""Lookups of the tier for vLLM's offloading: one question per step, for all requests together, on a thread."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable

logger = logging.getLogger("kvcachepool")


class _Verdict:
    """found: None until the answer is here."""

    __slots__ = ("found", "requests")

    def __init__(self) -> None:
        self.found: bool | None = None
        self.requests: set[str] = set()


class Lookups:
    """All methods belong to the scheduler's thread and never block, except `close`."""

    def __init__(self, ask: Callable[[list[bytes]], list[bool]]) -> None:
        """`ask` returns which keys exist. It is called on the thread, and must return in bounded time."""
        self._ask = ask
        self._verdicts: dict[bytes, _Verdict] = {}
        self._keys_of: dict[str, set[bytes]] = {}
        self._new: list[tuple[bytes, _Verdict]] = []
        self._questions: queue.SimpleQueue[list[tuple[bytes, _Verdict]] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[list[tuple[_Verdict, bool]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvcachepool-tier-lookup", daemon=True)
        self._thread.start()

    def find(self, key: bytes, request: str) -> bool | None:
        """Whether the key exists; None until that is known. The answer holds until the request is forgotten."""
        self._take_answers()
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._verdicts[key] = _Verdict()
            self._new.append((key, verdict))
        verdict.requests.add(request)
        self._keys_of.setdefault(request, set()).add(key)
        return verdict.found

    def flush(self) -> None:
        """Asks for the new keys of this step."""
        asked = [(key, verdict) for key, verdict in self._new if verdict.found is None and verdict.requests]
        self._new = []
        if asked:
            self._questions.put(asked)

    def mark(self, keys: Iterable[bytes], found: bool) -> None:
        """What a store or a failed load says about keys that requests have asked for."""
        for key in keys:
            verdict = self._verdicts.get(key)
            if verdict is not None:
                verdict.found = found

    def forget(self, request: str) -> None:
        """The request has ended."""
        for key in self._keys_of.pop(request, ()):
            verdict = self._verdicts[key]
            verdict.requests.discard(request)
            if not verdict.requests:
                del self._verdicts[key]

    def reset(self) -> None:
        """Forgets all answers, including those on their way."""
        self._verdicts.clear()
        self._keys_of.clear()
        self._new.clear()

    def close(self, timeout_s: float) -> bool:
        """Ends the thread. False if it is still busy after this time."""
        self._questions.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _take_answers(self) -> None:
        while not self._answers.empty():
            for verdict, found in self._answers.get_nowait():
                if verdict.found is None:
                    verdict.found = found

    def _run(self) -> None:
        while (asked := self._questions.get()) is not None:
            # What came while the last question was on its way goes with this one.
            ended = False
            while not self._questions.empty():
                more = self._questions.get()
                if more is None:
                    ended = True
                    break
                asked += more
            try:
                found = self._ask([key for key, _ in asked])
            except Exception:
                # Without an answer the requests would wait for ever.
                logger.exception("a lookup of the tier failed")
                found = [False] * len(asked)
            self._answers.put([(verdict, one) for (_, verdict), one in zip(asked, found, strict=True)])
            if ended:
                return

"""The namespaces of requests: epochs, and LoRA adapters with known, unchanged content."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Any

from .adapter_files import AdapterHashes, Content
from .controls import Uncacheable, namespace
from .reporter import Reporter
from .requests import Progress, RequestState

#: Reason for which an adapter is not cached yet.
CONTENT_UNKNOWN = "lora_content_unknown"


class Namespaces:
    """Its methods are called with the scheduler side's lock held. `epoch`: the last drawn epoch, empty before.

    vLLM identifies adapters by id, and KV of its own prefix cache by name and path. Both may refer to other weights
    after a while. Then it is unknown which of them computed a block, so it is not cached any more.
    """

    def __init__(
        self, reporter: Reporter, on_known: Callable[[str], None], nodes: int, sees_reads: bool = True
    ) -> None:
        """`nodes`: of the engine. Each reads adapters from its own files, and only those of this one are known.
        `sees_reads`: workers see which files vLLM reads.

        `on_known` is called with an adapter's path, on a background thread, when its content is known for all uses
        that began before.
        """
        self.epoch = ""
        self.hashes = AdapterHashes(on_known)
        self._reporter = reporter
        self._nodes = nodes
        self._sees_reads = sees_reads
        self._replaced: dict[int, str] = {}  # ids that stand for unknown weights, with the reason of their misses
        self._read: set[int] = set()
        self._contents: dict[tuple[str, str], bytes] = {}
        self._names: dict[int, set[tuple[str, str]]] = {}  # names and paths of all adapters with an id

    def assign(self, state: RequestState) -> None:
        """Sets the request's namespace, or the reason why it is not cached."""
        before = state.namespace

        def digest(lora: Any) -> bytes:
            content = self._content(lora, state.since_s)
            state.adapter = lora.lora_int_id, content.stamp
            return content.digest

        try:
            state.namespace = namespace(state.request, state.controls, self.epoch, digest)
            state.refusal = ""
            self._reporter.serve(state.namespace, state.request.lora_request, state.controls.tags)
        except Uncacheable as reason:
            state.namespace = state.adapter = None
            state.refusal = str(reason)
        if before is not None and state.namespace not in (None, before):
            state.progress = Progress()

    def restart(self, state: RequestState) -> None:
        """The request holds no blocks. Its future blocks belong to the current epoch and are stored from the
        beginning.
        """
        state.restart()
        self.assign(state)

    def draw_epoch(self) -> None:
        """Separates requests from everything that was computed before."""
        self.epoch = os.urandom(16).hex()

    def _content(self, lora: Any, since_s: float) -> Content:
        """Content of an adapter's files, for a use that began at this monotonic time. Raises `Uncacheable`."""
        if self._nodes > 1:
            raise Uncacheable("lora_on_several_nodes")
        if not self._sees_reads or getattr(lora, "tensorizer_config_dict", None):
            raise Uncacheable("lora_reads_unseen")
        reason = self._replaced.get(lora.lora_int_id)
        if reason is not None:
            self._contents[lora.lora_name, lora.lora_path] = b""  # its blocks may be of the weights before or after
            raise Uncacheable(reason)
        content = self.hashes.get(lora.lora_path, lora.lora_int_id, since_s)
        if content is None:
            raise Uncacheable(CONTENT_UNKNOWN)
        if self._contents.setdefault((lora.lora_name, lora.lora_path), content.digest) != content.digest:
            raise Uncacheable("lora_content_changed")
        return content

    def known_soon(self, lora: Any) -> bool:
        """Whether an adapter that is `CONTENT_UNKNOWN` may be known at the next step."""
        return self.hashes.soon(lora.lora_path, lora.lora_int_id)

    def adapter_named(self, lora: Any) -> bool:
        """vLLM is about to load or use this adapter. Returns whether it became unknown now which weights its id stands
        for.
        """
        names = self._names.setdefault(lora.lora_int_id, set())
        other = any(path != lora.lora_path for _, path in names)
        names.add((lora.lora_name, lora.lora_path))
        if not (other or getattr(lora, "load_inplace", False)):
            self.hashes.get(lora.lora_path, lora.lora_int_id, time.monotonic())  # hashes the current content
            return False
        first = lora.lora_int_id not in self._replaced
        self._replace(lora.lora_int_id, "lora_loaded_in_place")
        return first

    def mark_read(self, lora: Any) -> None:
        """Workers have read the adapter's files, or will with the step that is being scheduled."""
        self._read.add(lora.lora_int_id)

    def is_read(self, lora: Any) -> bool:
        """Whether workers can tell if they have the weights by which KV to load was computed."""
        return lora.lora_int_id in self._read

    def adapters_changed(self, numbers: Iterable[int]) -> None:
        """Workers have read other files for these ids than were hashed."""
        for number in numbers:
            self._replace(number, "lora_content_changed")

    def _replace(self, number: int, reason: str) -> None:
        self._replaced.setdefault(number, reason)
        for name in self._names.get(number, ()):
            self._contents[name] = b""

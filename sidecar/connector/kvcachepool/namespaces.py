"""The namespaces of requests: epochs, and LoRA adapters with known, unchanged content."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from .adapter_files import AdapterHashes
from .controls import Uncacheable, namespace
from .reporter import Reporter
from .requests import RequestState

#: Reason for which an adapter is not cached yet.
CONTENT_UNKNOWN = "lora_content_unknown"


class Namespaces:
    """Its methods are called with the scheduler side's lock held. `epoch`: the last drawn epoch, empty before.

    vLLM identifies adapters by id, and KV of its own prefix cache by name and path. Both may refer to other weights
    after a while. Then it is unknown which of them computed a block, so it is not cached any more.
    """

    def __init__(self, reporter: Reporter, on_known: Callable[[str], None], nodes: int) -> None:
        """`nodes`: of the engine. Each reads adapters from its own files, and only those of this one are known.

        `on_known` is called with an adapter's path, on a background thread, when its content is known for all uses
        that began before.
        """
        self.epoch = ""
        self.hashes = AdapterHashes(on_known)
        self._reporter = reporter
        self._nodes = nodes
        self._replaced: set[int] = set()
        self._contents: dict[tuple[str, str], bytes] = {}
        self._paths: dict[int, str] = {}  # of the first adapter with an id

    def assign(self, state: RequestState) -> None:
        """Sets the request's namespace, or the reason why it is not cached."""
        try:
            state.namespace = namespace(
                state.request, state.controls, self.epoch, lambda lora: self._digest(lora, state.since_s)
            )
            state.refusal = ""
            self._reporter.serve(state.namespace, state.request.lora_request, state.controls.tags)
        except Uncacheable as reason:
            state.namespace = None
            state.refusal = str(reason)

    def restart(self, state: RequestState) -> None:
        """The request holds no blocks. Its future blocks belong to the current epoch and are stored from the
        beginning.
        """
        state.restart()
        self.assign(state)

    def draw_epoch(self) -> None:
        """Separates requests from everything that was computed before."""
        self.epoch = os.urandom(16).hex()

    def _digest(self, lora: Any, since_s: float) -> bytes:
        """Content hash of an adapter's files, for a use that began at this monotonic time. Raises `Uncacheable`."""
        if self._nodes > 1:
            raise Uncacheable("lora_on_several_nodes")
        if lora.lora_int_id in self._replaced:
            self._contents[lora.lora_name, lora.lora_path] = b""  # its blocks may be of the weights before or after
            raise Uncacheable("lora_loaded_in_place")
        digest = self.hashes.get(lora.lora_path, lora.lora_int_id, since_s)
        if digest is None:
            raise Uncacheable(CONTENT_UNKNOWN)
        if self._contents.setdefault((lora.lora_name, lora.lora_path), digest) != digest:
            raise Uncacheable("lora_content_changed")
        return digest

    def known_soon(self, lora: Any) -> bool:
        """Whether an adapter that is `CONTENT_UNKNOWN` may be known at the next step."""
        return self.hashes.soon(lora.lora_path, lora.lora_int_id)

    def adapter_loaded(self, lora: Any) -> bool:
        """vLLM is about to load this adapter, or has one with its id. Returns whether it is unknown from now on which
        weights the id stands for.
        """
        other = self._paths.setdefault(lora.lora_int_id, lora.lora_path) != lora.lora_path
        if not (other or getattr(lora, "load_inplace", False)):
            self.hashes.get(lora.lora_path, lora.lora_int_id, time.monotonic())  # hashes the current content
            return False
        first = lora.lora_int_id not in self._replaced
        self._replaced.add(lora.lora_int_id)
        return first

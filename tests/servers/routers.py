"""Prefix trees of routers, rebuilt from what vLLM's publisher sends, by the rules of llm-d-router (`pkg/kvevents`,
`pkg/kvcache/kvblock`) and of Dynamo (`lib/kv-router`: `zmq_wire`, `indexer/lower_tier.rs`), as far as they concern one
worker.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, ZmqEventPublisher

_PREFIX_KINDS = ("full_attention", "mla_attention", "sink_full_attention")


def digest(*parts: Any) -> bytes:
    """A router's own hash of a block."""
    return hashlib.sha256(repr(parts).encode()).digest()


def _extra(event: BlockStored, at: int) -> Any:
    return event.extra_keys[at] if event.extra_keys else None


class LlmD:
    """llm-d: request keys from tokens, found by vLLM's hashes; stores and removals of a block are counted."""

    def __init__(self) -> None:
        self.entries: dict[bytes, set[tuple[str, int | None]]] = {}
        self.request_keys: dict[Any, bytes] = {}
        self.counts: Counter[tuple[tuple[str, int | None], Any]] = Counter()
        self.kinds: dict[int, str | None] = {}

    def restart(self) -> None:
        """The worker's sequence restarted. Forgets its blocks, but not the meaning of its hashes."""
        self.entries.clear()
        self.counts.clear()

    def apply(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        """Takes one event."""
        if isinstance(event, AllBlocksCleared):
            self.restart()
        elif isinstance(event, BlockStored):
            self._stored(event)
        else:
            self._removed(event)

    def _stored(self, event: BlockStored) -> None:
        place = (event.medium or "GPU", event.group_idx)
        if event.group_idx is not None:
            self.kinds[event.group_idx] = event.kv_cache_spec_kind
            if event.kv_cache_spec_kind not in _PREFIX_KINDS:
                return
        hashes, tokens, size = event.block_hashes, event.token_ids, event.block_size
        if tokens and len(tokens) != size * len(hashes):
            return
        if event.parent_block_hash is not None and event.parent_block_hash not in self.request_keys:
            return
        if tokens:
            key = self.request_keys[event.parent_block_hash] if event.parent_block_hash is not None else b""
            for at, block in enumerate(hashes):
                key = digest(
                    key, tokens[at * size : (at + 1) * size], event.lora_name, (event.extra_keys or {at: None})[at]
                )
                self.request_keys[block] = key
        known = [block for block in hashes if block in self.request_keys]
        for block in known:
            self.entries.setdefault(self.request_keys[block], set()).add(place)
        if known:
            self.counts.update((place, block) for block in hashes)

    def _removed(self, event: BlockRemoved) -> None:
        place = (event.medium or "GPU", event.group_idx)
        if event.group_idx is not None and self.kinds.get(event.group_idx) not in _PREFIX_KINDS:
            return
        for block in event.block_hashes:
            count = self.counts.pop((place, block), 0)
            if count > 1:
                self.counts[place, block] = count - 1
                continue
            self.entries.get(self.request_keys.get(block, b""), set()).discard(place)

    def blocks(self, tokens: Sequence[int], size: int, medium: str) -> int:
        """Leading blocks of a prompt that the router assigns to the worker."""
        key = b""
        for at in range(len(tokens) // size):
            key = digest(key, list(tokens[at * size : (at + 1) * size]), None, None)
            if not any(place[0] == medium for place in self.entries.get(key, ())):
                return at
        return len(tokens) // size


class Dynamo:
    """Dynamo: edges from a parent's hash by a block's tokens; a block's first store counts, one removal ends it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.edges: dict[str, dict[tuple[Any, bytes], Any]] = {}
        self.owned: dict[str, dict[Any, tuple[Any, bytes]]] = {}

    def restart(self) -> None:
        """Another worker has replaced this one."""
        self.edges.clear()
        self.owned.clear()

    def apply(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        """Takes one event."""
        if isinstance(event, AllBlocksCleared):
            self.edges.pop("GPU", None)
            self.owned.pop("GPU", None)
            return
        if event.locality not in (None, "LOCAL"):
            return
        medium = event.medium or "GPU"
        edges, owned = self.edges.setdefault(medium, {}), self.owned.setdefault(medium, {})
        if isinstance(event, BlockRemoved):
            for block in event.block_hashes:
                edge = owned.pop(block, None)
                if edge is not None:
                    del edges[edge]
            return
        if event.kv_cache_spec_kind not in (None, *_PREFIX_KINDS) or event.block_size != self.size:
            return
        parent = event.parent_block_hash
        if len({parent, *event.block_hashes}) != len(event.block_hashes) + 1:
            return
        for at, block in enumerate(event.block_hashes):
            tokens = event.token_ids[at * self.size : (at + 1) * self.size]
            if len(tokens) < self.size:
                break
            edge = (parent, digest(tokens, event.lora_name, _extra(event, at)))
            if edge not in edges:
                edges[edge] = block
                owned[block] = edge
            parent = block

    def blocks(self, tokens: Sequence[int], size: int, medium: str) -> int:
        """Leading blocks of a prompt that the router assigns to the worker."""
        edges, parent = self.edges.get(medium, {}), None
        for at in range(len(tokens) // size):
            parent = edges.get((parent, digest(list(tokens[at * size : (at + 1) * size]), None, None)))
            if parent is None:
                return at
        return len(tokens) // size


class Publisher:
    """Replaces vLLM's publisher: encodes a batch as vLLM does, and routers decode it with vLLM's types."""

    def __init__(self, *routers: LlmD | Dynamo) -> None:
        self.routers = list(routers)
        self.events: list[Any] = []
        self._encode = msgspec.msgpack.Encoder().encode

    def publish(self, batch: Any) -> None:
        """Sends a batch."""
        self.deliver(self._encode(batch))

    def deliver(self, payload: bytes) -> None:
        """A router's processing of a received batch."""
        batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
        assert batch.ts <= time.time()
        self.events += batch.events
        for event in batch.events:
            for router in self.routers:
                router.apply(event)

    def get_publisher_config(self) -> None:
        """No config."""

    def shutdown(self) -> None:
        """Does nothing."""


def replayed(endpoint: str, first: int = 0, seconds: float = 20) -> list[bytes]:
    """All batches from a number on that a vLLM has published and still keeps, from its own replay."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(endpoint)
        dealer.send_multipart([b"", first.to_bytes(8, "big")])
        batches: list[bytes] = []
        while True:
            assert dealer.poll(int(seconds * 1000)), f"no replay from {endpoint}"
            _, _, sequence, payload = dealer.recv_multipart()
            if sequence == ZmqEventPublisher.END_SEQ:
                return batches
            assert int.from_bytes(sequence, "big") == first + len(batches)
            batches.append(payload)


class Subscriber:
    """Routers behind vLLM's socket. A gap in the batch numbers is filled by vLLM's replay."""

    def __init__(self, endpoint: str, replay: str, routers: Publisher) -> None:
        self.next = 0
        self.gaps = 0
        self._replay = replay
        self._routers = routers
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.linger = 0
        self._socket.subscribe(b"")
        self._socket.connect(endpoint)

    def receive(self, lost: Callable[[], bool]) -> None:
        """Receives pending batches. `lost` decides whether a batch is dropped."""
        while self._socket.poll(20):
            _, sequence, payload = self._socket.recv_multipart()
            number = int.from_bytes(sequence, "big")
            if lost() or number < self.next:
                continue
            if number > self.next:
                self.gaps += 1
                self.catch_up()
            else:
                self._deliver(payload)

    def catch_up(self) -> None:
        """Requests all batches from the first missing one on."""
        for payload in replayed(self._replay, self.next):
            self._deliver(payload)

    def _deliver(self, payload: bytes) -> None:
        self._routers.deliver(payload)
        self.next += 1

    def stop(self) -> None:
        """Closes the socket."""
        self._context.destroy()

"""KV events for routers: the content of this pod's cache outside the GPU, as vLLM's own event types.

The feed publishes the difference between what the sidecar holds and what was published. After lost events of the
sidecar, the same code repairs the state from a snapshot, and no queue grows without bound. Chunks may overlap: a block
is published with its first chunk and removed with its last.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent

from .keys import HASH_BYTES, Geometry
from .messages import Event

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

#: (medium, locality) by tier. Shared tiers are excluded: other pods and the servers themselves remove objects there, so
#: a published block might never be removed.
_PLACES = {"memory": ("CPU", "LOCAL"), "disk": ("STORAGE", "LOCAL")}
#: Maximum published chunks per tier, about 2 KiB each.
MAX_CHUNKS = 65_536
#: Maximum chunks with tokens, about 2 KiB each. The oldest are dropped, and are published without tokens if they are
#: stored again.
MAX_CONTENTS = 16_384
#: Chunks published per step, so that a step takes about a millisecond of the engine's thread at most.
_STORED_PER_STEP = 64
_REMOVED_PER_STEP = 256
#: Kinds of KV groups whose blocks routers index in their prefix trees.
_PREFIX_KINDS = ("full_attention", "mla_attention", "sink_full_attention")
_STORED_FIELDS = frozenset(BlockStored.__struct_fields__)
_REMOVED_FIELDS = frozenset(BlockRemoved.__struct_fields__)


@dataclass(frozen=True)
class EventGroup:
    """The KV group of the events. Blocks of other groups exist wherever its blocks do, or are not needed."""

    index: int
    kind: str | None
    window: int | None
    block_tokens: int
    hash_tokens: int


def event_group(kv_cache_config: KVCacheConfig, geometry: Geometry) -> EventGroup:
    """The first group of a kind that routers index, or else the first group."""
    kinds: list[tuple[str | None, int | None]] = []
    for group in kv_cache_config.kv_cache_groups:
        try:
            from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

            spec = group.kv_cache_spec
            kinds.append((get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec)))
        except ImportError:  # this version's events do not have the kind
            kinds.append((None, None))
    index = next((at for at, (kind, _) in enumerate(kinds) if kind in _PREFIX_KINDS), 0)
    kind, window = kinds[index]
    return EventGroup(index, kind, window, geometry.groups[index].block_tokens, geometry.hash_block)


class Adapter(NamedTuple):
    """The LoRA adapter of a namespace, as vLLM's events name it."""

    id: int | None = None
    name: str | None = None


class _Chunk(NamedTuple):
    """A chunk that a tier holds."""

    namespace: bytes
    hash: bytes
    hashes: bytes
    parent: bytes
    first_token: int
    tokens: int

    @property
    def key(self) -> bytes:
        return self.namespace + self.hash


class _Content(NamedTuple):
    """What a request of this process contributes about a chunk. Without `token_ids`, the hashes cover more than
    tokens.
    """

    first_token: int
    hashes: bytes
    parent: bytes
    token_ids: array[int] | None


class _Tier:
    """The chunks that a tier holds, the published chunks, and the keys of pending publications."""

    def __init__(self, medium: str, locality: str) -> None:
        self.medium = medium
        self.locality = locality
        self.held: dict[bytes, _Chunk] = {}
        self.published: dict[bytes, _Chunk] = {}
        self.without_tokens: set[bytes] = set()  # published without tokens
        self.blocks: dict[Any, int] = {}  # number of published chunks by block
        self.orphans: dict[Any, dict[bytes, None]] = {}  # chunks whose parent block is not published, by that block
        self.to_store: dict[bytes, None] = {}
        self.to_remove: dict[bytes, None] = {}

    def stored(self, chunk: _Chunk) -> bool:
        """Returns False if there are too many chunks."""
        key = chunk.key
        before = self.held.get(key)
        if before is None and len(self.held) >= MAX_CHUNKS:
            return False
        if before is None or (chunk.parent and not before.parent):
            self.held[key] = chunk
        if key not in self.published or key in self.to_remove:
            self.to_store[key] = None
        return True

    def enqueue_children(self, block: Any) -> None:
        """A block was published: chunks behind it can be published too."""
        for key in self.orphans.pop(block, ()):
            if key in self.held and key not in self.published:
                self.to_store[key] = None

    def removed(self, key: bytes) -> None:
        self.held.pop(key, None)
        self.to_store.pop(key, None)
        if key in self.published:
            self.to_remove[key] = None

    def clear(self) -> None:
        """The sidecar's content is unknown."""
        self.held.clear()
        self.to_store.clear()
        self.to_remove.update(dict.fromkeys(self.published))

    def republish(self, keys: Iterable[bytes]) -> None:
        """Publishes chunks again: first a removal, because routers count stores."""
        for key in keys:
            if key in self.held:
                self.published.setdefault(key, self.held[key])
                self.to_remove[key] = None
                self.to_store[key] = None


class EventFeed:
    """Filled by the client's reader thread and emptied by the engine's thread, which never waits for it."""

    def __init__(self, group: EventGroup) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._tiers = {name: _Tier(*place) for name, place in _PLACES.items()}
        self._namespaces: dict[bytes, Adapter] = {b"": Adapter()}
        self._contents: dict[bytes, _Content] = {}  # by hash of the last block; engine thread only
        self._noted: deque[bytes] = deque(maxlen=MAX_CONTENTS)
        self._has_published = False
        #: Number of chunks that were not published because of `MAX_CHUNKS`.
        self.over_limit = 0

    # -- from the sidecar, on the reader's thread

    def apply(self, events: Iterable[Event]) -> None:
        """Applies changes in order."""
        with self._lock:
            for event in events:
                tier = self._tiers.get(event.tier)
                if tier is None:
                    continue
                if event.kind == "cleared":
                    tier.clear()
                    continue
                chunk = self._chunk(event)
                if chunk is None:
                    continue
                if event.kind == "stored":
                    self.over_limit += not tier.stored(chunk)
                elif event.kind == "removed":
                    tier.removed(chunk.key)

    def replace(self, events: Iterable[Event]) -> None:
        """Applies a snapshot of everything that is held."""
        snapshot: dict[str, dict[bytes, _Chunk]] = {name: {} for name in self._tiers}
        for event in sorted(events, key=lambda event: event.first_token):  # parents first
            chunk = self._chunk(event)
            if chunk is not None and event.tier in snapshot:
                snapshot[event.tier][chunk.key] = chunk
        with self._lock:
            for name, tier in self._tiers.items():
                for key in [key for key in tier.held if key not in snapshot[name]]:
                    tier.removed(key)
                for chunk in snapshot[name].values():
                    if chunk.namespace in self._namespaces:
                        self.over_limit += not tier.stored(chunk)
            if not self._has_published:
                # A router may remember blocks that this pod published before vLLM restarted.
                self._has_published = True
                for tier in self._tiers.values():
                    tier.republish(list(tier.held))

    def clear(self) -> None:
        """The sidecar is disconnected, so its chunks cannot be loaded."""
        with self._lock:
            for tier in self._tiers.values():
                tier.clear()

    def _chunk(self, event: Event) -> _Chunk | None:
        """The chunk of an event, or None if no request of this engine can name it."""
        if event.namespace not in self._namespaces or len(event.hash) != HASH_BYTES:
            return None
        return _Chunk(event.namespace, event.hash, event.block_hashes, event.parent, event.first_token, event.tokens)

    # -- from the scheduler

    def serve(self, namespace: bytes, adapter: Adapter) -> bool:
        """Requests of this engine can name chunks of this namespace, and those of the adapter no others. Returns True
        if the namespace is new; chunks of it may already exist.
        """
        if namespace in self._namespaces:
            return False
        with self._lock:
            if adapter.name is not None:
                for old in [one for one, of in self._namespaces.items() if of.name == adapter.name]:
                    self._drop(old)
            self._namespaces[namespace] = adapter
        return True

    def forget(self) -> None:
        """Requests of this engine no longer find anything that was stored before."""
        with self._lock:
            for namespace in list(self._namespaces):
                self._drop(namespace)

    def _drop(self, namespace: bytes) -> None:
        del self._namespaces[namespace]
        for tier in self._tiers.values():
            for key in [key for key, chunk in tier.held.items() if chunk.namespace == namespace]:
                tier.removed(key)

    def knows(self, last: bytes) -> bool:
        """Whether the content of the chunk that ends with this block is known."""
        return last in self._contents

    def note(self, request: Request, begin: int, end: int) -> None:
        """Records the content of a request's chunk of the tokens `begin..end`."""
        size = self._group.hash_tokens
        hashes = request.block_hashes[begin // size : end // size]
        if len(hashes) != (end - begin) // size:
            return
        only_tokens = request.prompt_embeds is None and not request.mm_features and not request.cache_salt
        content = _Content(
            begin,
            b"".join(hashes),
            bytes(request.block_hashes[begin // size - 1]) if begin else b"",
            array("i", request.all_token_ids[begin:end]) if only_tokens else None,
        )
        last = bytes(hashes[-1])
        self._contents.pop(last, None)
        self._contents[last] = content
        if len(self._contents) > MAX_CONTENTS:
            del self._contents[next(iter(self._contents))]
        self._noted.append(last)

    # -- to vLLM

    @property
    def pending(self) -> bool:
        return any(tier.to_remove or tier.to_store for tier in self._tiers.values())

    def republish(self) -> None:
        """vLLM reported to routers that it removed all blocks of this worker. Publishes the content of the tiers
        again.
        """
        with self._lock:
            for tier in self._tiers.values():
                tier.republish(list(tier.held))

    def take_events(self) -> list[KVCacheEvent]:
        """The events of this step, removals first."""
        if not (self._noted or self.pending) or not self._lock.acquire(blocking=False):
            return []
        try:
            self._republish_noted()
            events: list[KVCacheEvent] = []
            for tier in self._tiers.values():
                events += self._removals(tier)
            for tier in self._tiers.values():
                if not tier.to_remove:
                    events += self._stores(tier)
            return events
        finally:
            self._lock.release()

    def _republish_noted(self) -> None:
        """Publishes chunks whose tokens became known through a request: those published without tokens, and unpublished
        ones.
        """
        while self._noted:
            last = self._noted.popleft()
            for namespace in self._namespaces:
                key = namespace + last
                for tier in self._tiers.values():
                    if key in tier.without_tokens:
                        if self._has_tokens(tier.published[key]):
                            tier.republish((key,))
                    elif key in tier.held and key not in tier.published:
                        tier.to_store[key] = None

    def _removals(self, tier: _Tier) -> list[KVCacheEvent]:
        removed: list[Any] = []
        for key in list(tier.to_remove)[:_REMOVED_PER_STEP]:
            del tier.to_remove[key]
            tier.without_tokens.discard(key)
            for block in self._external(self._hashes(tier.published.pop(key))):
                left = tier.blocks.pop(block, 1) - 1
                if left:
                    tier.blocks[block] = left
                else:
                    removed.append(block)
        if not removed:
            return []
        fields = {"block_hashes": removed, "medium": tier.medium, "locality": tier.locality}
        return [BlockRemoved(**_known(fields | {"group_idx": self._group.index}, _REMOVED_FIELDS))]

    def _stores(self, tier: _Tier) -> list[KVCacheEvent]:
        events: list[KVCacheEvent] = []
        keys = list(tier.to_store)[:_STORED_PER_STEP]
        for key in keys:
            del tier.to_store[key]
        for chunk in sorted((tier.held[key] for key in keys), key=lambda chunk: chunk.first_token):
            if chunk.key not in tier.published:
                events += self._store(tier, chunk)
        return events

    def _store(self, tier: _Tier, chunk: _Chunk) -> list[BlockStored]:
        """Empty if the chunk's position in a prefix tree is unknown. It is published once a request names it."""
        hashes, content = self._hashes(chunk), self._content(chunk)
        parent = chunk.parent or (content.parent if content is not None else b"")
        if len(hashes) * self._group.hash_tokens != chunk.tokens * HASH_BYTES or (chunk.first_token and not parent):
            return []
        before = self._convert(parent) if chunk.first_token else None
        if before is not None and before not in tier.blocks:
            # Routers could not reach it in the tree, and llm-d drops blocks behind an unknown one.
            if len(tier.orphans) >= MAX_CHUNKS:
                tier.orphans.clear()
            tier.orphans.setdefault(before, {})[chunk.key] = None
            return []
        token_ids = content.token_ids if content is not None else None
        tier.published[chunk.key] = chunk._replace(hashes=hashes)
        if token_ids is None:
            tier.without_tokens.add(chunk.key)
        blocks = self._external(hashes)
        chain = [before, *blocks]
        events, run = [], 0
        for at, block in enumerate(blocks):
            count = tier.blocks.get(block, 0)
            tier.blocks[block] = count + 1
            if count:
                if run < at:
                    events.append(self._run(tier, chunk, chain, run, at, token_ids))
                run = at + 1
        if run < len(blocks):
            events.append(self._run(tier, chunk, chain, run, len(blocks), token_ids))
        tier.enqueue_children(blocks[-1])
        return events

    def _run(
        self, tier: _Tier, chunk: _Chunk, chain: list[Any], begin: int, end: int, token_ids: array[int] | None
    ) -> BlockStored:
        """The event of the chunk's blocks `begin..end`. `chain`: the parent, then all blocks."""
        size, adapter = self._group.block_tokens, self._namespaces[chunk.namespace]
        fields = {
            "block_hashes": chain[begin + 1 : end + 1],
            "parent_block_hash": chain[begin],
            "token_ids": token_ids[begin * size : end * size].tolist() if token_ids is not None else [],
            "block_size": size,
            "lora_id": adapter.id,
            "medium": tier.medium,
            "lora_name": adapter.name,
            "group_idx": self._group.index,
            "kv_cache_spec_kind": self._group.kind,
            "kv_cache_spec_sliding_window": self._group.window,
            "locality": tier.locality,
        }
        return BlockStored(**_known(fields, _STORED_FIELDS))

    def _content(self, chunk: _Chunk) -> _Content | None:
        content = self._contents.get(chunk.hash)
        if content is None or content.first_token != chunk.first_token:
            return None
        return content if len(content.hashes) * self._group.hash_tokens == chunk.tokens * HASH_BYTES else None

    def _has_tokens(self, chunk: _Chunk) -> bool:
        content = self._content(chunk)
        return content is not None and content.token_ids is not None

    def _hashes(self, chunk: _Chunk) -> bytes:
        """Hashes of the chunk's blocks, from the sidecar or from a request."""
        content = None if chunk.hashes else self._content(chunk)
        return content.hashes if content is not None else chunk.hashes

    def _external(self, packed: bytes) -> list[Any]:
        """Hashes of the group's blocks as in vLLM's events: for each block, that of its last hash block."""
        step = self._group.block_tokens // self._group.hash_tokens * HASH_BYTES
        ends = range(step, len(packed) + 1, step)
        return [self._convert(packed[end - HASH_BYTES : end]) for end in ends]

    @staticmethod
    def _convert(one: bytes) -> Any:
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        return maybe_convert_block_hash(one)


def _known(fields: dict[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """The fields that this vLLM's event has."""
    return {name: value for name, value in fields.items() if name in known}

"""KV events for routers: what this pod's cache holds beside the GPU, in vLLM's own event types.

The feed compares what the sidecar holds with what routers were told, and tells the difference. So a lost stretch of the
sidecar's events is repaired from a snapshot by the same code that tells changes, and nothing queues up without bound.
Chunks may overlap: a block is told with its first chunk and taken back with its last.
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

#: (medium, locality) by tier. Redis and S3 are shared: other pods and the servers themselves remove objects there, and
#: a claim that nobody takes back would be false.
_PLACES = {"memory": ("CPU", "LOCAL"), "disk": ("STORAGE", "LOCAL")}
#: Chunks per tier that routers are told of, about 2 KiB each; chunks beyond that are not told.
MAX_CHUNKS = 65_536
#: Chunks whose tokens are kept, about 2 KiB each; the oldest go first, and are told without tokens if they come again.
MAX_CONTENTS = 16_384
#: Chunks told in one step: a step's share of the engine's thread stays in the order of a millisecond.
_STORED_PER_STEP = 64
_REMOVED_PER_STEP = 256
#: Kinds of KV groups whose blocks routers put into their prefix trees.
_PREFIX_KINDS = ("full_attention", "mla_attention", "sink_full_attention")
_STORED_FIELDS = frozenset(BlockStored.__struct_fields__)
_REMOVED_FIELDS = frozenset(BlockRemoved.__struct_fields__)


@dataclass(frozen=True)
class EventGroup:
    """The KV group that events are about: blocks of the others are there wherever its blocks are, or are not needed."""

    index: int
    kind: str | None
    window: int | None
    block_tokens: int
    hash_tokens: int


def event_group(kv_cache_config: KVCacheConfig, geometry: Geometry) -> EventGroup:
    """The first group of a kind that routers index, else the first one."""
    kinds: list[tuple[str | None, int | None]] = []
    for group in kv_cache_config.kv_cache_groups:
        try:
            from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

            spec = group.kv_cache_spec
            kinds.append((get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec)))
        except ImportError:  # this version's events do not tell the kind
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
    """What a request of this process said of a chunk. No `token_ids`: the block hashes are of more than tokens."""

    first_token: int
    hashes: bytes
    parent: bytes
    token_ids: array[int] | None


class _Tier:
    """Chunks that a tier holds, chunks that routers were told of, and the keys of what is still to be told."""

    def __init__(self, medium: str, locality: str) -> None:
        self.medium = medium
        self.locality = locality
        self.held: dict[bytes, _Chunk] = {}
        self.told: dict[bytes, _Chunk] = {}
        self.bare: set[bytes] = set()  # told without tokens
        self.blocks: dict[Any, int] = {}  # told chunks by block
        self.orphans: dict[Any, dict[bytes, None]] = {}  # by the block before them, which is not told
        self.came: dict[bytes, None] = {}
        self.gone: dict[bytes, None] = {}

    def stored(self, chunk: _Chunk) -> bool:
        """False: there are too many."""
        key = chunk.key
        before = self.held.get(key)
        if before is None and len(self.held) >= MAX_CHUNKS:
            return False
        if before is None or (chunk.parent and not before.parent):
            self.held[key] = chunk
        if key not in self.told or key in self.gone:
            self.came[key] = None
        return True

    def adopt(self, block: Any) -> None:
        """The block is told: chunks behind it have a place now."""
        for key in self.orphans.pop(block, ()):
            if key in self.held and key not in self.told:
                self.came[key] = None

    def removed(self, key: bytes) -> None:
        self.held.pop(key, None)
        self.came.pop(key, None)
        if key in self.told:
            self.gone[key] = None

    def lose(self) -> None:
        """Nothing is known to be held."""
        self.held.clear()
        self.came.clear()
        self.gone.update(dict.fromkeys(self.told))

    def anew(self, keys: Iterable[bytes]) -> None:
        """Tells chunks again: a removal first, since routers count stores."""
        for key in keys:
            if key in self.held:
                self.told.setdefault(key, self.held[key])
                self.gone[key] = None
                self.came[key] = None


class EventFeed:
    """Fed by the client's reader, emptied by the engine's thread, which never waits for it."""

    def __init__(self, group: EventGroup) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._tiers = {name: _Tier(*place) for name, place in _PLACES.items()}
        self._namespaces: dict[bytes, Adapter] = {b"": Adapter()}
        self._contents: dict[bytes, _Content] = {}  # by hash of the last block; engine thread only
        self._noted: deque[bytes] = deque(maxlen=MAX_CONTENTS)
        self._told_before = False
        #: Chunks that were not told because of `MAX_CHUNKS`.
        self.over_limit = 0

    # -- from the sidecar, on the reader's thread

    def apply(self, events: Iterable[Event]) -> None:
        """Takes changes, in order."""
        with self._lock:
            for event in events:
                tier = self._tiers.get(event.tier)
                if tier is None:
                    continue
                if event.kind == "cleared":
                    tier.lose()
                    continue
                chunk = self._chunk(event)
                if chunk is None:
                    continue
                if event.kind == "stored":
                    self.over_limit += not tier.stored(chunk)
                elif event.kind == "removed":
                    tier.removed(chunk.key)

    def replace(self, events: Iterable[Event]) -> None:
        """Takes a snapshot: all that is held now."""
        there: dict[str, dict[bytes, _Chunk]] = {name: {} for name in self._tiers}
        for event in sorted(events, key=lambda event: event.first_token):  # parents first
            chunk = self._chunk(event)
            if chunk is not None and event.tier in there:
                there[event.tier][chunk.key] = chunk
        with self._lock:
            for name, tier in self._tiers.items():
                for key in [key for key in tier.held if key not in there[name]]:
                    tier.removed(key)
                for chunk in there[name].values():
                    if chunk.namespace in self._namespaces:
                        self.over_limit += not tier.stored(chunk)
            if not self._told_before:
                # A router may remember what this pod told before vLLM was started again.
                self._told_before = True
                for tier in self._tiers.values():
                    tier.anew(list(tier.held))

    def lose(self) -> None:
        """The sidecar is away: its chunks cannot be loaded."""
        with self._lock:
            for tier in self._tiers.values():
                tier.lose()

    def _chunk(self, event: Event) -> _Chunk | None:
        """The chunk of an event, None if no request of this engine can name it."""
        if event.namespace not in self._namespaces or len(event.hash) != HASH_BYTES:
            return None
        return _Chunk(event.namespace, event.hash, event.block_hashes, event.parent, event.first_token, event.tokens)

    # -- from the scheduler

    def serve(self, namespace: bytes, adapter: Adapter) -> bool:
        """Requests of this engine can name chunks of a namespace from now on, and those of the adapter no others. True:
        the namespace is new, and chunks of it may be there already.
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
        """Requests of this engine find nothing of what was stored before."""
        with self._lock:
            for namespace in list(self._namespaces):
                self._drop(namespace)

    def _drop(self, namespace: bytes) -> None:
        del self._namespaces[namespace]
        for tier in self._tiers.values():
            for key in [key for key, chunk in tier.held.items() if chunk.namespace == namespace]:
                tier.removed(key)

    def knows(self, last: bytes) -> bool:
        """Whether the content of the chunk that ends with this block was noted."""
        return last in self._contents

    def note(self, request: Request, begin: int, end: int) -> None:
        """Keeps what a request says of its chunk of the tokens `begin..end`."""
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
        return any(tier.gone or tier.came for tier in self._tiers.values())

    def anew(self) -> None:
        """vLLM told its routers that all blocks of this worker are gone: what the tiers hold is told again."""
        with self._lock:
            for tier in self._tiers.values():
                tier.anew(list(tier.held))

    def take(self) -> list[KVCacheEvent]:
        """What is to be told in this step: removals first."""
        if not (self._noted or self.pending) or not self._lock.acquire(blocking=False):
            return []
        try:
            self._learn()
            events: list[KVCacheEvent] = []
            for tier in self._tiers.values():
                events += self._removals(tier)
            for tier in self._tiers.values():
                if not tier.gone:
                    events += self._stores(tier)
            return events
        finally:
            self._lock.release()

    def _learn(self) -> None:
        """Chunks that were told without tokens, or not at all, are told again once a request has named them."""
        while self._noted:
            last = self._noted.popleft()
            for namespace in self._namespaces:
                key = namespace + last
                for tier in self._tiers.values():
                    if key in tier.bare:
                        if self._has_tokens(tier.told[key]):
                            tier.anew((key,))
                    elif key in tier.held and key not in tier.told:
                        tier.came[key] = None

    def _removals(self, tier: _Tier) -> list[KVCacheEvent]:
        removed: list[Any] = []
        for key in list(tier.gone)[:_REMOVED_PER_STEP]:
            del tier.gone[key]
            tier.bare.discard(key)
            for block in self._external(self._hashes(tier.told.pop(key))):
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
        keys = list(tier.came)[:_STORED_PER_STEP]
        for key in keys:
            del tier.came[key]
        for chunk in sorted((tier.held[key] for key in keys), key=lambda chunk: chunk.first_token):
            if chunk.key not in tier.told:
                events += self._store(tier, chunk)
        return events

    def _store(self, tier: _Tier, chunk: _Chunk) -> list[BlockStored]:
        """Nothing where the chunk's place in a prefix tree is not known: it is told once a request names it."""
        hashes, content = self._hashes(chunk), self._content(chunk)
        parent = chunk.parent or (content.parent if content is not None else b"")
        if len(hashes) * self._group.hash_tokens != chunk.tokens * HASH_BYTES or (chunk.first_token and not parent):
            return []
        before = self._convert(parent) if chunk.first_token else None
        if before is not None and before not in tier.blocks:
            # A walk through the tree would not come here, and llm-d drops blocks behind one that it does not know.
            if len(tier.orphans) >= MAX_CHUNKS:
                tier.orphans.clear()
            tier.orphans.setdefault(before, {})[chunk.key] = None
            return []
        token_ids = content.token_ids if content is not None else None
        tier.told[chunk.key] = chunk._replace(hashes=hashes)
        if token_ids is None:
            tier.bare.add(chunk.key)
        blocks = self._external(hashes)
        chain = [before, *blocks]
        events, run = [], 0
        for at, block in enumerate(blocks):
            told = tier.blocks.get(block, 0)
            tier.blocks[block] = told + 1
            if told:
                if run < at:
                    events.append(self._run(tier, chunk, chain, run, at, token_ids))
                run = at + 1
        if run < len(blocks):
            events.append(self._run(tier, chunk, chain, run, len(blocks), token_ids))
        tier.adopt(blocks[-1])
        return events

    def _run(
        self, tier: _Tier, chunk: _Chunk, chain: list[Any], begin: int, end: int, token_ids: array[int] | None
    ) -> BlockStored:
        """The event of the chunk's blocks `begin..end`; `chain`: the parent, then all blocks."""
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
        """Hashes of the chunk's blocks, where the sidecar keeps them or a request said them."""
        content = None if chunk.hashes else self._content(chunk)
        return content.hashes if content is not None else chunk.hashes

    def _external(self, packed: bytes) -> list[Any]:
        """Hashes of the group's blocks as vLLM's events have them: of each, the last hash block's."""
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

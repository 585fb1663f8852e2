"""The feed of KV events alone: for any events in any order, routers end with exactly the held blocks."""

from __future__ import annotations

import hashlib
import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, ZmqEventPublisher

from kvcachepool import kv_events
from kvcachepool.kv_events import Adapter, EventFeed, EventGroup
from kvcachepool.messages import Event
from servers.paths import free_port
from servers.routers import Dynamo, LlmD, Publisher, Subscriber
from servers.waiting import wait_for

BLOCK, CHUNK = 4, 16
GROUP = EventGroup(0, "full_attention", None, BLOCK, BLOCK)


class Prompt:
    """Tokens with the hashes of their blocks, and the chunks that a sidecar would have."""

    def __init__(self, seed: int, tokens: int, base: Prompt | None = None) -> None:
        shared = base.tokens[: tokens // 2] if base is not None else []
        self.tokens = shared + [seed * 1000 + at for at in range(tokens - len(shared))]
        self.hashes: list[bytes] = []
        for end in range(BLOCK, tokens + 1, BLOCK):
            before = self.hashes[-1] if self.hashes else b""
            self.hashes.append(hashlib.sha256(before + repr(self.tokens[end - BLOCK : end]).encode()).digest())

    def chunks(self) -> list[tuple[int, int]]:
        """(first token, end): full chunks and a tail."""
        ends = [*range(CHUNK, len(self.tokens) + 1, CHUNK), len(self.tokens) // BLOCK * BLOCK]
        return [(at * CHUNK, end) for at, end in enumerate(ends) if end > at * CHUNK]

    def event(self, chunk: tuple[int, int], kind: str = "stored", **more: Any) -> Event:
        """The sidecar's event about a chunk."""
        begin, end = chunk
        values: dict[str, Any] = {
            "tier": "memory",
            "block_hashes": b"".join(self.hashes[begin // BLOCK : end // BLOCK]),
            "parent": self.hashes[begin // BLOCK - 1] if begin else b"",
            "tokens": end - begin,
            "hash": self.hashes[end // BLOCK - 1],
            "first_token": begin,
        }
        return Event(kind=kind, **values | more)

    @property
    def request(self) -> Any:
        """The fields of a request that the feed reads."""
        return SimpleNamespace(
            block_hashes=self.hashes, all_token_ids=self.tokens, prompt_embeds=None, mm_features=[], cache_salt=None
        )

    def note(self, feed: EventFeed) -> None:
        """A request names all chunks."""
        for begin, end in self.chunks():
            feed.note(self.request, begin, end)


def deliver(feed: EventFeed, publisher: Publisher, *first: Any) -> list[Any]:
    """One step of vLLM: its own events, then the feed's. Returns the feed's."""
    events = feed.take_events()
    publisher.publish(KVEventBatch(ts=0.0, events=[*first, *events]))
    return events


def all_of(feed: EventFeed, publisher: Publisher) -> list[Any]:
    """Steps until nothing is left to publish."""
    reported = []
    while feed.pending:
        reported += deliver(feed, publisher)
    return reported


@pytest.mark.parametrize("seed", range(40))
def test_routers_end_with_exactly_what_is_held(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "_STORED_PER_STEP", 3)
    monkeypatch.setattr(kv_events, "_REMOVED_PER_STEP", 2)
    chosen = random.Random(seed)
    feed, publisher = EventFeed(GROUP), Publisher(LlmD(), Dynamo(BLOCK))
    prompts: list[Prompt] = []
    for number in range(6):
        prompts.append(Prompt(number, chosen.randrange(12, 90), chosen.choice([None, *prompts])))
        prompts[-1].note(feed)
    chunks = [(one, chunk) for one in prompts for chunk in one.chunks()]
    held: dict[bytes, Event] = {}
    feed.replace([])
    for _ in range(200):
        act = chosen.random()
        one, chunk = chosen.choice(chunks)
        event = one.event(chunk)
        if act < 0.4:
            held[event.hash] = event
            feed.apply([event] * chosen.randrange(1, 3))
        elif act < 0.65:
            held.pop(event.hash, None)
            feed.apply([one.event(chunk, "removed", block_hashes=b"", parent=b"")])
        elif act < 0.7:  # lost events
            for each in chosen.sample(chunks, 3):
                held.pop(each[0].event(each[1]).hash, None)
            feed.replace(list(held.values()))
        elif act < 0.72:
            held.clear()
            feed.clear()
        elif act < 0.74:
            feed.republish()
            deliver(feed, publisher, AllBlocksCleared())
        else:
            deliver(feed, publisher)
    all_of(feed, publisher)
    blocks = {
        event.block_hashes[at : at + 32] for event in held.values() for at in range(0, len(event.block_hashes), 32)
    }
    for one in prompts:
        there = next((at for at, one_hash in enumerate(one.hashes) if one_hash not in blocks), len(one.hashes))
        assert [router.blocks(one.tokens, BLOCK, "CPU") for router in publisher.routers] == [there, there]
    feed.clear()
    all_of(feed, publisher)
    llm_d, dynamo = publisher.routers
    assert isinstance(llm_d, LlmD)
    assert isinstance(dynamo, Dynamo)
    assert not any(llm_d.entries.values())
    assert not llm_d.counts
    assert not dynamo.owned.get("CPU")


def test_lost_batches_leave_no_false_block_in_a_router() -> None:
    chosen = random.Random(7)
    port, replay = free_port(), f"tcp://127.0.0.1:{free_port()}"
    vllm = ZmqEventPublisher(0, f"tcp://*:{port}", replay)
    feed, routers = EventFeed(GROUP), Publisher(LlmD(), Dynamo(BLOCK))
    subscriber = Subscriber(f"tcp://127.0.0.1:{port}", replay, routers)
    prompts = [Prompt(number, 70) for number in range(4)]
    held: set[bytes] = set()
    published = 0
    try:
        for one in prompts:
            one.note(feed)
        for _ in range(60):
            one = chosen.choice(prompts)
            event = one.event(chosen.choice(one.chunks()))
            if event.hash in held:
                held.remove(event.hash)
                feed.apply([Event(kind="removed", tier="memory", hash=event.hash, tokens=event.tokens)])
            else:
                held.add(event.hash)
                feed.apply([event])
            while feed.pending:
                vllm.publish(KVEventBatch(ts=0.0, events=feed.take_events()))
                published += 1
            subscriber.receive(lambda: chosen.random() < 0.3)
        wait_for(lambda: (subscriber.catch_up(), subscriber.next == published)[1], 10, "every batch")
    finally:
        subscriber.stop()
        vllm.shutdown()
    assert subscriber.gaps > 5
    for one in prompts:
        there = 0
        for _, end in one.chunks():
            if one.hashes[end // BLOCK - 1] not in held:
                break
            there = end // BLOCK
        assert [router.blocks(one.tokens, BLOCK, "CPU") for router in routers.routers] == [there, there]


def test_a_chunk_with_an_unknown_parent_waits_for_a_request_that_names_it() -> None:
    feed, publisher, one = EventFeed(GROUP), Publisher(LlmD(), Dynamo(BLOCK)), Prompt(1, 32)
    first, second = one.chunks()
    feed.apply([one.event(second, parent=b"")])
    assert all_of(feed, publisher) == []
    feed.apply([one.event(first, block_hashes=b"")])
    assert all_of(feed, publisher) == []
    one.note(feed)
    deliver(feed, publisher)
    all_of(feed, publisher)
    assert [router.blocks(one.tokens, BLOCK, "CPU") for router in publisher.routers] == [8, 8]


def test_chunks_of_unknown_namespaces_are_not_published() -> None:
    feed, publisher, one = EventFeed(GROUP), Publisher(LlmD(), Dynamo(BLOCK)), Prompt(1, 16)
    old, new = b"o" * 32, b"n" * 32
    chunk = one.chunks()[0]
    feed.apply([one.event(chunk, namespace=old)])
    assert all_of(feed, publisher) == []
    assert feed.serve(old, Adapter(1, "a"))
    assert not feed.serve(old, Adapter(1, "a"))
    feed.apply([one.event(chunk, namespace=old)])
    (stored,) = all_of(feed, publisher)
    assert isinstance(stored, BlockStored)
    assert (stored.lora_id, stored.lora_name) == (1, "a")
    assert feed.serve(new, Adapter(1, "a")), "the adapter was replaced"
    (removed,) = all_of(feed, publisher)
    assert isinstance(removed, BlockRemoved)
    assert removed.block_hashes == stored.block_hashes


def test_tokens_are_published_only_if_the_hashes_cover_only_tokens() -> None:
    feed, publisher, one = EventFeed(GROUP), Publisher(), Prompt(1, 16)
    request = one.request
    request.mm_features = [object()]
    feed.note(request, 0, 16)
    feed.apply([one.event((0, 16))])
    (event,) = all_of(feed, publisher)
    assert event.token_ids == []


def test_blocks_of_a_group_are_named_by_their_last_hash_block() -> None:
    feed, publisher, one = EventFeed(EventGroup(1, "full_attention", None, 8, BLOCK)), Publisher(), Prompt(1, 32)
    one.note(feed)
    feed.apply([one.event(chunk) for chunk in one.chunks()])
    first, second = all_of(feed, publisher)
    whole = [int.from_bytes(one.hashes[at][-8:], "big") for at in (1, 3, 5, 7)]
    assert [*first.block_hashes, *second.block_hashes] == whole
    assert second.parent_block_hash == whole[1]
    assert (first.block_size, first.token_ids) == (8, one.tokens[:16])


def test_the_records_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_CHUNKS", 3)
    monkeypatch.setattr(kv_events, "MAX_CONTENTS", 2)
    feed, publisher, one = EventFeed(GROUP), Publisher(), Prompt(1, 160)
    one.note(feed)
    assert len(feed._contents) == 2
    feed.apply([one.event(chunk) for chunk in one.chunks()])
    assert feed.over_limit == 7
    assert len(all_of(feed, publisher)) == 3
    feed.apply([one.event(one.chunks()[9], "removed")])
    assert all_of(feed, publisher) == []

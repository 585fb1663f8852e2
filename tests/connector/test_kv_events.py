"""KV events: routers rebuild from vLLM's stream exactly what the pool can load, whatever was lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from engine_loop import Loop, prompt
from steps import serving
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvcachepool import reporter
from kvcachepool.wire import Op
from servers.pod import settle as wait_settled
from servers.routers import Dynamo, LlmD, Publisher
from servers.sidecar import Sidecar
from servers.waiting import wait_for

Make = Callable[..., Loop]
BLOCK = 16
#: A chunk of one block takes a whole row of the arena: 1,024 of them fill the smallest one.
SMALL = {"cache": {"chunkTokens": BLOCK, "minLoadTokens": 64}}
UNSTORED = {"kvcachepool.store": False}


class Watched:
    """An engine whose KV events reach two routers, and prompts whose published blocks are compared with loadable
    ones.
    """

    def __init__(self, engine: Loop, pool: Sidecar, *routers: LlmD | Dynamo) -> None:
        self.engine = serving(engine, pool)
        self.pool = pool
        self.routers = routers or (LlmD(), Dynamo(BLOCK))
        self.publisher = Publisher(*self.routers)
        engine.scheduler.kv_event_publisher = self.publisher  # type: ignore[assignment]
        self._prompts_run = 0

    def generate(self, tokens: list[int], **more: Any) -> int:
        """Runs a prompt. Returns the tokens that came from the pool."""
        self._prompts_run += 1
        return self.engine.generate(f"prompt{self._prompts_run}", tokens, **more)

    def store(self, *prompts: list[int], **more: Any) -> None:
        """Runs prompts and waits until the pool has all of their chunks."""
        for tokens in prompts:
            self.generate(tokens, **more)
            self.engine.forget_local()
            wait_settled(self.pool)

    def loadable(self, tokens: list[int], **more: Any) -> int:
        """Blocks of a prompt that the engine loads from the pool."""
        self.engine.forget_local()
        return self.generate(tokens, params=UNSTORED, **more) // BLOCK

    def claims(self, tokens: list[int], medium: str = "CPU") -> list[int]:
        """Blocks of a prompt that each router assigns to this worker."""
        return [router.blocks(tokens, BLOCK, medium) for router in self.routers]

    def become(self, expected: dict[int, int], prompts: list[list[int]], medium: str = "CPU") -> None:
        """Steps until the routers have the expected blocks of each prompt."""
        wanted = [[expected[at]] * len(self.routers) for at in range(len(prompts))]

        def now() -> list[list[int]]:
            return [self.claims(tokens, medium) for tokens in prompts]

        try:
            self.engine.until(lambda: now() == wanted, what="routers know what is resident")
        except AssertionError:
            assert now() == wanted
            raise

    def truth_of(self, prompts: list[list[int]]) -> dict[int, int]:
        """The loadable blocks of each prompt."""
        return {at: self.loadable(tokens) for at, tokens in enumerate(prompts)}

    def settle(self, prompts: list[list[int]]) -> dict[int, int]:
        """Waits until routers have exactly the resident blocks. Returns them."""
        truth = self.truth_of(prompts)
        self.become(truth, prompts)
        return truth

    @property
    def reporter(self) -> reporter.Reporter:
        """The part of the connector under test."""
        assert self.engine.connector._scheduler is not None
        return self.engine.connector._scheduler.session.reporter


@pytest.fixture
def small(volume: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sidecar]:
    """A sidecar with space for few tokens and few events."""
    sidecar = Sidecar(volume, memory="64Mi", config=SMALL | {"limits": {"events": 16}})
    sidecar.accept_clear()
    monkeypatch.setenv("KVCACHEPOOL_SOCKET", str(sidecar.socket))
    sidecar.start()
    yield sidecar
    sidecar.stop()


def large(*seeds: int) -> list[list[int]]:
    """Prompts of which about six fill the small sidecar."""
    return [prompt(2600 + 48 * seed, seed) for seed in seeds]


def of_pool(events: list[Any]) -> list[Any]:
    """Events of media other than the GPU."""
    return [event for event in events if getattr(event, "medium", "GPU") != "GPU"]


def test_stored_blocks_have_vllms_parent_tokens_and_medium(pool: Sidecar, loop: Make) -> None:
    watched = Watched(loop(events=True), pool)
    tokens = prompt(200, 1)
    request = watched.engine.add("one", tokens)
    watched.engine.run("one")
    watched.become({0: 12}, [tokens])
    hashes = [maybe_convert_block_hash(one) for one in request.block_hashes]
    published = of_pool(watched.publisher.events)
    assert [block for event in published for block in event.block_hashes] == hashes[:12]
    for event in published:
        at = hashes.index(event.block_hashes[0])
        assert event.parent_block_hash == (hashes[at - 1] if at else None)
        assert event.token_ids == tokens[at * BLOCK : (at + len(event.block_hashes)) * BLOCK]
        assert (event.medium, event.locality, event.block_size) == ("CPU", "LOCAL", BLOCK)
        assert (event.group_idx, event.kv_cache_spec_kind, event.lora_name) == (0, "full_attention", None)


def test_events_of_hybrid_models_are_of_the_group_that_routers_index(pool: Sidecar, loop: Make) -> None:
    watched = Watched(loop(events=True, windows=True), pool)
    tokens = prompt(500, 1)
    watched.store(tokens)
    watched.settle([tokens])
    assert {event.group_idx for event in of_pool(watched.publisher.events)} == {0}


def test_overlapping_chunks_are_published_block_by_block(pool: Sidecar, loop: Make) -> None:
    watched = Watched(loop(events=True), pool)
    turns = [prompt(900, 1)[:end] for end in (100, 300, 450, 900)]
    watched.store(*turns)
    watched.settle(turns)
    published: set[int] = set()
    for event in of_pool(watched.publisher.events):
        assert not isinstance(event, BlockStored) or published.isdisjoint(event.block_hashes)
        (published.update if isinstance(event, BlockStored) else published.difference_update)(event.block_hashes)
    assert len(published) == 56


def test_routers_follow_evictions(small: Sidecar, loop: Make) -> None:
    watched = Watched(loop(events=True), small)
    prompts = large(*range(7))
    watched.store(*prompts)
    truth = watched.settle(prompts)
    assert min(truth.values()) < max(truth.values()), "some were evicted, and some were not"
    assert small.metrics().total("kvcachepool_evicted_chunks") > 0
    assert any(isinstance(event, BlockRemoved) for event in of_pool(watched.publisher.events))


def test_an_overflowed_ring_is_repaired_from_a_snapshot(
    small: Sidecar, loop: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(loop(events=True), small)
    prompts = [prompt(400, seed) for seed in range(3)]
    watched.store(prompts[0])
    watched.settle(prompts[:1])
    held: list[Callable[[], Any]] = []
    send = reporter.Reporter._request_events
    monkeypatch.setattr(reporter.Reporter, "_request_events", lambda *arguments: held.append(lambda: send(*arguments)))
    small.clear()
    watched.store(*prompts[1:])
    wait_for(lambda: held, 20, "a poll that is held back")
    monkeypatch.undo()
    monkeypatch.setenv("KVCACHEPOOL_SOCKET", str(small.socket))
    held[0]()
    assert watched.settle(prompts) == {0: 0, 1: 25, 2: 25}
    lost = {"event": "events_lost"}
    wait_for(lambda: small.metrics().total("kvcachepool_connector_events", **lost) >= 1, 10, "the loss counted")
    assert not any(isinstance(event, AllBlocksCleared) for event in of_pool(watched.publisher.events))


def test_a_probe_lost_with_its_connection_is_sent_again(pool: Sidecar, loop: Make) -> None:
    watched = Watched(loop(events=True), pool)
    prompts = [prompt(500 + 37 * seed, seed) for seed in range(4)]
    scheduler = watched.engine.connector._scheduler
    assert scheduler is not None
    for tokens in prompts:
        watched.generate(tokens)
        scheduler._client._break()
        serving(watched.engine, pool)
        watched.engine.forget_local()
    wait_settled(pool)
    watched.settle(prompts)
    assert pool.metrics().total("kvcachepool_connector_events", event="events_lost") == 0


def test_a_restarted_sidecar_sends_a_snapshot(small: Sidecar, loop: Make) -> None:
    watched = Watched(loop(events=True), small)
    prompts = [prompt(500, seed) for seed in range(4)]
    watched.store(*prompts)
    before = watched.settle(prompts)
    assert min(before.values()) > 0
    scheduler = watched.engine.connector._scheduler
    assert scheduler is not None
    connection = scheduler._client.connection
    small.kill_engine()
    wait_for(lambda: scheduler._client.connection > connection, 20, "connected again")
    serving(watched.engine, small)
    more = [prompt(900, seed) for seed in range(4, 8)]
    watched.store(*more)
    watched.settle([*prompts, *more])


def test_no_block_is_published_while_the_sidecar_is_disconnected(
    pool: Sidecar, loop: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter, "_AWAY_S", 0.5)
    watched = Watched(loop(events=True), pool)
    tokens = prompt(500, 1)
    watched.store(tokens)
    assert watched.settle([tokens]) == {0: 31}
    pool.stop()
    watched.become({0: 0}, [tokens])
    pool.start()
    serving(watched.engine, pool)
    watched.settle([tokens])
    watched.store(tokens)
    assert watched.settle([tokens]) == {0: 31}


def test_a_restarted_vllm_publishes_what_memory_still_holds(pool: Sidecar, loop: Make) -> None:
    llm_d = LlmD()
    first = Watched(loop(events=True, engine_id="one"), pool, llm_d)
    prompts = [prompt(500, seed) for seed in range(3)]
    first.store(*prompts)
    first.settle(prompts)
    llm_d.restart()
    second = Watched(loop(events=True, engine_id="two"), pool, llm_d)
    # No request has reached this process yet: the router knows the hashes from before.
    second.become(dict.fromkeys(range(3), 31), prompts)


def test_a_router_learns_tokens_of_chunks_from_the_first_request(pool: Sidecar, loop: Make) -> None:
    prompts = [prompt(500, seed) for seed in range(3)]
    Watched(loop(events=True, engine_id="one"), pool).store(*prompts)
    second = Watched(loop(events=True, engine_id="two"), pool)
    assert second.settle(prompts) == dict.fromkeys(range(3), 31)


def test_a_router_that_missed_a_restart_of_vllm_counts_no_block_twice(small: Sidecar, loop: Make) -> None:
    llm_d = LlmD()
    first = Watched(loop(events=True, engine_id="one"), small, llm_d)
    prompts = [prompt(600, seed) for seed in range(3)]
    first.store(*prompts)
    first.settle(prompts)
    second = Watched(loop(events=True, engine_id="two"), small, llm_d)
    second.settle(prompts)
    small.clear()
    second.become(dict.fromkeys(range(3), 0), prompts)


def test_a_cache_reset_removes_all_published_blocks(pool: Sidecar, loop: Make) -> None:
    watched = Watched(loop(events=True), pool)
    tokens = prompt(500, 1)
    watched.store(tokens)
    watched.settle([tokens])
    watched.engine.connector.reset_cache()
    watched.become({0: 0}, [tokens])
    assert watched.loadable(tokens) == 0
    watched.store(tokens)
    assert watched.settle([tokens]) == {0: 31}


def test_tagged_chunks_are_not_published_for_plain_requests(pool: Sidecar, loop: Make) -> None:
    watched = Watched(loop(events=True), pool)
    tagged, salted, plain = (prompt(500, seed) for seed in range(3))
    watched.store(tagged, params={"kvcachepool.tags": "a"})
    watched.store(salted, cache_salt="red")
    watched.store(plain)
    assert watched.settle([tagged, salted, plain]) == {0: 0, 1: 0, 2: 31}


def test_the_disk_is_published_as_local_storage_and_removed(
    volume: Path, tmp_path: Path, loop: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Sidecar(volume, memory="64Mi", config=SMALL | {"disk": {"path": str(tmp_path), "size": "1Gi"}})
    pool.accept_clear()
    monkeypatch.setenv("KVCACHEPOOL_SOCKET", str(pool.socket))
    pool.start()
    try:
        wait_for(pool.tiers_ready, 20, "the disk is ready")
        watched = Watched(loop(events=True), pool)
        prompts = large(*range(7))
        blocks = {at: len(tokens) // BLOCK for at, tokens in enumerate(prompts)}
        for at, tokens in enumerate(prompts):
            watched.store(tokens)
            watched.become({0: blocks[at]}, [tokens], "STORAGE")
        watched.become(blocks, prompts, "STORAGE")
        assert pool.metrics().total("kvcachepool_evicted_chunks") > 0, "memory holds less than the disk"
        stored = [event for event in of_pool(watched.publisher.events) if isinstance(event, BlockStored)]
        assert {(event.medium, event.locality) for event in stored} == {("CPU", "LOCAL"), ("STORAGE", "LOCAL")}
        pool.clear()
        watched.become(dict.fromkeys(blocks, 0), prompts, "STORAGE")
        watched.become(dict.fromkeys(blocks, 0), prompts, "CPU")
    finally:
        pool.stop()


def test_without_kv_events_nothing_is_requested_or_kept(pool: Sidecar, loop: Make) -> None:
    engine = serving(loop(), pool)
    scheduler = engine.connector._scheduler
    assert scheduler is not None
    sent: list[Op] = []
    request = scheduler._client.request
    scheduler._client.request = lambda op, *more: sent.append(op) or request(op, *more)  # type: ignore[func-returns-value]
    engine.generate("one", prompt(500, 1))
    engine.forget_local()
    assert Op.GRANT in sent
    assert Op.EVENTS not in sent
    assert pool.metrics().total("kvcachepool_events_cursor") == 0
    assert list(engine.connector.take_events()) == []

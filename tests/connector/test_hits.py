"""The engine against the real sidecar, in sequences of vLLM's calls. Every byte that is read is checked."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

import torch
from engine_loop import Loop, prompt
from steps import CACHE, loads_of, serving

from servers.sidecar import Sidecar
from servers.waiting import wait_for

Make = Callable[..., Loop]


def stored(pool: Sidecar, chunks: int) -> None:
    """Waits until this many chunks were published in total."""
    try:
        wait_for(lambda: pool.metrics().total("kvcachepool_stored_chunks") >= chunks, 20, f"{chunks} chunks stored")
    except AssertionError as error:
        metrics = pool.metrics()
        counts = {
            name: metrics.by(f"kvcachepool_{name}", label)
            for name, label in (("grants", "result"), ("connector_events", "event"), ("slots", "state"))
        }
        raise AssertionError(f"{error}: {counts}") from None


def settled(pool: Sidecar) -> None:
    """Waits until everything that was stored is readable."""

    def none_pending() -> bool:
        slots = pool.metrics().by("kvcachepool_slots", "state")
        return slots["granted"] == slots["committed"] == 0

    wait_for(none_pending, 20, "stores readable")


def cold(engine: Loop, pool: Sidecar, tokens: list[int], name: str = "cold", **more: Any) -> None:
    """Stores a prompt and empties vLLM's own cache."""
    before = int(pool.metrics().total("kvcachepool_stored_chunks"))
    engine.generate(name, tokens, **more)
    engine.forget_local()
    stored(pool, before + -(-len(tokens) // 64) - (1 if len(tokens) % 64 < 16 and len(tokens) % 64 else 0))


def test_a_prompt_that_was_stored_is_loaded_whole(pool: Sidecar, loop: Make) -> None:
    engine = serving(loop(), pool)
    tokens = prompt(1024, 1)
    cold(engine, pool, tokens)
    assert engine.generate("warm", tokens) == 1024


def test_chunked_prefill_and_a_tail(pool: Sidecar, loop: Make) -> None:
    engine = serving(loop(step_tokens=100), pool)
    tokens = prompt(1000, 1)
    cold(engine, pool, tokens)
    assert engine.generate("warm", tokens) == 992


def test_counts_are_conserved(pool: Sidecar, loop: Make) -> None:
    engine = serving(loop(), pool)
    tokens = prompt(500, 1)
    cold(engine, pool, tokens)
    engine.generate("warm", tokens)
    wait_for(lambda: pool.metrics().total("kvcachepool_requested_tokens") == 1000, 10, "both admissions reported")
    metrics = pool.metrics()
    assert metrics.total("kvcachepool_hit_tokens", tier="memory") == 496
    assert metrics.total("kvcachepool_hit_tokens") + metrics.total("kvcachepool_miss_tokens") == 1000


def test_another_engine_finds_what_the_first_stored(pool: Sidecar, loop: Make) -> None:
    tokens = prompt(512, 1)
    cold(serving(loop(engine_id="one"), pool), pool, tokens)
    second = serving(loop(engine_id="two"), pool)
    assert second.generate("warm", tokens) == 512


def test_hybrid_groups(pool: Sidecar, loop: Make) -> None:
    engine = serving(loop(windows=True), pool)
    tokens = prompt(500, 1)
    cold(engine, pool, tokens)
    assert engine.generate("warm", tokens) == 496


def test_a_hit_ends_at_a_state(pool: Sidecar, loop: Make) -> None:
    """vLLM has states where a step ended: at 160, 320 and 480 of 500 tokens, in blocks of 16."""
    engine = serving(loop(states=True, step_tokens=160), pool)
    tokens = prompt(500, 1)
    engine.generate("cold", tokens)
    engine.forget_local()
    stored(pool, 31)
    assert engine.generate("warm", tokens) == 480 + 16
    engine.forget_local()
    assert engine.generate("shorter", tokens[:400]) == 320
    engine.forget_local()
    other = tokens[:330] + prompt(100, 2)
    assert engine.generate("parted", other) == 320


def test_the_state_where_prompts_part_is_added_to_a_stored_chunk(pool: Sidecar, loop: Make) -> None:
    engine = serving(loop(states=True, step_tokens=512), pool)
    trunk = prompt(256, 1)
    engine.generate("first", trunk + prompt(100, 2))
    engine.drain()
    stored(pool, 22)
    # vLLM finds 256 tokens of KV and no state there. It computes the state, and stops for it.
    engine.generate("second", trunk + prompt(100, 3))
    engine.forget_local()
    settled(pool)
    assert engine.generate("third", trunk + prompt(100, 4)) == 256


def test_only_states_that_vllm_caches_are_stored(pool: Sidecar, loop: Make) -> None:
    engine = serving(loop(states=True, step_tokens=160, last_state_only=True), pool)
    tokens = prompt(500, 1)
    engine.generate("cold", tokens)
    engine.forget_local()
    stored(pool, 31)
    assert engine.generate("shorter", tokens[:400]) == 0
    engine.forget_local()
    assert engine.generate("warm", tokens) == 496


def test_a_state_of_replaced_weights_is_not_stored(pool: Sidecar, loop: Make) -> None:
    """vLLM's prefix cache still has the old one, before the request's own one of the same name."""
    engine = serving(loop(states=True), pool)
    tokens = prompt(330, 1)
    engine.generate("old", tokens)
    engine.drain()
    engine.reload_weights()
    engine.generate("new", tokens, skip_reading=True)
    engine.forget_local()
    settled(pool)
    assert engine.generate("warm", tokens) == 320


def test_prompts_with_a_common_beginning_load_at_once(pool: Sidecar, loop: Make) -> None:
    """A load leaves vLLM the state at its end only, so that no other request can use what it loaded."""
    engine = serving(loop(states=True), pool)
    trunk = prompt(256, 1)
    prompts = {f"chat{n}": trunk + prompt(100, 10 + n) for n in range(4)}
    for name, tokens in prompts.items():
        engine.generate(f"cold {name}", tokens)
    engine.forget_local()
    settled(pool)
    jobs = loads_of(engine)
    for name, tokens in prompts.items():
        engine.add(name, tokens)
    engine.hold_results = True
    scheduler = engine.connector._scheduler
    assert scheduler is not None

    def all_load() -> bool:
        assert not any(state.blocker for state in scheduler._states.values()), "a request waits for another one's load"
        return len(jobs) == 4

    engine.until(all_load, what="four loads in flight")
    engine.hold_results = False
    engine.run(*prompts)
    assert [engine.external[name] for name in prompts] == [352] * 4


def test_prompt_embeddings(pool: Sidecar, loop: Make) -> None:
    engine = serving(loop(), pool)
    one, two = torch.randn(256, 8), torch.randn(256, 8)
    engine.generate("one", [], prompt_embeds=one)
    engine.forget_local()
    stored(pool, 4)
    assert engine.generate("two", [], prompt_embeds=two) == 0
    engine.forget_local()
    assert engine.generate("one again", [], prompt_embeds=one) == 256


def test_two_equal_prompts_at_once(pool: Sidecar, loop: Make) -> None:
    engine = serving(loop(), pool)
    tokens = prompt(512, 1)
    cold(engine, pool, tokens)
    jobs = loads_of(engine)
    engine.add("one", tokens)
    engine.add("two", tokens)
    engine.run("one", "two")
    assert len(jobs) == 1


@pytest.mark.parametrize("steps", range(6))
def test_an_abort_at_every_stage_and_the_same_prompt_again(pool: Sidecar, loop: Make, steps: int) -> None:
    engine = serving(loop(step_tokens=128), pool)
    tokens = prompt(512, 1)
    free = engine.free_blocks()
    for turn in range(3):
        engine.add(f"aborted{turn}", tokens)
        for _ in range(steps):
            engine.step()
        if f"aborted{turn}" not in engine.done:
            engine.abort(f"aborted{turn}")
        engine.generate(f"again{turn}", tokens)
        engine.drain()
        engine.until(lambda: engine.free_blocks() == free, what="all blocks are free")
        assert engine.scheduler.reset_prefix_cache()


def test_an_abort_while_loading(pool: Sidecar, loop: Make) -> None:
    engine = serving(loop(), pool)
    tokens = prompt(512, 1)
    cold(engine, pool, tokens)
    free = engine.free_blocks()
    engine.hold_results = True
    engine.add("aborted", tokens)
    engine.step()
    engine.abort("aborted")
    engine.hold_results = False
    assert engine.generate("again", tokens) in (0, 512)
    engine.drain()
    engine.until(lambda: engine.free_blocks() == free, what="all blocks are free")
    wait_for(lambda: pool.metrics().total("kvcachepool_leases") == 0, 10, "leases ended")


@pytest.mark.parametrize("stage", ["arrived", "loading", "loaded", "storing", "stored"])
def test_the_connection_may_break_at_every_stage(pool: Sidecar, loop: Make, stage: str) -> None:
    engine = serving(loop(), pool)
    tokens = prompt(512, 1)
    scheduler = engine.connector._scheduler
    assert scheduler is not None
    free = engine.free_blocks()
    if stage in ("storing", "stored"):
        engine.add("cold", tokens)
        engine.step()
        if stage == "stored":
            engine.run("cold")
        scheduler._client._break()
        engine.run("cold")
    else:
        cold(engine, pool, tokens)
        engine.add("warm", tokens)
        if stage == "loading":
            engine.hold_results = True
            engine.step()
        elif stage == "loaded":
            engine.step()
            engine.step()
        scheduler._client._break()
        engine.hold_results = False
        engine.run("warm")
    engine.drain()
    serving(engine, pool)
    engine.until(lambda: engine.free_blocks() == free, what="all blocks are free")
    engine.forget_local()
    engine.generate("after", tokens)
    engine.forget_local()
    stored(pool, 8)
    assert engine.generate("at last", tokens) == 512


def test_the_sidecar_starts_later(volume: Path, loop: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Sidecar(volume, memory="64Mi", config=CACHE)
    monkeypatch.setenv("KVCACHEPOOL_SOCKET", str(pool.socket))
    engine = loop()
    tokens = prompt(512, 1)
    assert engine.generate("without", tokens) == 0
    engine.forget_local()
    pool.start()
    try:
        serving(engine, pool)
        cold(engine, pool, tokens, "with")
        assert engine.generate("warm", tokens) == 512
        wait_for(lambda: pool.metrics().total("kvcachepool_miss_tokens", reason="unconnected") == 512, 10, "counted")
    finally:
        pool.stop()


def test_a_restarted_sidecar_serves_what_was_stored_before(pool: Sidecar, loop: Make) -> None:
    engine = serving(loop(), pool)
    tokens = prompt(512, 1)
    cold(engine, pool, tokens)
    scheduler = engine.connector._scheduler
    assert scheduler is not None
    connection = scheduler._client.connection
    pool.kill_engine()
    wait_for(lambda: scheduler._client.connection > connection, 20, "connected again")
    serving(engine, pool)
    pool.wait_ready()
    found: list[int] = []

    def warm() -> bool:
        found.append(engine.generate(f"warm{len(found)}", tokens))
        engine.forget_local()
        return found[-1] == 512

    wait_for(warm, 20, "a hit after the restart")


def test_a_pool_that_stores_nothing_more_serves_what_it_has(pool: Sidecar, loop: Make) -> None:
    engine = serving(loop(), pool)
    tokens = prompt(512, 1)
    cold(engine, pool, tokens)
    scheduler = engine.connector._scheduler
    assert scheduler is not None
    pool.change({"cache": {"save": "None"}})
    pool.kill_engine()
    wait_for(lambda: scheduler._client.settings.save == "None", 20, "connected with the new settings")
    serving(engine, pool)
    pool.wait_ready()
    before = pool.metrics().total("kvcachepool_stored_chunks")
    assert engine.generate("warm", tokens) == 512
    engine.generate("other", prompt(512, 2))
    engine.drain()
    assert pool.metrics().total("kvcachepool_stored_chunks") == before


def test_bits_that_flip_in_memory_are_never_served(pool: Sidecar, loop: Make) -> None:
    engine = serving(loop(), pool)
    tokens = prompt(512, 1)
    cold(engine, pool, tokens)
    assert engine.generate("warm", tokens) == 512
    engine.forget_local()
    assert pool.flip_memory()
    # The loop compares every byte that attention would read.
    assert engine.generate("flipped", tokens) == 0
    engine.forget_local()
    assert pool.metrics().total("kvcachepool_corrupt_chunks_total") == 8
    stored(pool, 16)
    assert engine.generate("stored anew", tokens) == 512


def test_local_hits_are_neither_checked_nor_stored_again(pool: Sidecar, loop: Make) -> None:
    engine = serving(loop(), pool)
    tokens = prompt(512, 1)
    cold(engine, pool, tokens)
    assert engine.generate("warm", tokens) == 512

    def counted(name: str) -> float:
        return pool.metrics().total(f"kvcachepool_{name}")

    checks, grants = counted("checks"), counted("grants")
    longer = tokens + prompt(64, 2)
    assert engine.generate("local", longer) == 0
    engine.drain()
    stored(pool, 9)
    assert (counted("checks"), counted("grants")) == (checks, grants + 1)


def test_preemption_and_resumption(pool: Sidecar, loop: Make) -> None:
    engine = serving(loop(blocks=40, step_tokens=256), pool)
    names = [f"r{number}" for number in range(4)]
    for number, name in enumerate(names):
        engine.add(name, prompt(256, number), output=80)
    engine.run(*names, seconds=60)
    assert any(request.num_preemptions for request in engine.requests.values())
    engine.drain()


def test_reset_cache(pool: Sidecar, loop: Make) -> None:
    engine = serving(loop(), pool)
    tokens = prompt(512, 1)
    cold(engine, pool, tokens)
    engine.connector.reset_cache()
    assert engine.generate("after", tokens) == 0
    engine.forget_local()
    stored(pool, 16)
    assert engine.generate("stored anew", tokens) == 512


def test_kv_events(pool: Sidecar, loop: Make) -> None:
    from vllm.distributed.kv_events import BlockStored
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    engine = serving(loop(events=True), pool)
    taken: list[Any] = []
    original = engine.connector.take_events
    engine.connector.take_events = lambda: taken.extend(original()) or ()  # type: ignore[func-returns-value]
    request = engine.add("one", prompt(256, 1))
    engine.run("one")
    engine.drain()
    engine.until(lambda: sum(len(e.block_hashes) for e in taken if isinstance(e, BlockStored)) >= 16, what="events")
    hashes = {maybe_convert_block_hash(one) for one in request.block_hashes[:16]}
    assert {h for e in taken for h in e.block_hashes} == hashes
    assert {e.medium for e in taken} == {"CPU"}


@pytest.mark.parametrize("seed", range(10))
def test_random_histories_read_no_wrong_byte(pool: Sidecar, loop: Make, seed: int) -> None:
    chosen = random.Random(seed)
    states, scratch = seed >= 6, 2 if seed >= 8 else 0
    engine = serving(
        loop(blocks=120, step_tokens=200, windows=seed in (2, 5), states=states, scratch_states=scratch), pool
    )
    prompts = [prompt(chosen.randrange(70, 700), n) for n in range(6)]
    scheduler = engine.connector._scheduler
    assert scheduler is not None
    live: list[str] = []
    for turn in range(300):
        act = chosen.random()
        if act < 0.25 and len(live) < 6:
            base = chosen.choice(prompts)
            tokens = base[: chosen.randrange(40, len(base))] if act < 0.08 else base
            params = {"kvcachepool.tags": chosen.choice("ab")} if act < 0.04 else None
            live.append(f"r{turn}")
            engine.add(live[-1], tokens, output=chosen.randrange(1, 40), params=params, early=act > 0.1)
        elif act < 0.29 and live:
            engine.abort(live.pop(chosen.randrange(len(live))))
        elif act < 0.31:
            scheduler._client._break()
        elif act < 0.33 and not live:
            engine.scheduler.reset_prefix_cache()
        elif act < 0.335:
            engine.connector.reset_cache()
        elif act < 0.345:
            engine.scheduler.reset_prefix_cache()
        elif seed == 1 and turn == 150:
            pool.kill_engine()
        engine.hold_results = act > 0.97 or (engine.hold_results and act > 0.2)
        engine.step()
        live = [name for name in live if name not in engine.done]
    engine.hold_results = False
    engine.run(*live, seconds=60)
    engine.drain()
    total = engine.kv_cache_config.num_blocks - 1
    engine.until(lambda: engine.free_blocks() == total, what="all blocks are free")
    assert not engine.scheduler.requests
    assert not scheduler._states

"""A hybrid model: layers with full attention and layers with a window, two KV groups over one block pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from engine_loop import Loop, prompt
from scripted_pool import ScriptedPool
from steps import connected, loads_of

from kvcachepool.shared import NO_SLOT
from kvcachepool.wire import Op
from servers.waiting import wait_for

Make = Callable[..., Loop]


@pytest.fixture
def hybrid(volume: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedPool]:
    pool = ScriptedPool(volume, sections=2, rows=1024)
    monkeypatch.setenv("KVCACHEPOOL_SOCKET", pool.path)
    yield pool
    pool.close()


def test_a_hit_ends_one_token_before_the_prompt_and_at_a_chunk(hybrid: ScriptedPool, loop: Make) -> None:
    engine = connected(loop(windows=True))
    tokens = prompt(512, 1)
    engine.generate("cold", tokens)
    engine.forget_local()
    assert engine.generate("warm", tokens) == 448


def test_windows_of_chunks_far_back_are_not_needed_and_not_loaded(hybrid: ScriptedPool, loop: Make) -> None:
    engine = connected(loop(windows=True))
    tokens = prompt(500, 1)
    engine.generate("cold", tokens)
    engine.forget_local()
    jobs = loads_of(engine)
    assert engine.generate("warm", tokens) == 496
    full = [chunk.blocks[0] for chunk in jobs[0].chunks]
    window = [chunk.blocks[1] for chunk in jobs[0].chunks]
    assert all(all(blocks) for blocks in full)
    assert not any(any(blocks) for blocks in window[:5])
    assert any(window[-1])


def test_a_hit_ends_where_its_window_exists(hybrid: ScriptedPool, loop: Make) -> None:
    engine = connected(loop(windows=True))
    tokens = prompt(500, 1)
    engine.generate("cold", tokens)
    engine.forget_local()
    for sections in list(hybrid.chunks.values())[-2:]:
        sections[1] = (NO_SLOT, 0, 0)
    assert engine.generate("warm", tokens) == 384
    # no pending chunk contains it
    assert [frame.body["request"] for frame in hybrid.frames(Op.PROBE)] == ["cold", "warm"]


def test_a_failed_load_is_recomputed(hybrid: ScriptedPool, loop: Make) -> None:
    engine = connected(loop(windows=True))
    tokens = prompt(500, 1)
    engine.generate("cold", tokens)
    engine.forget_local()
    free = engine.free_blocks()
    assert hybrid.memory is not None
    hybrid.memory.bump(hybrid.slots()[-1])
    engine.generate("warm", tokens)
    engine.drain()
    assert engine.free_blocks() == free


def test_freed_blocks_are_not_stored(hybrid: ScriptedPool, loop: Make) -> None:
    full = [True]

    def no_room(frame: Any) -> bool:
        if full[0]:
            hybrid.late(frame, {"results": bytes([3] * len(frame.body["chunks"])), "refs": b""})
        return full[0]

    hybrid.on_grant = no_room
    engine = connected(loop(windows=True, step_tokens=64))
    engine.add("cold", prompt(500, 1), output=4000)
    for _ in range(12):
        engine.step()
    wait_for(hybrid.processed_all, 10, "all of these were refused")
    full[0] = False
    engine.until(lambda: len(hybrid.chunks) >= 7, what="the backlog is stored")
    first = next(iter(hybrid.chunks.values()))
    assert first[0][0] != NO_SLOT
    assert first[1][0] == NO_SLOT

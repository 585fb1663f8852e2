"""Common steps of tests of the scheduler side."""

from __future__ import annotations

from typing import Any

from engine_loop import Loop
from scripted_pool import ScriptedPool

from kvcachepool.wire import Op
from servers.sidecar import Sidecar
from servers.waiting import wait_for

#: Small chunks, so that short prompts have several.
CACHE = {"cache": {"chunkTokens": 64, "minLoadTokens": 64}}


def connected(engine: Loop) -> Loop:
    """An engine whose sides have both sent HELLO and whose worker has mapped the arena."""
    scheduler, worker = engine.connector._scheduler, engine.worker._worker
    assert scheduler is not None
    assert worker is not None
    wait_for(lambda: scheduler._client.connected and worker._mapping is not None, 20, "both sides connected")
    return engine


def serving(engine: Loop, pool: Sidecar) -> Loop:
    """An engine that is fully registered, so that the real sidecar answers its lookups."""
    connected(engine)
    instance = engine.config.kv_transfer_config.engine_id

    def ready() -> bool:
        mine = [s for s in pool.status()["sessions"] if s["instance"] == instance and s["connected"] and s["ready"]]
        return {one["role"] for one in mine} >= {"scheduler", "worker"}

    def populated() -> bool:
        memory = pool.status()["memory"]
        return bool(memory["populated_bytes"] and memory["populated_bytes"] == memory["capacity_bytes"])

    wait_for(ready, 30, "engine registered")
    wait_for(populated, 30, "arena populated")
    return engine


def reports(pool: ScriptedPool, name: str) -> dict[str, int]:
    """Sum over all REPORTs of one of their maps."""
    total: dict[str, int] = {}
    for frame in pool.frames(Op.REPORT):
        for key, value in frame.body.get(name, {}).items():
            total[key] = total.get(key, 0) + value
    return total


def requested(pool: ScriptedPool) -> int:
    """Requested tokens in all REPORTs."""
    return sum(frame.body.get("requested_tokens", 0) for frame in pool.frames(Op.REPORT))


def loads_of(engine: Loop) -> list[Any]:
    """Load jobs that are sent from now on."""
    seen: list[Any] = []
    engine.rewrite_metadata = lambda metadata: seen.extend(job for job in metadata.jobs if job.kind == "load")
    return seen

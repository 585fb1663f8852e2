"""vLLM's own tiered offloading without a GPU: the spec, its manager and the host memory are vLLM's. A test writes and
reads the rows of that memory, as a worker's copies do.

Run as a program, it loads chunks in a process of its own: `python offload_engine.py TIER-JSON NAME...`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

#: Bytes of a block and blocks of a chunk: not whole pages, so that vLLM pads its rows.
BLOCK_BYTES, CHUNK_BLOCKS = 25_000, 4
_numbers = itertools.count()


def key_of(name: str, group: int = 0) -> OffloadKey:
    """The key of a chunk, as vLLM makes it from the chained hash."""
    return make_offload_key(hashlib.sha256(name.encode()).digest(), group)


def content_of(name: str) -> bytes:
    """The bytes of a chunk, different for each name."""
    block = hashlib.sha256(name.encode()).digest()
    return (block * (BLOCK_BYTES * CHUNK_BLOCKS // len(block) + 1))[: BLOCK_BYTES * CHUNK_BLOCKS]


def config_of(tier: dict[str, Any], *, chunks: int = 64, events: bool = False, **change: Any) -> OffloadingConfig:
    """What vLLM gives its offloading, with one tier below host memory."""
    extra = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": chunks * (BLOCK_BYTES * CHUNK_BLOCKS + 4096),
        "secondary_tiers": [{"type": "KVCachePoolTier", "module_path": "kvcachepool.vllm_tier", **tier}],
    }
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layers.0", "layers.1"), 0),),
        worker_kv_bytes_per_block=BLOCK_BYTES,
        enable_kv_cache_events=events,
        extra_config=extra,
        engine_id=f"test-{os.getpid()}-{next(_numbers)}",
        model=OffloadingModelConfig("some/model", "bfloat16"),
        cache=OffloadingCacheConfig(16, CHUNK_BLOCKS),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
        kv_cache_layout="LBHNC",
    )
    return dataclasses.replace(config, **change)


class OffloadEngine:
    """One engine's manager and memory. `close` ends it as vLLM does."""

    def __init__(self, tier: dict[str, Any], **options: Any) -> None:
        config = config_of(tier, **options)
        spec: Any = OffloadingSpecFactory.create_spec(config)
        self.manager: Any = spec.get_manager()
        self.tier: Any = self.manager.secondary_tiers[0]
        self._region = SharedOffloadRegion(
            config.engine_id, spec.num_chunks, 0, spec.kv_bytes_per_chunk, spec.cpu_page_size_per_worker
        )
        self._rows: Any = self._region.create_next_worker_view(spec.cpu_page_size_per_worker)
        self._requests: dict[str, ReqContext] = {}

    def request(self, name: str) -> ReqContext:
        """A running request."""
        if name not in self._requests:
            self._requests[name] = ReqContext(req_id=name)
            self.manager.on_new_request(self._requests[name])
        return self._requests[name]

    def finish(self, name: str) -> None:
        """The request has ended."""
        self.manager.on_request_finished(self._requests.pop(name))

    def step(self) -> None:
        """The end of a step of the scheduler."""
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def settle(self, seconds: float = 20) -> None:
        """Steps until no job is in flight."""
        from servers.waiting import wait_for

        def settled() -> bool:
            self.step()
            return not self.manager.has_pending_work()

        wait_for(settled, seconds, "the end of all jobs")

    def offer(self, names: Sequence[str], request: str = "storing") -> None:
        """Copies chunks to host memory as from a GPU, and starts to store them."""
        import torch

        context = self.request(request)
        output = self.manager.prepare_store([key_of(name) for name in names], context)
        assert output is not None, "host memory has no room"
        for name in names:
            if key_of(name) in output.keys_to_store:
                row = output.store_spec.chunk_ids[output.keys_to_store.index(key_of(name))]
                self._rows[row] = torch.frombuffer(bytearray(content_of(name)), dtype=torch.int8)
        self.manager.complete_store(output.keys_to_store, context)

    def store(self, names: Sequence[str]) -> None:
        """Stores chunks. Returns at the end of the job."""
        self.offer(names)
        self.settle()
        self.finish("storing")

    def lookups(self, names: Sequence[str], request: str = "loading") -> list[LookupResult]:
        """What one step's lookups say."""
        context = self.request(request)
        return [self.manager.lookup(key_of(name), context) for name in names]

    def load(self, names: Sequence[str], seconds: float = 20) -> list[bytes | None]:
        """The bytes that a GPU would get, None for misses. Steps until each lookup is a hit or a miss."""
        from servers.waiting import wait_for

        def known() -> list[LookupResult] | None:
            results = self.lookups(names)
            self.step()
            return results if {*results} <= {LookupResult.HIT, LookupResult.MISS} else None

        results = wait_for(known, seconds, "an answer to every lookup")
        context = self.request("loading")
        found: list[bytes | None] = []
        for name, result in zip(names, results, strict=True):
            if result is LookupResult.MISS:
                found.append(None)
                continue
            spec = self.manager.prepare_load([key_of(name)], context)
            found.append(self._rows[int(spec.chunk_ids[0])].numpy().tobytes())
            self.manager.complete_load([key_of(name)], context)
        self.finish("loading")
        return found

    def chunks(self) -> dict[tuple[str, str], int]:
        """The tier's count of chunks by operation and result since the last call."""
        from kvcachepool.vllm_tier import CHUNKS

        stats = self.tier.get_stats()
        return {} if stats is None else dict(stats.data["data"].get(CHUNKS, {}))

    def close(self) -> None:
        """Ends tier and memory."""
        del self._rows
        self.manager.shutdown()
        self._region.cleanup()


if __name__ == "__main__":
    engine = OffloadEngine(json.loads(sys.argv[1]))
    wanted = sys.argv[2:]
    assert engine.tier._client.wait_connected(20)
    loaded = engine.load(wanted)
    engine.close()
    print(json.dumps([None if one is None else hashlib.sha256(one).hexdigest() for one in loaded]))

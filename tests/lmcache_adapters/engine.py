"""LMCache's StorageManager with the plugin, as one engine process has it.

Run as a program it stores chunks: `python -m lmcache_adapters.engine SOCKET NAMESPACE FIRST LAST`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.event_manager import EventManager
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.storage_manager import StorageManager

from kvcachepool.lmcache import KVCachePoolBackend
from servers.waiting import wait_for

NAME = "kvcachepool"
#: Layers, K and V, tokens of a chunk, heads, size of a head: 512 KiB per chunk in bfloat16.
SHAPE = (4, 2, 256, 2, 64)
CHUNK_BYTES = 512 << 10
DTYPE = torch.bfloat16


def key(number: int, **fields: Any) -> CacheEngineKey:
    """The key of chunk `number`."""
    return CacheEngineKey(
        **{"model_name": "m", "world_size": 1, "worker_id": 0, "dtype": DTYPE} | fields, chunk_hash=number
    )


def keys(numbers: Iterable[int]) -> list[CacheEngineKey]:
    """Keys of several chunks."""
    return [key(number) for number in numbers]


class Engine:
    """One StorageManager. LMCache's own cache is off, so that all hits come from the plugin."""

    def __init__(
        self,
        socket: Path | str,
        *,
        buffer_gb: float = 0.05,
        role: str = "worker",
        shape: tuple[int, ...] = SHAPE,
        use_layerwise: bool = False,
        **settings: Any,
    ) -> None:
        extra = {
            f"storage_plugin.{NAME}.module_path": "kvcachepool.lmcache",
            f"storage_plugin.{NAME}.class_name": "KVCachePoolBackend",
            "kvcachepool.socket": str(socket),
        }
        self.config = LMCacheEngineConfig.from_defaults(
            chunk_size=shape[2],
            local_cpu=False,
            use_layerwise=use_layerwise,
            max_local_cpu_size=buffer_gb,
            storage_plugins=[NAME],
            extra_config=extra | {f"kvcachepool.{name}": value for name, value in settings.items()},
        )
        self.metadata = LMCacheMetadata("m", 1, 1, 0, 0, DTYPE, shape, role=role)
        self.manager = StorageManager(self.config, self.metadata, EventManager())

    @property
    def plugin(self) -> KVCachePoolBackend:
        """The plugin that LMCache created."""
        backend = self.manager.storage_backends[NAME]
        assert isinstance(backend, KVCachePoolBackend)
        return backend

    def chunk(self, number: int, tokens: int = SHAPE[2]) -> MemoryObj:
        """A chunk in LMCache's buffer with contents of its own."""
        obj = self.manager.allocate(
            self.metadata.get_shapes(tokens), self.metadata.get_dtypes(), MemoryFormat.KV_2LTD, busy_loop=False
        )
        assert obj is not None, "LMCache's buffer is full"
        obj.tensor.copy_(contents(number, tokens))
        return obj

    def put(self, numbers: Sequence[int], tokens: int = SHAPE[2]) -> None:
        """Stores chunks as LMCache's engine does, and waits until they can be found."""
        self.manager.batched_put(keys(numbers), [self.chunk(number, tokens) for number in numbers])
        wait_for(lambda: self.found(numbers) == len(numbers), 10, f"chunks {numbers} stored")

    def found(self, numbers: Iterable[int], **options: Any) -> int:
        """How many of these chunks, from the front, the plugin has."""
        found, _ = self.manager.batched_contains(keys(numbers), **options)
        return int(found)

    def get(self, numbers: Iterable[int], tokens: int = SHAPE[2]) -> list[bool]:
        """Loads chunks as LMCache's engine does. For each, whether it came; one that came must be right."""
        wanted = list(numbers)
        loaded = self.manager.batched_get(keys(wanted), location=NAME)
        assert len(loaded) == len(wanted)
        for number, obj in zip(wanted, loaded, strict=True):
            if obj is not None:
                assert torch.equal(obj.tensor, contents(number, tokens)), f"chunk {number} has other bytes"
                obj.ref_count_down()
        return [obj is not None for obj in loaded]

    def in_use(self) -> int:
        """Memory objects of LMCache's buffer that are not free."""
        return int(self.manager.allocator_backend.memory_allocator.pin_allocator.num_active_allocations)

    def close(self) -> None:
        """As at the end of LMCache's engine."""
        self.manager.close()


def contents(number: int, tokens: int = SHAPE[2]) -> torch.Tensor:
    """What chunk `number` holds."""
    shape = (SHAPE[1], SHAPE[0], tokens, SHAPE[3] * SHAPE[4])
    return torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(DTYPE)


if __name__ == "__main__":
    _, socket, namespace, first, last = sys.argv
    engine = Engine(Path(socket), namespace=namespace)
    engine.put(range(int(first), int(last)))
    engine.close()

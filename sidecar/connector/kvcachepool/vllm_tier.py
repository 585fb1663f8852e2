"""`KVCachePoolTier`: the sidecar as a secondary tier of vLLM's own tiered offloading (`TieringOffloadingSpec`).

vLLM copies between GPU and its primary tier, which is host memory, and decides what is stored and loaded. This tier
copies between that memory and the sidecar. vLLM loads it by name:

    {"type": "KVCachePoolTier", "module_path": "kvcachepool.vllm_tier"}

Without a sidecar, lookups are misses and jobs fail at once. Nothing in the scheduler's thread waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from . import place, tier_keys
from .client import Client, Refused, Unavailable
from .tier_keys import Keys
from .tier_lookups import Lookups
from .tier_transfers import LOAD, STORE, Chunk, Counts, Finished, Transfers


class VllmTooOld(ImportError):
    """This vLLM has no tiered offloading, or an older interface of it."""


try:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.v1.kv_offload.base import (
        Locality,
        LookupResult,
        Medium,
        OffloadingCounterMetadata,
        OffloadingEvent,
        OffloadingGaugeMetadata,
        OffloadingMetricMetadata,
        OffloadKey,
        ReqContext,
        RequestOffloadingContext,
        ScheduleEndContext,
    )
    from vllm.v1.kv_offload.file_mapper import FileMapper
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    import vllm
except ImportError as error:
    raise VllmTooOld(
        f"VllmTooOld: KVCachePoolTier needs the tiered offloading of vLLM 0.32 or newer ({error})."
        " Use the KVCachePoolConnector instead."
    ) from error

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

LOOKUP = "lookup"
HIT, MISS = "hit", "miss"

CHUNKS = "kvcachepool:offload_tier_chunks"
BYTES_IN_FLIGHT = "kvcachepool:offload_tier_bytes_in_flight"
CONNECTED = "kvcachepool:offload_tier_connected"
SHARED = "kvcachepool:offload_tier_shared"

#: The largest value of the sidecar.
_MAX_CHUNK_BYTES = 1 << 30
#: How much longer than the longest deadline a shutdown waits for threads.
_MARGIN_S = 5.0


class KVCachePoolTier(SecondaryTierManager):
    """vLLM calls all methods from its scheduler's thread."""

    medium: ClassVar[Medium] = Medium.STORAGE
    # The sidecar's memory, its disk, Redis or S3: vLLM has no name for that.
    cache_hit_source: ClassVar[CacheHitSource] = CacheHitSource.EXTERNAL_UNSPECIFIED

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        *,
        socket: str | None = None,
        namespace: str = "vllm-tier",
        identity: str = "",
        model: dict[str, Any] | None = None,
        read_threads: int = 4,
        write_threads: int = 2,
        max_bytes_in_flight: int = 1 << 30,
        lookup_timeout_s: float = 1.0,
        load_timeout_s: float = 5.0,
        store_timeout_s: float = 30.0,
        ttl_s: int = 0,
        enable_kv_events: bool = False,
        locality: str | None = None,
    ) -> None:
        """
        Args:
            offloading_spec, primary_kv_view, tier_type, backpressure_detector: from vLLM.
            socket: path of the sidecar's socket, or remote servers (`tls://host:port`). Default: KVCACHEPOOL_SOCKET,
                or beside this package.
            namespace: chunks of different namespaces never meet.
            identity: the user's name for the weights, for models whose files do not identify them.
            model: from this package's plugin, not from the user.
            read_threads, write_threads: how many threads copy in each direction.
            max_bytes_in_flight: limit of unfinished loads, and of unfinished stores. More is refused.
            lookup_timeout_s, load_timeout_s, store_timeout_s: after these, chunks are misses or not stored.
            ttl_s: age at which stored chunks expire; 0: never in memory.
            enable_kv_events: publish an event for what was stored, if vLLM publishes KV events.
            locality: of these events, LOCAL or REMOTE.

        Raises:
            ValueError: a value cannot be right. The message begins with its name.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        counts = {"read_threads": read_threads, "write_threads": write_threads}
        timeouts = {
            "lookup_timeout_s": lookup_timeout_s,
            "load_timeout_s": load_timeout_s,
            "store_timeout_s": store_timeout_s,
        }
        for name, value in {**counts, **timeouts}.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"{name} of KVCachePoolTier must be a number above 0, not {value!r}")
        for name, value in {**counts, "max_bytes_in_flight": max_bytes_in_flight, "ttl_s": ttl_s}.items():
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} of KVCachePoolTier must be a whole number, 0 or more, not {value!r}")
        row_bytes = self.block_size_bytes
        if row_bytes > _MAX_CHUNK_BYTES:
            raise ValueError(
                f"blocks_per_chunk is too large for KVCachePoolTier: a chunk has {row_bytes} bytes, and the sidecar"
                f" keeps values of at most {_MAX_CHUNK_BYTES}"
            )
        if max_bytes_in_flight < row_bytes:
            raise ValueError(
                f"max_bytes_in_flight of KVCachePoolTier is {max_bytes_in_flight}, less than one chunk ({row_bytes})"
            )
        if locality is not None:
            self.locality = Locality(locality)
        publishes = enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._events: list[OffloadingEvent] | None = [] if publishes else None
        self._timeouts = timeouts
        self._counts = Counts()
        self._gauges: dict[tuple[str, tuple[str, ...]], float] = {}
        self._drained: list[Finished] = []
        facts = tier_keys.facts_of(offloading_spec, row_bytes, FileMapper, str(vllm.__version__))
        self._keys = Keys(facts, model, identity)
        self._client: Client | None = Client(
            socket or place.socket_path(), namespace=namespace, timeout_s=lookup_timeout_s, name="vllm-tier"
        )
        self._lookups = Lookups(self._exist)
        self._transfers = Transfers(
            self._client,
            primary_kv_view,
            self._counts,
            threads={LOAD: read_threads, STORE: write_threads},
            limits={LOAD: max_bytes_in_flight, STORE: max_bytes_in_flight},
            ttl_s=ttl_s,
        )

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """RETRY until the sidecar has answered, which takes a step of the scheduler."""
        if self._keys.refusal:
            self._counts.add(LOOKUP, self._keys.refusal, 1)
            return LookupResult.MISS
        found = self._lookups.find(key, req_context.req_id)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.flush()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.forget(req_context.req_id)

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(STORE, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(LOAD, job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        drained, self._drained = self._drained, []
        ended = self._transfers.finished()
        for job in ended:
            if job.kind == STORE:
                self._lookups.mark(job.copied, True)
                self._publish(job.copied)
            else:
                # Otherwise vLLM would load the same chunks again and again.
                self._lookups.mark(set(job.asked).difference(job.copied), False)
        return [self._result(job) for job in drained + ended]

    def take_events(self) -> Iterable[OffloadingEvent]:
        if not self._events:
            return ()
        taken, self._events = self._events, []
        return taken

    def drain_jobs(self) -> None:
        """Waits until no thread touches the primary tier's memory.

        vLLM drains when it resets its caches, for example because the weights have changed. No chunk of before is
        found any more.
        """
        self._transfers.drain()
        self._drained += self._transfers.finished()
        self._keys.draw_epoch()
        self._lookups.reset()

    def shutdown(self) -> None:
        """Ends all jobs and threads.

        Raises:
            RuntimeError: a thread may still touch the primary tier's memory, which vLLM then keeps.
        """
        if self._client is None:
            return
        self._transfers.stop()
        # Ends the calls under way, unless another client of this process uses the connection. vLLM waits 5 s.
        self._client.close()
        longest = max(self._timeouts.values()) + _MARGIN_S
        if not (self._transfers.join(longest) and self._lookups.close(longest)):
            raise RuntimeError(f"TierBusy: a copy has not ended {longest:.0f} s after the tier's shutdown")
        self._client = None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return {
            CHUNKS: OffloadingCounterMetadata(
                documentation="Chunks that the KV cache pool's tier looked up, loaded and stored, by result.",
                labelnames=("operation", "result"),
            ),
            BYTES_IN_FLIGHT: OffloadingGaugeMetadata(
                documentation="Bytes of unfinished loads and stores of the KV cache pool's tier.",
                labelnames=("operation",),
            ),
            CONNECTED: OffloadingGaugeMetadata(
                documentation="Whether the KV cache pool's tier is connected to its sidecar.",
            ),
            SHARED: OffloadingGaugeMetadata(
                documentation="Whether other vLLM processes of this model can load the tier's chunks.",
            ),
        }

    def get_stats(self) -> OffloadingConnectorStats | None:
        gauges: dict[tuple[str, tuple[str, ...]], float] = {
            (CONNECTED, ()): float(self._client is not None and self._client.connected),
            (SHARED, ()): float(self._keys.shared),
        }
        for kind in (LOAD, STORE):
            gauges[BYTES_IN_FLIGHT, (kind,)] = float(self._transfers.bytes_in_flight(kind))
        changed = {name: value for name, value in gauges.items() if self._gauges.get(name) != value}
        counted = self._counts.take()
        if not changed and not counted:
            return None
        self._gauges = gauges
        stats = OffloadingConnectorStats()
        for (name, labels), value in changed.items():
            stats.set_gauge(name, value, labels)
        for counter, chunks in counted.items():
            stats.increase_counter(CHUNKS, chunks, counter)
        return stats

    def _submit(self, kind: str, job: TransferJob) -> None:
        chunks, refused = [], Counter[str]()
        for offload_key, row in zip(job.keys, job.chunk_ids, strict=True):
            key = self._keys.make(offload_key)
            if key is None:
                refused[self._keys.why_none()] += 1
            else:
                chunks.append(Chunk(offload_key, key, int(row)))
        for reason, count in refused.items():
            self._counts.add(kind, reason, count, refused=True)
        self._transfers.submit(kind, job.job_id, tuple(job.keys), chunks, self._timeouts[f"{kind}_timeout_s"])

    def _exist(self, offload_keys: list[bytes]) -> list[bool]:
        """Which chunks exist. Runs on the thread of the lookups."""
        found = dict.fromkeys(offload_keys, False)
        keys = {offload_key: key for offload_key in offload_keys if (key := self._keys.make(offload_key)) is not None}
        self._counts.add(LOOKUP, self._keys.why_none(), len(found) - len(keys), refused=True)
        client, result = self._client, ""
        try:
            if client is not None and keys:
                there = client.contains(list(keys.values()), timeout_s=self._timeouts["lookup_timeout_s"])
                found.update(zip(keys, there, strict=True))
        except Unavailable as error:
            result = error.reason
        except Refused as error:
            result = error.code
        if result:
            self._counts.add(LOOKUP, result, len(keys), refused=True)
        else:
            hits = sum(found.values())
            self._counts.add(LOOKUP, HIT, hits)
            self._counts.add(LOOKUP, MISS, len(keys) - hits)
        return [found[offload_key] for offload_key in offload_keys]

    def _publish(self, stored: tuple[bytes, ...]) -> None:
        if self._events is not None and stored:
            self._events.append(
                OffloadingEvent(keys=list(stored), medium=self.medium, removed=False, locality=self.locality)
            )

    def _result(self, job: Finished) -> JobResult:
        success = len(job.copied) == len(job.asked)
        return JobResult(
            job_id=job.job_id,
            success=success,
            successful_keys=job.copied if job.kind == LOAD and not success and job.copied else None,
            transfer_time=job.seconds,
            transfer_bytes=len(job.copied) * self.block_size_bytes,
        )

"""The class that vLLM loads. It dispatches to its two sides and catches their exceptions, so that vLLM is not affected.

The hooks are those of vLLM 0.30 to 0.33. A hook that a version does not call is not needed there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

import vllm

from .connection import report_off
from .internals import changed_internals
from .jobs import Ended, EndedLoad, StepMetadata, WorkerReport
from .layout import Unserved, nodes_of, on_node
from .metrics import CacheStats
from .place import socket_path
from .preflight import engine_refusal, is_composed, preferred_layout
from .rank import instance
from .scheduler import Scheduler
from .watch import watch_engine, watch_worker
from .worker import Worker

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("kvcachepool")

_T = TypeVar("_T")
_QUIET_S = 60.0
#: Number of hooks that may fail before the cache is turned off for the life of the process.
MOST_BUGS = 3


class KVCachePoolConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's KV connector to this pod's sidecar. It is off, with a named reason, in a vLLM that it cannot serve."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Raises only what vLLM's base class raises."""
        super().__init__(vllm_config, role, kv_cache_config)
        self.off_reason = ""
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        self._idle = False
        self._failures: dict[str, float] = {}
        self.bugs = 0
        self._load_errors: set[int] = set()
        try:
            refusal = engine_refusal(vllm_config) or changed_internals()
            if refusal:
                raise Unserved(refusal, "this configuration of vLLM is not supported")
            if role == KVConnectorRole.SCHEDULER:
                self._scheduler = Scheduler(vllm_config, kv_cache_config, socket_path(), str(vllm.__version__))
                self._scheduler.session.start()
                watch_engine()
            else:
                self._worker = Worker(vllm_config, kv_cache_config, socket_path())
                watch_worker(vllm_config.parallel_config.worker_cls)
        except Unserved as error:
            self._off(error.reason, error.message)
        except Exception as error:
            logger.exception("setting up the KV cache connector failed")
            self._off("SetupFailed", str(error))

    def _off(self, reason: str, message: str) -> None:
        self._scheduler = self._worker = None
        self._report_off(reason, message)

    def _report_off(self, reason: str, message: str) -> None:
        self.off_reason = reason
        logger.warning("the KV cache pool is off in this vLLM: %s: %s", reason, message)
        node = int(getattr(self._vllm_config.parallel_config, "node_rank_within_dp", 0) or 0)
        name = on_node(instance(self._vllm_config), nodes_of(self._vllm_config), node)
        report_off(socket_path(), reason, str(vllm.__version__), name)

    def _guarded(self, hook: Callable[..., _T], default: _T, *arguments: Any) -> _T:
        """Calls a side. An exception is counted and logged at most once a minute, and vLLM gets `default`."""
        try:
            return hook(*arguments)
        except Exception:
            self._failed(hook.__name__)
            return default

    def _delivered(self, hook: Callable[..., None], *arguments: Any) -> None:
        """Like `_guarded`, for calls that vLLM makes only once: a failed hook is called again after the side has
        recovered.
        """
        try:
            hook(*arguments)
        except Exception:
            self._failed(hook.__name__)
            self._guarded(hook, None, *arguments)

    def _failed(self, name: str, on_engine_thread: bool = True) -> None:
        """A hook raised: both sides recover. After repeated failures they turn off permanently."""
        now = time.monotonic()
        if now - self._failures.get(name, -_QUIET_S) >= _QUIET_S:
            self._failures[name] = now
            logger.exception("unexpected error in the KV cache connector (%s); vLLM continues without it", name)
        self.bugs = bugs = self.bugs + 1
        try:
            if self._scheduler is not None:
                self._scheduler.session.counters.event(f"bug/{name}")
                self._scheduler.session.recover(on_engine_thread)
        except Exception:
            logger.exception("recovering the KV cache connector from an error failed")
        # Another thread may have raised meanwhile.
        if bugs == MOST_BUGS:
            self._turn_off(f"ConnectorBug/{name}")

    def _turn_off(self, reason: str) -> None:
        """Turns the cache off. Loads that were promised to vLLM are reported, and blocks that are held are released."""
        self._report_off(reason, "see the errors before this line")
        try:
            if self._scheduler is not None:
                self._scheduler.session.turn_off(reason)
            if self._worker is not None:
                self._worker.turn_off(reason)
        except Exception:
            logger.exception("turning the KV cache connector off failed")

    @property
    def requires_kv_delivery(self) -> bool:
        """Not required, because a dropped store is a future miss and not an error."""
        return False

    # -- scheduler side

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler is not None:
            self._guarded(self._scheduler.session.bind, None, kv_cache_manager)

    def arrive(self, request: Request) -> None:
        """The plugin's early call, from vLLM's input thread."""
        if self._scheduler is None:
            return
        try:
            self._scheduler.arrive(request)
        except Exception:
            self._failed("arrive", on_engine_thread=False)

    def adapter_loaded(self, lora_request: Any) -> None:
        """Called by the plugin when vLLM is about to load an adapter."""
        if self._scheduler is not None:
            self._guarded(self._scheduler.session.adapter_loaded, None, lora_request)

    def weights_changed(self, what: str) -> None:
        """The engine's weights may have changed; `what` names the call."""
        if self._scheduler is not None:
            self._guarded(self._scheduler.session.weights_changed, None, what)

    def on_new_request(self, request: Request) -> None:
        if self._scheduler is not None:
            self._guarded(self._scheduler.on_new_request, None, request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """(tokens to load or None = poll again, whether they are loaded asynchronously)."""
        scheduler = self._scheduler
        if scheduler is None:
            return 0, False
        try:
            return scheduler.matched_tokens(request, num_computed_tokens)
        except Exception:
            self._failed("matched_tokens")
            return 0, False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Plans the load after vLLM has allocated blocks. A load that cannot be planned is reported as failed."""
        scheduler = self._scheduler
        if scheduler is None:
            return
        try:
            scheduler.allocated(request, blocks, num_external_tokens)
        except Exception:
            self._failed("allocated")
            if num_external_tokens > 0:
                self._guarded(scheduler.fail_load, None, request.request_id)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[Any, int]:
        """The promised tokens by their source."""
        if self._scheduler is None or num_external_tokens <= 0:
            return {}
        return self._guarded(self._scheduler.sources, {}, request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """The jobs of a step. Due jobs are sent even if the rest fails."""
        metadata = StepMetadata(idle=scheduler_output.total_num_scheduled_tokens == 0)
        if self._scheduler is not None:
            self._guarded(self._scheduler.step, None, scheduler_output)
            self._guarded(self._scheduler.ship, None, metadata)
        return metadata if self._is_understood() else KVConnectorMetadata()

    def _is_understood(self) -> bool:
        """Whether all ranks can load this package's classes. A node may be without it."""
        if self._scheduler is not None and self._scheduler.session.nodes is not None:
            return self._scheduler.session.nodes.all_reported
        return nodes_of(self._vllm_config) == 1

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._scheduler is not None:
            self._delivered(self._scheduler.output, connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Never delays the release of blocks: stores hold theirs by reference count."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is not None:
            self._delivered(self._scheduler.finished, request.request_id)
        return False, None

    def has_pending_push_work(self) -> bool:
        if self._scheduler is None:
            return False
        # After an error vLLM calls this again in its next step. A persistent bug must not keep an idle engine running.
        return self._guarded(self._scheduler.is_busy, self.bugs < MOST_BUGS)

    def reset_cache(self) -> bool | None:
        """Ignores everything that was cached before. Always succeeds."""
        if self._scheduler is not None:
            self._guarded(self._scheduler.session.reset, None)
        return True

    def take_events(self) -> Iterable[KVCacheEvent]:
        if self._scheduler is None:
            return ()
        nothing: list[Any] = []
        return self._guarded(self._scheduler.events, nothing)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Counters for vLLM's log; none in a MultiConnector.

        A MultiConnector raises in vLLM's front process for stats of a connector that vLLM does not register itself, or
        that has no Prometheus metrics in vLLM.
        """
        if self._scheduler is None or is_composed(self._vllm_config.kv_transfer_config):
            return None
        return self._guarded(self._scheduler.stats, None)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return CacheStats(data=dict(data or {}))

    # -- worker side

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Block-major on GPUs, where a block of all layers is one piece. vLLM ignores a layout that its backends do not
        support.
        """
        try:
            return preferred_layout(vllm_config)
        except Exception:
            logger.exception("choosing a KV cache layout failed; vLLM uses its default")
            return None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._worker is not None:
            self._guarded(self._worker.register_kv_caches, None, kv_caches)

    def kv_cache_released(self) -> None:
        """The memory of the KV cache is about to be released. No copy may access it from now on."""
        if self._worker is not None:
            self._guarded(self._worker.kv_cache_released, None)

    def kv_cache_restored(self) -> None:
        """The KV cache has memory again, at the same addresses and with other content."""
        if self._worker is not None:
            self._guarded(self._worker.kv_cache_restored, None)

    def step_failed(self) -> None:
        """vLLM's model failed in a step: its blocks do not hold what their hashes say."""
        if self._worker is not None:
            self._guarded(self._worker.turn_off, None, "StepFailed")

    def adapter_read_begins(self, lora_request: Any) -> None:
        """vLLM is about to read the files of an adapter."""
        if self._worker is not None:
            self._guarded(self._worker.adapters.begin, None, lora_request)

    def adapter_read_ended(self, lora_request: Any, succeeded: bool) -> None:
        if self._worker is not None:
            self._guarded(self._worker.adapters.end, None, lora_request, succeeded)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Called before a step, with the jobs to cancel."""
        if self._worker is not None and isinstance(kv_connector_metadata, StepMetadata):
            self._guarded(self._worker.handle_preemptions, None, kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        worker = self._worker
        self._idle = isinstance(connector_metadata, StepMetadata) and connector_metadata.idle
        if worker is None or not isinstance(connector_metadata, StepMetadata):
            return
        try:
            worker.bind(connector_metadata)
        except Exception:
            self._failed("bind")
            self._guarded(worker.refuse, None, connector_metadata.jobs)
        if self._idle:
            self._guarded(worker.wait_for_save, None)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Does nothing: loads started when their metadata arrived."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: all loads are asynchronous."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: whole blocks are stored after the forward pass."""

    def wait_for_save(self) -> None:
        """The forward pass was submitted. Stores are queued behind it."""
        if self._worker is not None:
            self._guarded(self._worker.wait_for_save, None)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that ended on this rank, each reported once."""
        ended = self._ended_loads()
        return KVConnectorTransferResults(
            finished_recving={one.request_id for one in ended},
            failed_recving={one.request_id for one in ended if one.failed is not None},
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """For wrappers that only request completions. `get_block_ids_with_load_errors` then names the blocks of failed
        loads. A failed load with unknown blocks is not reported: its request waits instead of using invalid KV.
        """
        finished = set()
        for one in self._ended_loads():
            if one.failed is None or one.failed:
                finished.add(one.request_id)
                self._load_errors |= one.failed or set()
            else:
                logger.error(
                    "request %s waits forever, abort it: its load failed, and its blocks are not known", one.request_id
                )
        return None, finished or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks of failed loads, if only completions were requested. Otherwise `get_transfer_results` has named the
        requests.
        """
        errors, self._load_errors = self._load_errors, set()
        return errors

    def _ended_loads(self) -> list[EndedLoad]:
        ended: list[EndedLoad] = []
        if self._worker is not None:
            self._guarded(self._worker.take_ended_loads, None, self._idle, ended)
        elif isinstance(self._connector_metadata, StepMetadata):
            # A rank without a worker side cannot copy, so its loads have failed.
            loads = [job for job in self._connector_metadata.jobs if job.kind == "load"]
            ended += [EndedLoad(job, job.block_ids()) for job in loads]
        return ended

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = WorkerReport()
        if self._worker is not None:
            self._guarded(self._worker.take_report, None, report)
        elif isinstance(self._connector_metadata, StepMetadata):
            report.stores = {job.id: Ended(1, 1) for job in self._connector_metadata.jobs if job.kind == "store"}
        return report if report != WorkerReport() else None

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._guarded(self._scheduler.session.shutdown, None)
        if self._worker is not None:
            self._guarded(self._worker.shutdown, None)

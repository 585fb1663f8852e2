"""Events that affect all requests of the scheduler side: the connection, the epoch, recovery after a bug.

`Session` creates the parts that own lookups, loads and stores. No part imports it, or `scheduler`, which passes vLLM's
calls to it.
"""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any

from . import keys
from .connection import Connection, Held
from .internals import has_optional
from .kv_events import event_group
from .layout import on_node, ranks_of, steps_with_others
from .loads import Loads
from .local_cache import LocalCache
from .lookups import Lookups, WaitBudget, WaitForSteps
from .messages import HelloReply
from .metrics import Counters
from .namespaces import Namespaces
from .nodes import Client, Nodes
from .prefill import PrefillSpeed
from .preflight import is_composed
from .registration import Registration
from .reporter import Reporter
from .requests import Progress, RequestState
from .stores import MAX_CHUNKS_PER_STEP, Stores

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig


class Session:
    """The session with the sidecar (`client.Hooks`, on the client's reader thread). `lock` guards all state of all
    parts. It is never held while waiting or during a file system call.
    """

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, socket_path: str, engine_version: str
    ) -> None:
        """Raises `layout.Unserved` if a KV group is not supported."""
        transfer = vllm_config.kv_transfer_config
        instance = str((transfer.engine_id if transfer is not None else None) or "")
        self.lock = threading.RLock()
        nodes = ranks_of(vllm_config).nodes
        instance = on_node(instance, nodes, 0)
        self.nodes = Nodes(nodes, instance, engine_version, socket_path, self) if nodes > 1 else None
        self.client: Client = self.nodes or Connection("scheduler", instance, 0, engine_version, socket_path, self)
        self.counters = Counters()
        self.speed = PrefillSpeed()
        self.local_cache = LocalCache()
        self.requests: dict[str, RequestState] = {}
        geometry = keys.geometry(vllm_config, kv_cache_config, self.client.settings.chunk_tokens)
        events = vllm_config.kv_events_config
        publishes = events is not None and events.enable_kv_cache_events
        group = event_group(kv_cache_config, geometry) if publishes else None
        self.reporter = Reporter(self.client, self.counters, group)
        self.registration = Registration(self.client, self.counters, self.reporter, vllm_config, geometry)
        self.namespaces = Namespaces(
            self.reporter,
            lambda path: self.lookups.adapter_known(path),
            nodes,
            vllm_config.lora_config is None
            or has_optional("vllm.lora.worker_manager", "WorkerLoRAManager._load_adapter"),
        )
        job_ids = itertools.count(1)
        step_tokens = int(vllm_config.scheduler_config.max_num_batched_tokens)
        self.loads = Loads(self.client, self.counters, job_ids)
        per_grant = MAX_CHUNKS_PER_STEP if self.nodes is None else Nodes.CHUNKS_PER_GRANT
        self.stores = Stores(self.registration, self.namespaces, self.lock, job_ids, step_tokens, per_grant)
        self.lookups = Lookups(
            self.registration,
            self.namespaces,
            self.lock,
            self.requests,
            self.loads,
            self.local_cache,
            self.speed,
            WaitBudget(steps_with_others(vllm_config))
            if self.nodes is None
            else WaitForSteps(int(vllm_config.max_concurrent_batches)),
            is_composed(transfer),
        )

    def start(self) -> None:
        self.client.start()
        self.reporter.start(self.lookups.renew_aged)

    def bind(self, manager: KVCacheManager) -> None:
        with self.lock:
            self.local_cache.pool = manager.block_pool
            self.stores.bind(manager)

    def shutdown(self) -> None:
        self.reporter.stop()
        self.client.go_off("Shutdown")
        self.namespaces.hashes.close()

    def grant_timeout_s(self) -> float:
        """Time after which a GRANT without an answer is given up."""
        return self.client.settings.grant_timeout_ms / 1000 if self.nodes is None else Nodes.GRANT_TIMEOUT_S

    # -- epochs and adapters

    def adapter_loaded(self, lora: Any) -> None:
        """vLLM is about to load this adapter, or to make sure that it is loaded."""
        with self.lock:
            self.namespaces.mark_read(lora)
            self.adapter_named(lora)

    def adapter_named(self, lora: Any) -> None:
        """vLLM loads this adapter, or will for a request. Requests that run with replaced weights are not cached from
        now on.
        """
        with self.lock:
            if self.namespaces.adapter_named(lora):
                self._outdate_adapters({lora.lora_int_id})

    def adapters_changed(self, numbers: set[int]) -> None:
        """Workers have read other files for the adapters with these ids than were hashed."""
        with self.lock:
            self.namespaces.adapters_changed(numbers)
            self._outdate_adapters(numbers)

    def _outdate_adapters(self, numbers: set[int]) -> None:
        self.lookups.invalidate()
        for request_id, state in self.requests.items():
            mine = state.request.lora_request
            if mine is not None and mine.lora_int_id in numbers:
                self.namespaces.assign(state)
                self.loads.outdate([request_id])

    def reset(self) -> None:
        """Draws an epoch, so that this process no longer finds anything that was cached before, and stores nothing
        under an old name.
        """
        with self.lock:
            self.namespaces.draw_epoch()
            self.lookups.invalidate()
            self.reporter.forget()
            self.loads.outdate(self.loads.request_ids())
            for state in self.requests.values():
                state.plan = None
                self.lookups.consume(state)
                if state.holds_blocks:
                    state.stale = True
                else:
                    self.namespaces.restart(state)
            self.stores.give_up()

    def weights_changed(self, what: str) -> None:
        """Draws an epoch, because the engine's weights changed. vLLM's own prefix cache may keep KV of the old weights,
        and what is computed behind it is not stored.
        """
        with self.lock:
            self.counters.event(f"epoch/{what}")
            self.local_cache.outdated = True
            self.reset()

    # -- recovery

    def recover(self, on_engine_thread: bool = True) -> None:
        """A hook failed half-way, so only state that is recorded elsewhere is trusted. Current requests no longer load
        or store, and stores that the workers do not have are aborted. On another thread than the engine's, their blocks
        are released in the next step.
        """
        with self.lock:
            self.lookups.invalidate()
            for request_id, state in self.requests.items():
                state.plan = state.pending_poll = None
                self.lookups.consume(state)
                state.failed = state.stale = True
                state.loading = request_id in self.loads
            self.stores.give_up(on_engine_thread)
            self.lookups.send_releases()

    def turn_off(self, reason: str) -> None:
        """Ends the session: lookups are misses, and nothing is stored. Jobs of the workers continue."""
        threading.Thread(target=self.client.go_off, args=(reason,), name="kvcachepool-off", daemon=True).start()

    # -- client.Hooks

    def held(self, region: int | None) -> Held:
        """Requests with a load in flight, whose leases continue."""
        with self.lock:
            return Held(requests=self.loads.request_ids())

    def after_hello(self) -> None:
        """Aborts every GRANT that the last connection left unanswered."""
        with self.lock:
            self.stores.repeat_aborts()

    def on_hello(self, reply: HelloReply) -> None:
        """Applies the settings. Another chunk size invalidates the state of all requests."""
        with self.lock:
            if self.registration.take_chunk_tokens(reply.settings.chunk_tokens):
                for state in self.requests.values():
                    self.lookups.consume(state)
                    state.progress = Progress()
            self.lookups.invalidate()
            self.registration.ensure()

    def on_lost(self) -> None:
        """No request that was sent on this connection will be answered."""
        with self.lock:
            self.stores.lose()
            self.lookups.invalidate()

    def before_unmap(self) -> None:
        """Does nothing: this side uses no memory."""

    def on_off(self, reason: str) -> None:
        """Lookups are misses from now on."""

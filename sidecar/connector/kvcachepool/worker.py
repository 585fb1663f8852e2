"""The worker side: one rank's copies between vLLM's KV blocks and the arena.

Threads: vLLM's (brings jobs, takes results, and never waits except for 2 ms in a step without tokens), the copy thread
(one job at a time), the client's reader (HELLO, REGISTER). One lock, `_wake`, guards all state and is held only for
bookkeeping.

Invariants: each job ends exactly once on each rank, even if the rank is off. A load that is reported as finished was
copied from slots whose generations did not change. A store writes only slots that are GRANTED to this process. Slots
that HELLO's list does not name are no longer written.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from . import keys
from .adapter_files import LoadedAdapters
from .connection import Connection, Held, Reply, report_off
from .copier import Copier, copier_of
from .copy_job import Task, copy_job
from .copy_window import WindowCopier, WindowLostError
from .jobs import STORE, Ended, EndedLoad, Job, StepMetadata, WorkerReport
from .layout import STATE, Layout, Ranks, Unserved, on_node, steps_with_others
from .layout_detect import detect
from .messages import HelloReply, Register, RegisterReply, Report, Sections
from .pieces import Planner
from .rank import current_device_uuid, current_ranks, instance, registrations, vllm_version
from .relay import Relay
from .shared import Mapping, shared
from .window import WindowKeeper
from .wire import Op

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("kvcachepool")

_IDLE_WAIT_S = 0.002
_PAUSED_STORE_S = 1.0
#: Interval at which the copy thread checks for jobs if it is not woken.
_QUEUE_CHECK_S = 1.0
_REPORT_EVERY_S = 1.0
#: Refusals of a stage that concern the window more than the job.
_BROKEN_WINDOW = ("/window/CopyFailed", "/window/BadRecord", "/window/Closed")
_MAX_FAILURES_IN_A_ROW = 3
_EXIT_WAIT_S = 2.0
#: Refusals of REGISTER that turn the cache off in this vLLM. Others may pass at the next HELLO.
_FINAL = {"DescriptorMismatch", "SectionTooLarge", "MultiNodeUnsupported", "HashAlgorithmRefused", "BadBody"}


class Worker:
    """One rank. Calls from vLLM's thread never raise and never block (see `take_ended_loads`)."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, socket_path: str) -> None:
        """Starts nothing: `register_kv_caches` does."""
        self._config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._socket_path = socket_path
        self.adapters = LoadedAdapters()
        self._steps_alone = not steps_with_others(vllm_config)
        self._wake = threading.Condition()
        self._queue: deque[Task] = deque()
        self._running: Task | None = None
        #: Ended stores that could not be reported. Sent after the next HELLO, whose list names their slots.
        self._outbox: list[tuple[Op, Sections]] = []
        self._ended_loads: deque[EndedLoad] = deque()
        self._ended_stores: dict[int, Ended] = {}
        self._arrived: deque[Task] = deque()
        self._stores_paused = True
        self._asleep = False  # the KV cache has no memory
        self._mapping: Mapping | None = None
        self._stopping = False
        self._failures = 0
        self._timed = 0  # the current step, if its end is to be reported
        self._report = Report()
        self._reported_at = time.monotonic()
        self.off_reason = ""
        self._layout: Layout | None = None
        self._planner: Planner | None = None
        self._copier: Copier | None = None
        self._windows: WindowKeeper | None = None
        self._device_uuid = ""
        self._client: Connection | None = None
        self._register: Register | None = None
        self._relay: Relay | None = None  # of the first rank on each node, if there are several
        self._node = 0
        self._instance = instance(vllm_config)
        self._thread: threading.Thread | None = None

    # -- vLLM's thread

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Detects the layout and starts everything else in the background. An unsupported layout turns the cache
        off.
        """
        try:
            if self._layout is not None:
                raise Unserved("RegisteredTwice", "vLLM allocated its KV cache again while copies use the old one")
            ranks = current_ranks(self._config)
            version = vllm_version()
            layout = detect(self._config, self._kv_cache_config, kv_caches, ranks, version)
            self._layout = layout
            self._node = ranks.node
            self._instance = on_node(self._instance, ranks.nodes, ranks.node)
            if ranks.nodes > 1 and ranks.rank == 0:
                self._relay = Relay(ranks.node, self._instance, version, self._socket_path)
            self._planner = Planner(layout)
            self._copier = copier_of(layout, self._count_locked)
            # Here, because no other thread has the rank's device as its current one.
            self._device_uuid = current_device_uuid(layout.device)
            self._windows = WindowKeeper(layout, self._device_uuid, self._count_locked)
        except Unserved as error:
            self._go_off(error.reason, error.message)
            return
        except Exception as error:
            logger.exception("registering vLLM's KV cache with the connector failed")
            self._go_off("RegisterFailed", str(error))
            return
        atexit.register(_end_copies, weakref.ref(self))
        self._thread = threading.Thread(target=self._copy_loop, name="kvcachepool-copy", daemon=True)
        self._thread.start()
        threading.Thread(
            target=self._connect, args=(layout, ranks, version), name="kvcachepool-fingerprint", daemon=True
        ).start()

    def kv_cache_released(self) -> None:
        """vLLM releases the KV cache's memory. Starts no more copies and waits for the current one. Queued jobs are
        dropped, because their blocks would have other content.
        """
        with self._wake:
            self._asleep = True
            self._drop_all("asleep")
            while self._running is not None:
                self._wake.wait(1.0)

    def kv_cache_restored(self) -> None:
        """The KV cache has memory again, at the same addresses."""
        with self._wake:
            self._asleep = False

    def handle_preemptions(self, metadata: StepMetadata) -> None:
        """Cancels unneeded jobs that have not started. Never waits for one that has."""
        if not metadata.forget:
            return
        forget = set(metadata.forget)
        with self._wake:
            for task in [task for task in (*self._queue, *self._arrived) if task.job.id in forget]:
                self._drop(task, "cancelled")

    def bind(self, metadata: StepMetadata) -> None:
        """Takes the jobs of a step. Loads are queued at once. Stores are queued in `wait_for_save`, or at once if the
        step has no forward pass.

        vLLM's V1 runner calls `wait_for_save` on some pipeline stages only. Stores of earlier steps are queued here,
        where all work of those steps has been submitted.
        """
        self.wait_for_save()
        self._timed = metadata.timed
        if self._relay is not None:
            self._relay.take(metadata.passed.get(self._node, ()))
        tasks = [self._task(job) for job in metadata.jobs]
        loads = deque(task for task in tasks if task.job.kind != STORE)
        with self._wake:
            self._arrived.extend(task for task in tasks if task.job.kind == STORE)
            self._admit(loads)

    def refuse(self, jobs: list[Job]) -> None:
        """`bind` failed. Ends the jobs that it did not take, as failed."""
        with self._wake:
            known = {task.job.id for task in (self._running, *self._queue, *self._arrived) if task is not None}
            known |= self._ended_stores.keys()
            ended = {one.request_id for one in self._ended_loads}
            for job in jobs:
                if job.id not in known and not (job.kind != STORE and job.request_id in ended):
                    self._finish(Task(job, None), False, False)

    def wait_for_save(self) -> None:
        """Queues the step's stores after the model's work so far."""
        if self._arrived:
            with self._wake:
                self._admit(self._arrived)

    def take_ended_loads(self, idle: bool, ended: list[EndedLoad]) -> None:
        """Moves the loads that ended since the last call, one by one, so that each is reported once even if this
        raises.

        idle: the step had no tokens; then this waits up to 2 ms for a queued job, which saves a step. Other engines
            that step together with this one would wait, too.
        """
        idle = idle and self._steps_alone
        try:
            self._send_report()
        except Exception:
            logger.exception("reporting copies to the sidecar failed; the next report includes them")
        deadline = time.monotonic() + _IDLE_WAIT_S
        with self._wake:
            while (
                idle
                and (self._queue or self._running)
                and not (self._ended_loads or self._ended_stores)
                and (left := deadline - time.monotonic()) > 0
            ):
                self._wake.wait(left)
            for at, one in enumerate(self._ended_loads):
                if one.failed is None and not self._is_of_read_files(one.job):
                    self._ended_loads[at] = one._replace(failed=one.job.block_ids())
            while self._ended_loads:
                ended.append(self._ended_loads.popleft())
        if idle and self._relay is not None and not (ended or self._ended_stores):
            self._relay.wait(deadline - time.monotonic())

    def take_report(self, report: WorkerReport) -> None:
        """Moves the stores that ended since the last call, one by one, and the number of a timed step."""
        report.timed, self._timed = self._timed, 0
        if self._relay is not None and (reports := self._relay.reports()):
            report.nodes[self._node] = reports
        with self._wake:
            while self._ended_stores:
                report.stores.update([self._ended_stores.popitem()])
        while self.adapters.changed:
            report.adapters_changed.add(self.adapters.changed.pop())

    def turn_off(self, reason: str) -> None:
        """Turns this rank off for this reason. All jobs end as failed at once, the rest happens in the background."""
        self._go_off_later(reason, "see the errors before this line")

    def shutdown(self) -> None:
        """Turns this rank off permanently: waits for the current copy, unmaps the arena and releases its lock."""
        client = self._client
        if client is not None:
            client.go_off("Shutdown")
        self._go_off("Shutdown", "", report=False)
        self.end_copies(_EXIT_WAIT_S)

    # -- queue (the lock is held)

    def _task(self, job: Job) -> Task:
        plan = None
        job = job.of_node(self._node)
        if self._planner is not None and job.region and (job.chunks or job.kind == STORE):
            try:
                plan = self._planner.plan(job.chunks, job.kind == STORE)
            except Exception as error:
                logger.warning("dropping a %s of request %s: chunks do not match: %s", job.kind, job.request_id, error)
                self._count("job_malformed")
        return Task(job, plan)

    def _admit(self, tasks: deque[Task]) -> None:
        """Moves jobs, one by one, into the queue after the model's work so far."""
        if not tasks:
            return
        try:
            event = None if self._copier is None else self._copier.record()
        except Exception:
            logger.exception("recording a device event failed; dropping the loads and stores of this step")
            while tasks:
                self._count(f"{tasks[0].job.kind}_dropped/event")
                self._finish(tasks.popleft(), False, True)
            return
        while tasks:
            task = tasks[0]
            task.event = event
            if task.plan is None or self.off_reason or self._asleep:
                self._finish(tasks.popleft(), False, False)
            elif not self._is_of_read_files(task.job):
                self._count(f"{task.job.kind}_dropped/adapter")
                self._finish(tasks.popleft(), False, True)
            elif not task.plan.pieces:
                # Another replica writes the sections of this job.
                self._finish(tasks.popleft(), True, False)
            else:
                self._queue.append(tasks.popleft())
        self._wake.notify_all()

    def _is_of_read_files(self, job: Job) -> bool:
        """Whether vLLM has read the files of the job's adapter. It reads those of a step before it hands over the
        step's jobs.
        """
        if self.adapters.has_read(job.adapter):
            return True
        assert job.adapter is not None
        self.adapters.refused(job.adapter, job.kind == STORE)
        return False

    def _drop(self, task: Task, why: str) -> None:
        """Ends a job that was not started."""
        if task in self._queue:
            self._queue.remove(task)
        elif task in self._arrived:
            self._arrived.remove(task)
        self._count(f"{task.job.kind}_dropped/{why}")
        self._finish(task, False, True)

    def _drop_all(self, why: str) -> None:
        for task in [*self._queue, *self._arrived]:
            self._drop(task, why)

    def _finish(self, task: Task, good: bool, report: bool) -> None:
        """Ends a job; called exactly once per job. report: COMMIT or ABORT its sections."""
        if task.job.kind == STORE:
            self._ended_stores[task.job.id] = Ended(1, 0 if good else 1)
            if report and task.plan is not None and task.plan.packed:
                body = Sections(region=task.job.region, refs=task.plan.packed)
                self._send(Op.COMMIT if good else Op.ABORT, body)
        else:
            self._ended_loads.append(EndedLoad(task.job, None if good else task.job.block_ids()))
        self._wake.notify_all()

    def _send(self, op: Op, body: Sections) -> None:
        if self._client is None or not self._client.send(op, body):
            self._outbox.append((op, body))

    def _count(self, event: str) -> None:
        self._report.events[event] = self._report.events.get(event, 0) + 1

    # -- the copy thread

    def _copy_loop(self) -> None:
        copier = self._copier
        assert copier is not None
        try:
            copier.begin_thread()
        except Exception:
            logger.exception("preparing the copy thread failed; it still tries to copy")
        try:
            with torch.inference_mode():
                while True:
                    with self._wake:
                        retired = [] if self._windows is None else self._windows.take_retired()
                        if self._stopping and not retired:
                            return
                        task = None if retired else self._next_job()
                        mapping = self._mapping
                        window = None if self._windows is None else self._windows.live
                    for one in retired:
                        one.close()
                    if task is not None:
                        self._run(task, mapping, copier, window)
        except Exception as error:
            logger.exception("the copy thread ended by an unexpected error")
            with self._wake:
                running, self._running = self._running, None
                if running is not None:
                    self._finish(running, False, True)
            self._go_off_later("CopyThreadFailed", str(error))

    def _next_job(self) -> Task | None:
        """The next job, marked as started under the lock with which HELLO's list is created. None if there is none, and
        another check is due.
        """
        now = time.monotonic()
        windows = self._windows
        waits = [] if windows is None else [windows.abort_lost(self._client), windows.check_late()]
        wait = min((left for left in waits if left is not None), default=None)
        for task in list(self._queue):
            if task.job.kind == STORE and self._stores_paused:
                left = task.queued_at + _PAUSED_STORE_S - now
                if left <= 0:
                    self._drop(task, "paused")
                else:
                    wait = left if wait is None else min(wait, left)
        runnable = [t for t in self._queue if t.job.kind != STORE] or ([] if self._stores_paused else self._queue)
        if not runnable:
            self._wake.wait(_QUEUE_CHECK_S if wait is None else min(wait, _QUEUE_CHECK_S))
            return None
        task = runnable[0]
        self._queue.remove(task)
        self._running = task
        if windows is not None:
            windows.job_begins()
        return task

    def _run(self, task: Task, mapping: Mapping | None, copier: Copier, window: WindowCopier | None) -> None:
        failure, lost = "", False
        crashed: Exception | None = None
        start = time.monotonic()
        try:
            failure = copy_job(task, mapping, copier, window)
        except WindowLostError as error:
            logger.warning("a %s failed and ended the window: job=%d: %s", task.job.kind, task.job.id, error)
            lost = True
        except Exception as error:
            logger.exception("a %s failed: job=%d", task.job.kind, task.job.id)
            crashed = error
            try:
                copier.synchronize()
            except Exception:
                logger.exception("waiting for the device's copy stream failed")
        took = time.monotonic() - start
        good = not failure and not lost and crashed is None
        with self._wake:
            if failure:
                self._count(failure)
            if failure.endswith(_BROKEN_WINDOW):
                self._give_window_up(window, f"{failure.rpartition('/')[2]}: the sidecar refused to copy a stage")
            if good and task.plan is not None:
                kind = task.job.kind
                self._report.copied_bytes[kind] = self._report.copied_bytes.get(kind, 0) + task.plan.nbytes
                self._report.copied_seconds[kind] = self._report.copied_seconds.get(kind, 0.0) + took
            if lost and window is not None:
                self._lose_window(task, window)
            elif crashed and window is not None:
                self._count(f"{task.job.kind}_failed/window/CopyFailed")
                self._give_window_up(window, f"CopyFailed: {crashed}")
            # Only now: if anything above raises, the copy loop ends the running job as failed.
            self._running = None
            self._finish(task, good, not lost)
            broken = crashed is not None and window is None
            self._failures = self._failures + 1 if broken else 0
            if broken:
                self._count("copy_failed")
                for other in list(self._queue):
                    self._drop(other, "copy_failed")
            give_up = self._failures >= _MAX_FAILURES_IN_A_ROW
        if give_up:
            self._go_off_later("CopyFailed", str(crashed))

    def _lose_window(self, task: Task, window: WindowCopier) -> None:
        """The sidecar may still copy the stages of this job. The lock is held."""
        self._count(f"{task.job.kind}_failed/window/Lost")
        if self._windows is None:
            return
        if self._windows.live is window:
            self._windows.retire()
        if task.job.kind == STORE and task.plan is not None:
            body = Sections(region=task.job.region, refs=task.plan.packed)
            self._windows.add_lost(self._client, window.boot, body)

    def _give_window_up(self, window: WindowCopier | None, message: str) -> None:
        """The worker copies without a window from now on. The lock is held."""
        if self._windows is not None and self._windows.live is window is not None:
            self._windows.give_up(message)

    def _count_locked(self, event: str) -> None:
        with self._wake:
            self._count(event)

    # -- the client's hooks (reader thread)

    def held(self, region: int | None) -> Held:
        """Excludes slots of other regions, because a slot of this region may have the same number and generation."""
        with self._wake:
            self._stores_paused = True
            tasks = [task for task in (self._running, *self._queue, *self._arrived) if task is not None]
            refs = [(t.job.region, t.plan.packed) for t in tasks if t.job.kind == STORE and t.plan is not None]
            ended = [(body.region, body.refs) for _, body in self._outbox]
            lost = [] if self._windows is None else [(lost.body.region, lost.body.refs) for lost in self._windows.lost]
            return Held(grants=b"".join(packed for of, packed in [*refs, *ended, *lost] if of == region))

    def after_hello(self) -> None:
        with self._wake:
            outbox, self._outbox = self._outbox, []
            for op, body in outbox:
                self._send(op, body)

    def on_hello(self, reply: HelloReply) -> None:
        mapping = shared().mapping
        if reply.memory in ("sent", "held") and mapping is not None:
            if self._mapping is not mapping and not self._attach(mapping):
                return
            with self._wake:
                if mapping.retired:
                    # Meanwhile the sidecar made the other role of this process unmap. This role sends another HELLO.
                    return
                self._mapping = mapping
                self._stores_paused = False
                self._wake.notify_all()
        register, client = self._register, self._client
        if register is None or client is None:
            return
        if self._windows is not None:
            with self._wake:
                self._windows.on_boot(client, reply.boot)
                self._wake.notify_all()
        chunk_tokens = reply.settings.chunk_tokens
        states = any(group.kind == STATE for group in register.groups)
        register.chunk_tokens = keys.effective_chunk_tokens(chunk_tokens, register.scheduler_block_tokens, states)
        client.request(Op.REGISTER, register, self._on_registered)

    def _attach(self, mapping: Mapping) -> bool:
        try:
            if self._copier is not None:
                self._copier.attach(mapping)
            return True
        except Exception as error:
            logger.exception("preparing copies to the arena failed")
            self._go_off_later("AttachFailed", str(error))
            return False

    def _go_off_later(self, reason: str, message: str) -> None:
        """Like `_go_off`, for threads that it waits for."""
        if self._fail_all(reason):
            threading.Thread(target=self._leave, args=(reason, message), name="kvcachepool-off", daemon=True).start()

    def _on_registered(self, reply: Reply) -> None:
        if reply.error is not None:
            logger.warning("the sidecar refused to register this rank: %s: %s", reply.error.code, reply.error.message)
            if reply.error.code in _FINAL:
                self._go_off_later(reply.error.code, reply.error.message)
            return
        answer = reply.read(RegisterReply)
        logger.info("registered with the sidecar: layout=%s ready=%s", answer.layout_id.hex()[:16], answer.ready)
        if self._windows is not None and self._client is not None:
            with self._wake:
                self._windows.registered(self._client, answer)
                self._wake.notify_all()

    def on_lost(self) -> None:
        """Stores continue, and their results are sent after the next HELLO. The window ends with the connection."""
        retired: list[WindowCopier] = []
        with self._wake:
            if self._windows is not None:
                self._windows.retire()
                if self._stopping and self._running is None:
                    # The copy thread may have ended.
                    retired = self._windows.take_retired()
            self._wake.notify_all()
        for window in retired:
            window.close()

    def before_unmap(self) -> None:
        with self._wake:
            self._mapping = None
            self._drop_all("unmapped")
            if self._windows is not None:
                self._windows.retire()
            while self._running is not None:
                self._wake.wait(1.0)
            if self._windows is not None:
                self._windows.forget()
        if self._copier is not None:
            self._copier.detach()

    def on_off(self, reason: str) -> None:
        self._go_off(reason, "", report=False)

    # -- start and end

    def _connect(self, layout: Layout, ranks: Ranks, version: str) -> None:
        try:
            registers = registrations(self._config, self._kv_cache_config, layout, ranks, self._device_uuid)
            self._register = next(registers)
            client = Connection("worker", self._instance, ranks.rank, version, self._socket_path, self)
            with self._wake:
                if self.off_reason:
                    return
                self._client = client
            client.start()
            for register in registers:
                self._register = register
                client.reconnect()
            if self._relay is not None:
                self._relay.start(self._register.model)
        except Unserved as error:
            self._go_off(error.reason, error.message)
        except Exception as error:
            logger.exception("describing this rank to the sidecar failed")
            self._go_off("RegisterFailed", str(error))

    def end_copies(self, timeout_s: float) -> None:
        """Starts no further copy and waits for the current one, at most this long. Called at the end of the process."""
        deadline = time.monotonic() + timeout_s
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
            while self._running is not None and (left := deadline - time.monotonic()) > 0:
                self._wake.wait(left)

    def _go_off(self, reason: str, message: str, report: bool = True) -> None:
        """Turns this rank off permanently."""
        if self._fail_all(reason):
            self._leave(reason, message, report)

    def _fail_all(self, reason: str) -> bool:
        """From now on all jobs end as failed, including those that wait. False if they did before."""
        with self._wake:
            first = not self.off_reason
            self.off_reason = self.off_reason or reason
            self._drop_all("off")
        return first

    def _leave(self, reason: str, message: str, report: bool = True) -> None:
        for connection in (self._client, self._relay):
            if connection is not None:
                connection.go_off(reason)
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        if report:
            logger.warning("the KV cache pool is off in this worker, vLLM runs without it: %s: %s", reason, message)
            report_off(self._socket_path, reason, vllm_version(), self._instance)

    def _send_report(self) -> None:
        now = time.monotonic()
        if now - self._reported_at < _REPORT_EVERY_S:
            return
        with self._wake:
            pending = [task for task in (self._running, *self._queue) if task is not None]
            oldest = max((now - task.queued_at for task in pending), default=0.0)
            report = self._report
            if not (report.events or report.copied_bytes or oldest >= _REPORT_EVERY_S or report.oldest_job_ms):
                return
            report.oldest_job_ms = int(oldest * 1000)
            client = self._client
            if client is not None and client.send(Op.REPORT, report):
                self._report = Report(oldest_job_ms=report.oldest_job_ms)
                self._reported_at = now


def _end_copies(worker: weakref.ref[Worker]) -> None:
    """Runs at exit: a copy that does not hold the GIL must end before the interpreter frees the KV cache."""
    alive = worker()
    if alive is not None:
        alive.end_copies(_EXIT_WAIT_S)

"""A worker's window from REGISTER's response to its end, and the grants of stores that were lost with a window.

Copies that the sidecar started before it died may still run for a moment, and later boots have no record of them. So
the grants of such a store stay in the list of every HELLO until the boot that copied has answered their ABORT, or until
`_DEAD_COPIES_S` after the end of that boot.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .connection import Connection, Reply
from .copy_window import WindowCopier
from .messages import RegisterReply, Sections, Window, WindowReply
from .wire import Op

if TYPE_CHECKING:
    from .layout import Layout

logger = logging.getLogger("kvcachepool")

#: Transfer modes, as in REGISTER.
ENGINE, WINDOW = "engine", "cuda_window"
_DEAD_COPIES_S = 30.0
#: A sidecar that has not answered for this long is reported as late. Creating a context on a sleeping device takes
#: seconds.
_ANSWER_S = 30.0
#: Modes whose window may be created before vLLM serves requests. A window in device memory may not: vLLM first sizes
#: its KV cache, then warms up and captures graphs, and its remaining memory is known only after that.
_EARLY = ("cpu",)


@dataclass(eq=False)
class LostGrants:
    """Grants of a store that the sidecar may still copy for. `boot`: the boot that copied. `ended_at`: when this
    worker noticed its end.
    """

    body: Sections
    boot: int
    ended_at: float | None = None


class WindowKeeper:
    """The current window, if any. Responses to WINDOW arrive on the client's reader thread, and all other calls hold
    the owner's lock.
    """

    def __init__(self, layout: Layout, device_uuid: str, count: Callable[[str], None]) -> None:
        """`count` counts a named event and is called with or without the owner's lock."""
        self._layout = layout
        self._device_uuid = device_uuid
        self._count = count
        #: Copies use this window.
        self.live: WindowCopier | None = None
        self._pending: WindowCopier | None = None
        self._retired: list[WindowCopier] = []
        #: The client to request a window with, if one is due.
        self._window_client: Connection | None = None
        #: Time at which the pending response is late. Meanwhile the worker copies without a window.
        self._late_at: float | None = None
        self._serving = layout.device in _EARLY
        self.lost: list[LostGrants] = []
        #: Name of the reason why there is no window; and of why the current window does not use kernels.
        self.reason = ""
        self._no_kernels = ""

    # -- creating a window

    def registered(self, client: Connection, answer: RegisterReply) -> None:
        """The sidecar answered REGISTER. Requests a window, now or with the first job, if the sidecar uses windows."""
        self._window_client = client if answer.transfer == WINDOW else None
        self._request_window()

    def job_begins(self) -> None:
        """A job begins, so vLLM serves requests. Requests a window if that had to wait for this."""
        self._serving = True
        self._request_window()

    def _request_window(self) -> None:
        client = self._window_client
        if client is None or not self._serving:
            return
        self._window_client = None
        self._late_at = time.monotonic() + _ANSWER_S
        client.request(Op.WINDOW, Window(device_uuid=self._device_uuid), lambda reply: self._on_window(client, reply))

    def _on_window(self, client: Connection, reply: Reply) -> None:
        if reply.error is not None:
            self._unavailable(reply.error.message)
            return
        answer = reply.read(WindowReply)
        fds = list(reply.fds)
        reply.fds.clear()
        try:
            boot = 0 if client.hello is None else client.hello.boot
            pending = WindowCopier(self._layout, answer, fds, boot)
        except Exception as error:
            # After any failure the worker copies without a window.
            self._unavailable(f"NotMapped: {error}")
            return
        self._pending = pending
        self._late_at = time.monotonic() + _ANSWER_S
        tag = client.request(Op.WINDOW, Window(seen=True), lambda reply: self._on_confirmed(pending, reply))
        if tag is None and self._pending is pending:
            # The connection ended meanwhile, so the retirement of windows may have run before.
            self._pending = None
            pending.close()

    def _on_confirmed(self, pending: WindowCopier, reply: Reply) -> None:
        if self._pending is not pending:
            return
        self._pending = self._late_at = None
        if reply.error is not None or not reply.read(WindowReply).working:
            self._retired.append(pending)
            message = "NotMapped: the sidecar sees other memory" if reply.error is None else reply.error.message
            self._unavailable(message)
            return
        logger.info("copies use the sidecar's window: memory=%s", pending.memory.where)
        self.reason = self._no_kernels = ""
        self.live = pending
        self._count_kernels()

    def check_late(self) -> float | None:
        """Logs a late response once; it is still used when it arrives. Returns the seconds until the next check."""
        left = None if self._late_at is None else self._late_at - time.monotonic()
        if left is None or left > 0:
            return left
        self._unavailable(f"TimedOut: no answer to WINDOW in {_ANSWER_S:g} s; a later answer is still used")
        return None

    def _unavailable(self, message: str) -> None:
        self._late_at = None
        self.reason = message.split(":")[0]
        self._count(f"window_unavailable/{self.reason}")
        logger.warning("the sidecar's window is not available, so this worker copies without it: %s", message)

    def _count_kernels(self) -> None:
        """Counts once that the current window does not use kernels."""
        reason = "" if self.live is None else self.live.memory.no_kernels
        if reason and reason != self._no_kernels:
            self._no_kernels = reason
            self._count(f"window_without_kernels/{reason}")

    # -- end of a window

    def retire(self) -> None:
        """No further copy uses the window. The copy thread closes it."""
        for window in (self.live, self._pending):
            if window is not None:
                self._retired.append(window)
        self.live = self._pending = self._window_client = self._late_at = None

    def give_up(self, message: str) -> None:
        """The current window failed. Retires it, and requests no other before the next response to REGISTER."""
        self.retire()
        self._unavailable(message)

    def take_retired(self) -> list[WindowCopier]:
        """Returns retired windows. The caller closes them between two copies and without the lock, because a device may
        take long to unmap memory. Also checks the state of the current window.
        """
        self._count_kernels()
        return [self._retired.pop() for _ in range(len(self._retired))]

    # -- grants that were lost with a window

    def add_lost(self, client: Connection | None, boot: int, body: Sections) -> None:
        """A window of this boot ended in the middle of a store of these sections."""
        lost = LostGrants(body, boot)
        self.lost.append(lost)
        # The next boot may have answered HELLO before the end of the window was seen.
        if client is not None and client.hello is not None:
            self._check_boot(client, lost, client.hello.boot)

    def _check_boot(self, client: Connection, lost: LostGrants, boot: int) -> None:
        if lost.boot != boot and lost.ended_at is None:
            lost.ended_at = time.monotonic()
        self._abort(client, lost)

    def _abort(self, client: Connection, lost: LostGrants) -> None:
        if lost.ended_at is None:
            client.request(Op.ABORT, lost.body, lambda reply: self._answered(lost, reply))

    def _answered(self, lost: LostGrants, reply: Reply) -> None:
        """The boot that copied has confirmed that no copy is running. If it refused, ABORT is sent again later."""
        if reply.error is None and lost in self.lost:
            self.lost.remove(lost)

    def on_boot(self, client: Connection, boot: int) -> None:
        """This boot answered HELLO."""
        for lost in self.lost:
            self._check_boot(client, lost, boot)

    def abort_lost(self, client: Connection | None) -> float | None:
        """Sends the ABORT of grants that no dead boot can write to any more. Returns the seconds until the next
        call.
        """
        wait: float | None = None
        for lost in [lost for lost in self.lost if lost.ended_at is not None]:
            assert lost.ended_at is not None
            left = lost.ended_at + _DEAD_COPIES_S - time.monotonic()
            if left <= 0 and client is not None and client.send(Op.ABORT, lost.body):
                self.lost.remove(lost)
                self._count("store_given_back/window")
                continue
            left = max(left, 1.0) if left <= 0 else left
            wait = left if wait is None else min(wait, left)
        return wait

    def forget(self) -> None:
        """The region was unmapped, so its grants do not exist any more."""
        self.lost.clear()

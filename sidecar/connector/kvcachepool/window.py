"""A worker's window from REGISTER's answer to its end, and the grants of stores that were lost with one.

What the sidecar had begun to copy when it died may still move for a moment, and no later boot knows of it. So the
grants of such a store stay in the list of every HELLO until its ABORT was answered by the boot that copied, or until
`_DEAD_COPIES_S` after that boot was gone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .client import Client, Reply
from .copy_window import WindowCopier
from .messages import RegisterReply, Sections, Window, WindowReply
from .wire import Op

if TYPE_CHECKING:
    from .layout import Layout

logger = logging.getLogger("kvcachepool")

#: Transfer modes, as REGISTER names them.
ENGINE, WINDOW = "engine", "cuda_window"
_DEAD_COPIES_S = 30.0
#: A sidecar that has not answered for so long is said to be late. To make a context on a sleeping device takes seconds.
_ANSWER_S = 30.0
#: Where a window may be made before vLLM serves. In device memory it may not: vLLM sizes its KV cache first, then warms
#: up and captures graphs, and what memory it needs besides is seen when it has.
_EARLY = ("cpu",)


@dataclass(eq=False)
class Lost:
    """Grants of a store that the sidecar may still copy for. `boot`: which did; `gone_at`: when that was seen gone."""

    body: Sections
    boot: int
    gone_at: float | None = None


class WindowKeeper:
    """The window in use, if any. Answers to WINDOW come on the client's reader thread, all else under the owner's
    lock.
    """

    def __init__(self, layout: Layout, device_uuid: str, count: Callable[[str], None]) -> None:
        """`count` counts a named event and is called with the owner's lock held or not."""
        self._layout = layout
        self._device_uuid = device_uuid
        self._count = count
        #: Copies go through it.
        self.live: WindowCopier | None = None
        self._asked: WindowCopier | None = None
        self._retired: list[WindowCopier] = []
        #: To be asked for a window.
        self._wanted: Client | None = None
        #: When the answer that is waited for is late. Nothing waits with it: the worker copies itself meanwhile.
        self._late_at: float | None = None
        self._serving = layout.device in _EARLY
        self.lost: list[Lost] = []
        #: Why there is no window, by name; and why the one in use does without kernels.
        self.reason = ""
        self._no_kernels = ""

    # -- making one

    def registered(self, client: Client, answer: RegisterReply) -> None:
        """REGISTER was answered: a window is asked for where the sidecar wants one, now or with the first job."""
        self._wanted = client if answer.transfer == WINDOW else None
        self._ask()

    def job_begins(self) -> None:
        """vLLM serves requests."""
        self._serving = True
        self._ask()

    def _ask(self) -> None:
        client = self._wanted
        if client is None or not self._serving:
            return
        self._wanted = None
        self._late_at = time.monotonic() + _ANSWER_S
        client.ask(Op.WINDOW, Window(device_uuid=self._device_uuid), lambda reply: self._made(client, reply))

    def _made(self, client: Client, reply: Reply) -> None:
        if reply.error is not None:
            self._none(reply.error.message)
            return
        answer = reply.read(WindowReply)
        fds = list(reply.fds)
        reply.fds.clear()
        try:
            boot = 0 if client.hello is None else client.hello.boot
            asked = WindowCopier(self._layout, answer, fds, boot)
        except Exception as error:
            # Whatever it was, the worker can copy without a window.
            self._none(f"NotMapped: {error}")
            return
        self._asked = asked
        self._late_at = time.monotonic() + _ANSWER_S
        tag = client.ask(Op.WINDOW, Window(seen=True), lambda reply: self._seen(asked, reply))
        if tag is None and self._asked is asked:
            # The connection ended while it was made: the one that retires windows may have been here before.
            self._asked = None
            asked.close()

    def _seen(self, asked: WindowCopier, reply: Reply) -> None:
        if self._asked is not asked:
            return
        self._asked = self._late_at = None
        if reply.error is not None or not reply.read(WindowReply).working:
            self._retired.append(asked)
            self._none(reply.error.message if reply.error is not None else "NotMapped: it does not work")
            return
        logger.info("bytes go by a window of the sidecar in %s", asked.memory.where)
        self.reason = self._no_kernels = ""
        self.live = asked
        self._count_kernels()

    def look_for_answer(self) -> float | None:
        """Says once that an answer is late; one that still comes is as good as any. Returns in how many seconds to look
        again.
        """
        left = None if self._late_at is None else self._late_at - time.monotonic()
        if left is None or left > 0:
            return left
        self._none("TimedOut: the sidecar does not answer")
        return None

    def _none(self, message: str) -> None:
        self._late_at = None
        self.reason = message.split(":")[0]
        self._count(f"windowUnavailable/{self.reason}")
        logger.warning("no window, this worker copies itself: %s", message)

    def _count_kernels(self) -> None:
        """Counts once, of the window in use, that it does without kernels."""
        reason = "" if self.live is None else self.live.memory.no_kernels
        if reason and reason != self._no_kernels:
            self._no_kernels = reason
            self._count(f"windowWithoutKernels/{reason}")

    # -- its end

    def retire(self) -> None:
        """No further copy goes through the window; the copy thread closes it when it has done with it."""
        for window in (self.live, self._asked):
            if window is not None:
                self._retired.append(window)
        self.live = self._asked = self._wanted = self._late_at = None

    def give_up(self, message: str) -> None:
        """The window in use fails: it is retired, and no other is asked for before REGISTER is answered again."""
        self.retire()
        self._none(message)

    def reap(self) -> list[WindowCopier]:
        """What was retired, for the caller to close between two copies and without the lock: a device may take long to
        unmap it. Also sees what became of the window in use.
        """
        self._count_kernels()
        return [self._retired.pop() for _ in range(len(self._retired))]

    # -- grants that were lost with it

    def lose(self, client: Client | None, boot: int, body: Sections) -> None:
        """A window of this boot ended in the middle of a store of these sections."""
        lost = Lost(body, boot)
        self.lost.append(lost)
        # The next boot may have greeted before the end of the window was seen.
        if client is not None and client.hello is not None:
            self._meet(client, lost, client.hello.boot)

    def _meet(self, client: Client, lost: Lost, boot: int) -> None:
        if lost.boot != boot and lost.gone_at is None:
            lost.gone_at = time.monotonic()
        self._ask_back(client, lost)

    def _ask_back(self, client: Client, lost: Lost) -> None:
        if lost.gone_at is None:
            client.ask(Op.ABORT, lost.body, lambda reply: self._answered(lost, reply))

    def _answered(self, lost: Lost, reply: Reply) -> None:
        """No copy of it runs any more: the boot that copied says so. One that refused to say is asked again later."""
        if reply.error is None and lost in self.lost:
            self.lost.remove(lost)

    def greeted(self, client: Client, boot: int) -> None:
        """HELLO was answered by this boot."""
        for lost in self.lost:
            self._meet(client, lost, boot)

    def give_back(self, client: Client | None) -> float | None:
        """Sends the ABORT of what no dead boot can write to any more. Returns in how many seconds to ask again."""
        wait: float | None = None
        for lost in [lost for lost in self.lost if lost.gone_at is not None]:
            assert lost.gone_at is not None
            left = lost.gone_at + _DEAD_COPIES_S - time.monotonic()
            if left <= 0 and client is not None and client.send(Op.ABORT, lost.body):
                self.lost.remove(lost)
                self._count("storeGivenBack/window")
                continue
            left = max(left, 1.0) if left <= 0 else left
            wait = left if wait is None else min(wait, left)
        return wait

    def forget(self) -> None:
        """The region is unmapped: what was granted in it means nothing any more."""
        self.lost.clear()

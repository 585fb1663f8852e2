"""One rank of an engine without vLLM: both roles' sessions with a sidecar, and a window."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu import place

CHUNK_BLOCKS = 2
CHUNK_TOKENS = CHUNK_BLOCKS * place.STATES


class Role:
    """One role's session, which records the response to REGISTER."""

    def __init__(self, role: str, socket: Path, register: Any, rank: int = 0) -> None:
        from kvcachepool.connection import Connection, Held

        self._held = Held()
        self._body = register
        self.registered = threading.Event()
        self.refused = ""
        #: Called with the response to REGISTER, on the reader thread.
        self.behind: Any = lambda reply: None
        self.client = Connection(role, "engine-1", rank, "0.32.0", str(socket), self)

    def held(self, region: int | None) -> Any:
        return self._held

    def after_hello(self) -> None:
        pass

    def on_hello(self, reply: Any) -> None:
        from kvcachepool.wire import Op

        self.client.request(Op.REGISTER, self._body, self._answered)

    def _answered(self, reply: Any) -> None:
        self.refused = "" if reply.error is None else str(reply.error)
        if not self.refused:
            self.behind(reply)
        self.registered.set()

    def on_lost(self) -> None:
        self.registered.clear()

    def before_unmap(self) -> None:
        pass

    def on_off(self, reason: str) -> None:
        pass

    def request(self, op: Any, body: Any, kind: Any) -> Any:
        """The final answer and its tag. None if the connection was lost meanwhile."""
        done, answers = threading.Event(), []

        def on_reply(reply: Any) -> None:
            answers.append(reply)
            if not reply.partial:
                done.set()

        tag = self.client.request(op, body, on_reply)
        if tag is None or not done.wait(5.0):
            return None
        assert answers[-1].error is None, answers[-1].error
        return answers[-1].read(kind), tag


class Rank:
    """Both roles of an engine with one rank, and a window of the sidecar between its KV blocks and the arena."""

    def __init__(self, sidecar: Any, layout: Any) -> None:
        import kvcachepool.shared as shared_module
        from kvcachepool import messages
        from kvcachepool.layout import canonical
        from kvcachepool.pieces import Planner
        from kvcachepool.shared import Shared
        from kvcachepool.window import ENGINE, WINDOW, WindowKeeper

        # This process runs one engine after another.
        shared_module._shared = Shared()
        self.layout = layout
        self.reasons: list[str] = []
        self.keeper = WindowKeeper(layout, place.device_uuid(), self.reasons.append)
        # No engine measures its memory here.
        self.keeper.job_begins()
        self.planner = Planner(layout)
        group = layout.groups[0]
        tokens: dict[str, Any] = {"scheduler_block_tokens": place.STATES, "chunk_tokens": CHUNK_TOKENS}
        sizes: dict[str, Any] = {"world": 1, "local_world": 1, **tokens}
        worker = messages.Register(
            **sizes,
            model=canonical({"model": "gpu tests"}),
            layout=canonical(layout.descriptor),
            device=layout.device,
            device_uuid=place.device_uuid(),
            transfer_modes=[ENGINE, WINDOW],
            groups=[
                messages.Group(
                    kind="full",
                    block_tokens=place.STATES,
                    block_bytes=group.block_bytes,
                    shards=1,
                    shard=0,
                    writer=True,
                )
            ],
        )
        hashing = messages.Hashing(algorithm="sha256_cbor", root="00" * 32, block_tokens=place.STATES)
        scheduler = messages.Register(**sizes, hashing=hashing)
        self.worker = Role("worker", sidecar.socket, worker)
        self.worker.behind = self._registered
        self.scheduler = Role("scheduler", sidecar.socket, scheduler)
        for role in (self.worker, self.scheduler):
            role.client.start()
        for role in (self.worker, self.scheduler):
            assert role.registered.wait(30), f"no answer to REGISTER of the {role.client.role}"
            assert not role.refused, f"REGISTER of the {role.client.role}: {role.refused}"
        place.wait_for(lambda: self.keeper.live or self.reasons, 60, "a window or the reason why there is none")

    def _registered(self, reply: Any) -> None:
        from kvcachepool.messages import RegisterReply

        self.keeper.registered(self.worker.client, reply.read(RegisterReply))

    def close(self) -> None:
        self.keeper.retire()
        for window in self.keeper.take_retired():
            window.close()
        self.worker.client.go_off("TestOver")
        self.scheduler.client.go_off("TestOver")

    def copied(self, kind: str, refs: bytes, blocks: Sequence[tuple[int, ...]], event: Any = None) -> None:
        """Copies the blocks of chunks. Returns when the bytes have arrived."""
        import torch

        from kvcachepool.shared import Refs

        chunks = [Chunk(refs[i * 16 : i * 16 + 16], ids) for i, ids in enumerate(blocks)]
        plan = self.planner.plan(chunks, kind == "store")
        assert len(Refs.read(plan.packed).slots) == len(blocks)
        with torch.inference_mode():
            refused = self.live.copy(kind, plan, event)
        assert refused == "", refused

    @property
    def live(self) -> Any:
        """The current window."""
        return self.keeper.live

    def granted(self, hashes: list[bytes]) -> Any:
        """The GRANT response, with the slots of these chunks."""
        from kvcachepool import messages
        from kvcachepool.wire import Op

        chunks = [
            messages.GrantChunk(
                hash=one,
                parent=hashes[i - 1] if i else b"",
                first_token=i * CHUNK_TOKENS,
                tokens=CHUNK_TOKENS,
                groups=1,
            )
            for i, one in enumerate(hashes)
        ]

        def answered() -> Any:
            reply = self.scheduler.request(Op.GRANT, messages.Grant(request="s", chunks=chunks), messages.GrantReply)
            return reply and set(reply[0].results) == {messages.GRANT_GRANTED} and reply[0]

        return place.wait_for(answered, 20, "GRANT")

    def commit(self, reply: Any) -> None:
        """The granted slots hold their bytes."""
        from kvcachepool import messages
        from kvcachepool.wire import Op

        assert self.worker.client.send(Op.COMMIT, messages.Sections(region=reply.region, refs=reply.refs))

    def pinned(self, hashes: list[bytes], request: str) -> Any:
        """The PROBE response, with the slots of these chunks. They stay until `release`."""
        from kvcachepool import messages
        from kvcachepool.wire import Op

        def ready() -> Any:
            body = messages.Probe(request=request, hashes=b"".join(hashes), local_tokens=0, budget_ms=1000)
            reply = self.scheduler.request(Op.PROBE, body, messages.ProbeReply)
            return reply and set(reply[0].states) == {messages.CHUNK_READY} and reply

        reply, tag = place.wait_for(ready, 20, "all chunks ready")
        assert self.scheduler.client.send(Op.PIN, messages.Pin(request=request, probe=tag, from_=0, to=len(hashes)))
        return reply

    def release(self, request: str) -> None:
        """Releases the chunks of a request."""
        from kvcachepool import messages
        from kvcachepool.wire import Op

        self.scheduler.client.send(Op.RELEASE, messages.Release(requests=[request]))

    def store(self, hashes: list[bytes], blocks: Sequence[tuple[int, ...]], event: Any = None) -> None:
        """Stores chunks that can be hit soon after."""
        reply = self.granted(hashes)
        self.copied("store", reply.refs, blocks, event)
        self.commit(reply)

    def load(self, hashes: list[bytes], blocks: Sequence[tuple[int, ...]], request: str) -> None:
        """Loads chunks. Returns when the bytes have arrived."""
        self.copied("load", self.pinned(hashes, request).refs, blocks)
        self.release(request)


class Chunk:
    """A chunk of a job."""

    def __init__(self, refs: bytes, blocks: tuple[int, ...]) -> None:
        self.refs = refs
        self.blocks = (blocks,)

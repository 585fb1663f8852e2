"""The way `CudaWindow`: bytes of KV blocks by a window of the real sidecar, without vLLM around it."""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from gpu import place

CHUNK_BLOCKS = 2
CHUNK_TOKENS = CHUNK_BLOCKS * place.STATES


class Role:
    """One role's session by hand; tells when REGISTER was answered."""

    def __init__(self, role: str, socket: Path, register: Any) -> None:
        from kvcachepool.client import Client, Held

        self._held = Held()
        self._body = register
        self.registered = threading.Event()
        self.refused = ""
        #: What is called with REGISTER's answer, on the reader thread.
        self.behind: Any = lambda reply: None
        self.client = Client(role, "engine-1", 0, "0.32.0", str(socket), self)

    def held(self) -> Any:
        return self._held

    def behind_hello(self) -> None:
        pass

    def on_hello(self, reply: Any) -> None:
        from kvcachepool.wire import Op

        self.client.ask(Op.REGISTER, self._body, self._answered)

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

    def ask(self, op: Any, body: Any, kind: Any) -> Any:
        """The final answer and its tag; None where the connection broke meanwhile."""
        done, answers = threading.Event(), []

        def on_reply(reply: Any) -> None:
            answers.append(reply)
            if not reply.partial:
                done.set()

        tag = self.client.ask(op, body, on_reply)
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

        # This process plays one engine after the other.
        shared_module._shared = Shared()
        self.layout = layout
        self.reasons: list[str] = []
        self.keeper = WindowKeeper(layout, place.device_uuid(), self.reasons.append)
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
        self.keeper.reap()
        self.worker.client.go_off("TestOver")
        self.scheduler.client.go_off("TestOver")

    def _copied(self, kind: str, refs: bytes, blocks: Sequence[tuple[int, ...]], event: Any) -> str:
        import torch

        from kvcachepool.shared import Refs

        chunks = [_Chunk(refs[i * 16 : i * 16 + 16], (ids,)) for i, ids in enumerate(blocks)]
        plan = self.planner.plan(chunks, kind == "store")
        assert len(Refs.read(plan.packed).slots) == len(blocks)
        with torch.inference_mode():
            return self.live.copy(kind, plan, event)

    @property
    def live(self) -> Any:
        """The window in use."""
        return self.keeper.live

    def store(self, hashes: list[bytes], blocks: Sequence[tuple[int, ...]], event: Any = None) -> None:
        """Until the chunks can be hit."""
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

        def granted() -> Any:
            said = self.scheduler.ask(Op.GRANT, messages.Grant(request="s", chunks=chunks), messages.GrantReply)
            return said and set(said[0].results) == {messages.GRANT_GRANTED} and said[0]

        said = place.wait_for(granted, 20, "GRANT")
        refused = self._copied("store", said.refs, blocks, event)
        assert refused == "", refused
        assert self.worker.client.send(Op.COMMIT, messages.Sections(region=said.region, refs=said.refs))

    def load(self, hashes: list[bytes], blocks: Sequence[tuple[int, ...]], request: str) -> None:
        """Until the bytes are there."""
        from kvcachepool import messages
        from kvcachepool.wire import Op

        def ready() -> Any:
            body = messages.Probe(request=request, hashes=b"".join(hashes), local_tokens=0, budget_ms=1000)
            said = self.scheduler.ask(Op.PROBE, body, messages.ProbeReply)
            return said and set(said[0].states) == {messages.CHUNK_READY} and said

        said, tag = place.wait_for(ready, 20, "all chunks ready")
        assert self.scheduler.client.send(Op.PIN, messages.Pin(request=request, probe=tag, from_=0, to=len(hashes)))
        refused = self._copied("load", said.refs, blocks, None)
        assert refused == "", refused
        self.scheduler.client.send(Op.RELEASE, messages.Release(requests=[request]))


class _Chunk:
    def __init__(self, refs: bytes, blocks: tuple[tuple[int, ...], ...]) -> None:
        self.refs = refs
        self.blocks = blocks


class Window(place.OnDevice):
    """A sidecar for all tests, an engine for each."""

    sidecar: ClassVar[Any]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        from servers import paths
        from servers.sidecar import Sidecar

        folder = paths.short_folder()
        cls.addClassCleanup(shutil.rmtree, folder, ignore_errors=True)
        transfer = {"mode": "CudaWindow", "windowSize": "32Mi"}
        memory = {"evictionPolicy": "FIFO"}
        cls.sidecar = Sidecar(folder / "pod", memory="128Mi", config={"memory": memory, "transfer": transfer})
        cls.addClassCleanup(cls.sidecar.stop)
        cls.sidecar.start()

    def rank(self, name: str) -> tuple[Any, Rank]:
        layout = place.kv_cache(name)
        rank = Rank(self.sidecar, layout)
        self.addCleanup(rank.close)
        assert rank.reasons == [], "there is no window"
        return layout, rank

    def there_and_back(self, name: str, seed: str) -> None:
        layout, rank = self.rank(name)
        hashes = [hashlib.sha256(f"{seed} {i}".encode()).digest() for i in range(3)]
        wanted = place.blocks(layout)
        stored, others = [(7, 2), (23, 1), (5, 6)], [(4, 3), (9, 10), (22, 11)]
        rank.store(hashes, stored)
        rank.load(hashes, others, f"{seed} load")
        for into, origin in zip(others, stored, strict=True):
            for number, source in zip(into, origin, strict=True):
                wanted[number] = wanted[source]
        assert place.blocks(layout) == wanted
        rank.close()

    def test_bytes_go_by_the_window_and_come_back_the_same_in_every_layout(self) -> None:
        before = self.moved()
        for name in place.layouts():
            with self.subTest(layout=name):
                self.there_and_back(name, f"layout {name}")
        nbytes = 2 * 3 * CHUNK_BLOCKS * place.BLOCK_BYTES * len(place.layouts())
        assert self.moved() - before == nbytes, "all bytes went by the window"

    def moved(self) -> float:
        return float(self.sidecar.metrics().total("kvcachepool_window_copied_bytes_total"))

    def test_where_the_window_is_was_said(self) -> None:
        _, rank = self.rank("BLHNC")

        def told() -> Any:
            # Of engines that have just gone a session may be there without a window.
            sessions = self.sidecar.status()["sessions"]
            return next((session for session in sessions if session.get("transfer") == "cuda_window"), None)

        worker = place.wait_for(told, 20, "a session with a window")
        where = "host memory" if place.rehearsal() else "memory of "
        assert worker["transfer_reason"].startswith(where), worker["transfer_reason"]
        assert rank.live.memory.where == ("host memory" if place.rehearsal() else "device memory")

    def test_a_store_waits_for_the_event_behind_the_models_work(self) -> None:
        if place.rehearsal():
            self.skipTest("Rehearsal: work in host memory is done when it is asked for")
        import torch

        layout, rank = self.rank("LBHNC")
        hashes = [hashlib.sha256(b"behind an event").digest()]
        fresh = place.noise(layout.storages[0].numel(), 5).to("cuda")
        torch.cuda.synchronize()
        torch.cuda._sleep(500_000_000)
        with torch.inference_mode():
            layout.storages[0].copy_(fresh)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream())
        assert not event.query(), "the work is still to be done"
        rank.store(hashes, [(3, 4)], event)
        rank.load(hashes, [(8, 9)], "behind an event")
        assert place.block(layout, 8) + place.block(layout, 9) == place.block(layout, 3) + place.block(layout, 4)

    def test_after_the_death_of_the_sidecars_engine_there_is_another_window(self) -> None:
        _, rank = self.rank("LBNHC")
        rank.close()
        self.sidecar.kill_engine()
        self.sidecar.wait_ready()
        self.there_and_back("LBNHC", "after a death")

"""Segments of the arena by rank: two ranks of an engine with the real sidecar and the fake driver."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_cuda
import pytest
import torch

pytest.importorskip("msgspec")

import kvcachepool.copy_cuda as copy_cuda
import kvcachepool.shared as shared_module
from gpu import place
from gpu.rank import CHUNK_TOKENS, Chunk, Role
from kvcachepool import messages
from kvcachepool.copy_cuda import CudaCopier
from kvcachepool.layout import GroupShape, Layout, ShardOf, canonical
from kvcachepool.pieces import Planner
from kvcachepool.shared import Mapping, Shared
from kvcachepool.wire import Op
from servers.sidecar import Sidecar
from servers.waiting import wait_for

RANKS = 2
MIB = 1 << 20


class RankOfTwo:
    """A worker whose KV blocks count as the fake device's. It shares nothing, like a separate process."""

    def __init__(self, socket: Path, number: int) -> None:
        self.shared = shared_module._shared = Shared()
        layout = place.kv_cache("BLHNC")
        shape, mine = GroupShape("full", place.STATES, RANKS, 0), ShardOf(number, True)
        group_layout = layout.groups[0]._replace(shape=shape, mine=mine)
        self.layout: Layout = layout._replace(device="cuda", groups=(group_layout,))
        self.planner = Planner(self.layout)
        sizes: dict[str, Any] = {"scheduler_block_tokens": place.STATES, "chunk_tokens": CHUNK_TOKENS}
        group = messages.Group(
            kind="full",
            block_tokens=place.STATES,
            block_bytes=self.layout.groups[0].block_bytes,
            shards=RANKS,
            shard=number,
            writer=True,
        )
        body = messages.Register(
            world=RANKS,
            local_world=RANKS,
            **sizes,
            model=canonical({"model": "two ranks"}),
            layout=canonical(layout.descriptor),
            device="cuda",
            groups=[group],
        )
        self.role = Role("worker", socket, body, number)

    def attach(self) -> None:
        mapping = self.shared.mapping
        assert mapping is not None
        self.mapping: Mapping = mapping
        self.copier = CudaCopier(self.layout, lambda event: None)
        self.copier.attach(self.mapping)
        self.copier.begin_thread()

    def store(self, reply: messages.GrantReply, blocks: list[tuple[int, ...]]) -> None:
        size = 16 * RANKS
        chunks = [Chunk(reply.refs[at * size : at * size + size], ids) for at, ids in enumerate(blocks)]
        plan = self.planner.plan(chunks, True)
        self.copier.copy("store", plan.pieces, None)
        assert self.role.client.send(Op.COMMIT, messages.Sections(region=reply.region, refs=plan.packed))

    def close(self) -> None:
        self.copier.detach()
        self.role.client.go_off("TestOver")


def test_a_rank_page_locks_only_segments_that_it_uses(
    volume: Path, binary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_cuda.install(fake_cuda.built(tmp_path), monkeypatch)
    monkeypatch.setattr(copy_cuda, "_PIN_PAUSE_S", 0.0)
    monkeypatch.setenv("KVCACHEPOOL_GPU_REHEARSAL", "1")
    monkeypatch.setattr(shared_module, "_shared", Shared())
    locked: list[tuple[int, int]] = []
    runtime = torch.cuda.cudart()

    def register(address: int, nbytes: int, flags: int) -> int:
        locked.append((address, nbytes))
        return int(runtime.cudaHostRegister(address, nbytes, flags))

    counting = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=runtime.cudaHostUnregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: counting)
    sidecar = Sidecar(volume / "pod", memory="64Mi")
    sidecar.start()
    ranks = [RankOfTwo(sidecar.socket, number) for number in range(RANKS)]
    hashing = messages.Hashing(algorithm="sha256_cbor", root="00" * 32, block_tokens=place.STATES)
    scheduler = Role(
        "scheduler",
        sidecar.socket,
        messages.Register(
            world=RANKS,
            local_world=RANKS,
            scheduler_block_tokens=place.STATES,
            chunk_tokens=CHUNK_TOKENS,
            hashing=hashing,
        ),
    )
    roles = [scheduler, *(rank.role for rank in ranks)]
    try:
        for role in roles:
            role.client.start()
        for role in roles:
            assert role.registered.wait(30), role.client.role
            assert not role.refused
        for rank in ranks:
            rank.attach()
        chunk_bytes = ranks[0].layout.groups[0].block_bytes * 2
        stored = 0
        while stored * chunk_bytes < 20 * MIB:
            chunks = [
                messages.GrantChunk(
                    hash=hashlib.sha256(b"%d" % (stored + at)).digest(), first_token=0, tokens=CHUNK_TOKENS, groups=1
                )
                for at in range(8)
            ]

            def granted(chunks: Any = chunks) -> Any:
                reply = scheduler.request(Op.GRANT, messages.Grant(request="s", chunks=chunks), messages.GrantReply)
                return reply and set(reply[0].results) == {messages.GRANT_GRANTED} and reply[0]

            reply = wait_for(granted, 20, "GRANT")
            for rank in ranks:
                rank.store(reply, [(1 + 2 * at, 2 + 2 * at) for at in range(8)])
            stored += len(chunks)
        wait_for(lambda: all(not rank.copier._locks._wanted for rank in ranks), 20, "page locks")  # type: ignore[union-attr]
        wait_for(lambda: sidecar.status()["memory"]["slots"]["committed"] == 0, 20, "digests")

        def of(rank: RankOfTwo) -> set[int]:
            start, end = rank.mapping.arena_address, rank.mapping.arena_address + rank.mapping.arena_bytes
            return {(address - start) // rank.mapping.segment_bytes for address, _ in locked if start <= address < end}

        first, second = map(of, ranks)
        assert not first & second, f"both lock {sorted(first & second)}"
        # The content that a rank has stored, and at most one partly filled segment.
        segment = ranks[0].mapping.segment_bytes
        for mine in (first, second):
            assert len(mine) <= -(-stored * chunk_bytes // segment) + 1
        assert sum(nbytes for _, nbytes in locked) == (len(first) + len(second)) * segment
    finally:
        for rank in ranks:
            rank.close()
        scheduler.client.go_off("TestOver")
        sidecar.stop()

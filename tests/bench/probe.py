"""How long a request's first PROBE takes: 512 hashes (128k tokens) over the socket, all 512 chunks in memory.

From `ask` on the caller's thread to the final answer on the reader thread, with the real sidecar: the lookup alone
(`memory.verify: Background`), and with the digests of the 32 MiB that are asked for (`Always`).

    python tests/bench/probe.py [--runs 300]
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "sidecar" / "connector"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.results import Row, merge
from kvcachepool import messages
from kvcachepool.connection import Connection, Held, Reply
from kvcachepool.messages import Message
from kvcachepool.wire import Op
from servers.sidecar import Sidecar

CHUNKS = 512
CHUNK_TOKENS = 256
BLOCK_TOKENS = 16
BLOCK_BYTES = 4096
GRANTED_AT_ONCE = 64
WAIT_S = 20.0

_M = TypeVar("_M", bound=Message)


class Part:
    """One registered role of a vLLM, without held slots and copies."""

    def __init__(self, role: str, socket_path: str, register: messages.Register) -> None:
        self.registered = threading.Event()
        self._register = register
        self.client = Connection(role, "bench", 0, "0.32.0", socket_path, self)
        self.client.start()

    def held(self, region: int | None) -> Held:
        return Held()

    def after_hello(self) -> None:
        pass

    def on_hello(self, reply: messages.HelloReply) -> None:
        self.client.request(Op.REGISTER, self._register, self._on_registered)

    def _on_registered(self, reply: Reply) -> None:
        assert reply.error is None, reply.error
        self.registered.set()

    def on_lost(self) -> None:
        pass

    def before_unmap(self) -> None:
        pass

    def on_off(self, reason: str) -> None:
        pass

    def request(self, op: Op, body: Message, kind: type[_M]) -> tuple[_M, float]:
        """The final answer and its time in seconds."""
        done = threading.Event()
        answers: list[tuple[float, Reply]] = []

        def on_reply(reply: Reply) -> None:
            answers.append((time.perf_counter(), reply))
            if not reply.partial:
                done.set()

        start = time.perf_counter()
        assert self.client.request(op, body, on_reply) is not None, "no connection"
        assert done.wait(WAIT_S), f"{op.name} was not answered"
        end, reply = answers[-1]
        assert reply.error is None, reply.error
        return reply.read(kind), end - start


def registers() -> tuple[messages.Register, messages.Register]:
    """(worker, scheduler) of a small model."""
    group = messages.Group(
        kind="full", block_tokens=BLOCK_TOKENS, block_bytes=BLOCK_BYTES, shards=1, shard=0, writer=True
    )
    sizes: dict[str, Any] = {
        "world": 1,
        "local_world": 1,
        "scheduler_block_tokens": BLOCK_TOKENS,
        "chunk_tokens": CHUNK_TOKENS,
    }
    worker = messages.Register(
        **sizes, model='{"bench":1}', layout='{"bench":1}', device="cpu", transfer_modes=["engine"], groups=[group]
    )
    hashing = messages.Hashing(algorithm="sha256_cbor", root="00" * 32, block_tokens=BLOCK_TOKENS)
    return worker, messages.Register(**sizes, hashing=hashing)


def fill(worker: Part, scheduler: Part, hashes: list[bytes]) -> None:
    """Stores a chunk under each hash."""
    deadline = time.monotonic() + WAIT_S
    at = 0
    while at < len(hashes):
        chunks = [
            messages.GrantChunk(
                hash=hashes[i],
                parent=hashes[i - 1] if i else b"",
                first_token=i * CHUNK_TOKENS,
                tokens=CHUNK_TOKENS,
                groups=1,
            )
            for i in range(at, min(at + GRANTED_AT_ONCE, len(hashes)))
        ]
        answer, _ = scheduler.request(Op.GRANT, messages.Grant(request="fill", chunks=chunks), messages.GrantReply)
        taken = len(answer.results) - len(answer.results.lstrip(bytes([messages.GRANT_GRANTED])))
        if taken:
            worker.client.send(Op.COMMIT, messages.Sections(region=answer.region, refs=answer.refs[: taken * 16]))
        at += taken
        assert time.monotonic() < deadline, f"grants are refused: {list(answer.results[:8])}"
        time.sleep(0 if taken else 0.02)


def probe(scheduler: Part, hashes: list[bytes], request: str) -> tuple[int, float]:
    """(ready chunks, seconds) of a request's first PROBE. The request ends at once."""
    body = messages.Probe(request=request, hashes=b"".join(hashes), local_tokens=0, budget_ms=2000)
    answer, took = scheduler.request(Op.PROBE, body, messages.ProbeReply)
    scheduler.client.send(Op.RELEASE, messages.Release(requests=[request]))
    return answer.states.count(messages.CHUNK_READY), took


def measure(folder: Path, runs: int) -> dict[str, list[float]]:
    """Seconds per PROBE by `memory.verify`, sorted."""
    sidecar = Sidecar(folder, memory="128Mi").start()
    try:
        for_worker, for_scheduler = registers()
        worker = Part("worker", str(sidecar.socket), for_worker)
        scheduler = Part("scheduler", str(sidecar.socket), for_scheduler)
        assert worker.registered.wait(WAIT_S)
        assert scheduler.registered.wait(WAIT_S)
        hashes = [hashlib.sha256(i.to_bytes(4, "little")).digest() for i in range(CHUNKS)]
        fill(worker, scheduler, hashes)
        deadline = time.monotonic() + WAIT_S
        while (ready := probe(scheduler, hashes, "warm")[0]) < CHUNKS:
            assert time.monotonic() < deadline, f"{ready} of {CHUNKS} chunks are readable"
            time.sleep(0.02)
        times: dict[str, list[float]] = {}
        for verify in ("Background", "Always"):
            sidecar.change({"memory": {"verify": verify}})
            taken = [probe(scheduler, hashes, f"{verify}-{i}") for i in range(runs)]
            assert all(ready == CHUNKS for ready, _ in taken)
            times[verify] = sorted(seconds for _, seconds in taken)
        scheduler.client.go_off("BenchOver")
        worker.client.go_off("BenchOver")
        return times
    finally:
        sidecar.stop()


def main() -> None:
    """Measures and merges the rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=300)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        times = measure(Path(folder) / "pod", options.runs)
    p50 = {verify: statistics.median(of) * 1000 for verify, of in times.items()}
    rows = (
        ("probe_128k_first_p50_ms", p50["Background"], "bound", 1.0),
        ("probe_128k_always_p50_ms", p50["Always"], "ms without digests", round(p50["Background"], 3)),
    )
    merge(
        Row(
            name=name,
            value=round(value, 3),
            unit="ms",
            reference=reference,
            reference_value=of,
            ratio=round(value / of, 3),
            runs=options.runs,
            command="python tests/bench/probe.py",
        )
        for name, value, reference, of in rows
    )
    for verify, of in times.items():
        print(f"{verify}: p99 {of[int(len(of) * 0.99)] * 1000:.3f} ms")


if __name__ == "__main__":
    main()

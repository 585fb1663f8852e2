"""Several nodes: one answer from those of all sidecars, the messages that steps carry, and lost connections."""

from __future__ import annotations

import pickle
import random
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from kvcachepool import lookups as lookups_module
from kvcachepool import nodes as nodes_module
from kvcachepool import registration as registration_module
from kvcachepool import relay as relay_module
from kvcachepool.connection import Held, Reply
from kvcachepool.controls import parse_controls
from kvcachepool.jobs import LOAD, STORE, Chunk, Job, WorkerReport
from kvcachepool.lookups import WaitForSteps
from kvcachepool.messages import (
    CHUNK_ABSENT,
    CHUNK_PENDING,
    CHUNK_READY,
    GRANT_EXISTS,
    GRANT_GRANTED,
    GRANT_NO_PARENT,
    GRANT_NO_ROOM,
    GRANT_NOT_READY,
    Abort,
    ErrorBody,
    Grant,
    GrantReply,
    Hashing,
    Pin,
    Probe,
    ProbeReply,
    Register,
    RegisterReply,
    Release,
    Report,
    decode,
    encode,
)
from kvcachepool.metrics import Counters
from kvcachepool.namespaces import Namespaces
from kvcachepool.nodes import Described, Lost, Nodes, Passed, Up, merged_grants, merged_probes
from kvcachepool.registration import Registration
from kvcachepool.relay import Relay
from kvcachepool.requests import RequestState
from kvcachepool.shared import NO_SLOT
from kvcachepool.wire import Op

CHUNKS = 256


def ref(slot: int) -> bytes:
    return struct.pack("<IIII", slot, 7, 64, 0)


def slots(refs: bytes) -> list[int]:
    return [slot for slot, *_ in struct.iter_unpack("<IIII", refs)]


# -- answers as one


@pytest.mark.parametrize("seed", range(50))
def test_a_chunk_is_ready_only_on_all_nodes_and_has_the_references_of_all(seed: int) -> None:
    drawn = random.Random(seed)
    columns = [drawn.choices([0, 1, 1, 1, 2], k=3) for _ in range(drawn.randrange(12))]
    answers = []
    for node in range(3):
        ready = [chunk for chunk, states in enumerate(columns) if states[node] == CHUNK_READY]
        refs = b"".join(ref(1000 * node + chunk) for chunk in ready)
        answers.append(ProbeReply(states=bytes(states[node] for states in columns), refs=refs, region=10 + node))
    merged = merged_probes(answers)
    expected = []
    for chunk, states in enumerate(columns):
        if set(states) == {CHUNK_READY}:
            expected += [chunk, 1000 + chunk, 2000 + chunk]
        wanted = CHUNK_READY if set(states) == {CHUNK_READY} else CHUNK_ABSENT if 0 in states else CHUNK_PENDING
        assert merged.states[chunk] == wanted
    assert slots(merged.refs) == expected
    assert merged.regions == [10, 11, 12]


def test_the_slowest_node_and_the_farthest_tier_count() -> None:
    one = ProbeReply(states=b"\1\2", refs=ref(1), tiers=b"\1\2", pending_ms=5)
    two = ProbeReply(states=b"\1\1", refs=ref(2) + ref(3), tiers=b"\3\1", pending_ms=9, declined="recompute")
    merged = merged_probes([one, two])
    assert (merged.tiers, merged.pending_ms, merged.declined) == (b"\3\2", 9, "recompute")


def test_an_answer_without_states_makes_all_chunks_absent() -> None:
    full = ProbeReply(states=b"\1\1", refs=ref(1) + ref(2))
    merged = merged_probes([full, ProbeReply(states=b"", refs=b"", reason="NoMemory")])
    assert (merged.states, merged.refs, merged.reason) == (b"\0\0", b"", "NoMemory")


def grants(*results: int | None) -> GrantReply:
    answers = []
    for node, result in enumerate(results):
        refs = ref(node) + ref(10 + node) if result == GRANT_GRANTED else b""
        answers.append(GrantReply(b"" if result is None else bytes([result]), refs, region=node + 1))
    return merged_grants(answers)


def test_a_slot_is_granted_on_all_nodes_that_lack_the_chunk() -> None:
    both = grants(GRANT_GRANTED, GRANT_GRANTED)
    assert (both.results, slots(both.refs), both.regions) == (b"\1", [0, 10, 1, 11], [1, 2])
    one = grants(GRANT_EXISTS, GRANT_GRANTED)
    assert (one.results, slots(one.refs)) == (b"\1", [NO_SLOT, NO_SLOT, 1, 11])
    assert grants(GRANT_EXISTS, GRANT_EXISTS).results == bytes([GRANT_EXISTS])
    assert grants(GRANT_EXISTS, GRANT_NO_ROOM).results == bytes([GRANT_NO_ROOM])
    assert grants(GRANT_NO_ROOM, GRANT_NO_PARENT).results == bytes([GRANT_NO_PARENT])
    assert not any(one.partly for one in (both, one, grants(GRANT_NO_ROOM, GRANT_NO_PARENT)))


@pytest.mark.parametrize(
    ("other", "why"),
    [(GRANT_NO_ROOM, GRANT_NO_ROOM), (GRANT_NO_PARENT, GRANT_NO_PARENT), (None, GRANT_NOT_READY), (99, 99)],
)
def test_a_grant_of_some_nodes_names_no_slot_and_is_aborted(other: int | None, why: int) -> None:
    answer = grants(GRANT_EXISTS, GRANT_GRANTED, other)
    assert (answer.results, answer.refs, answer.partly) == (bytes([why]), b"", True)


@pytest.mark.parametrize("kind", [LOAD, STORE])
def test_each_node_does_its_part_of_a_job(kind: Any) -> None:
    job = Job(1, kind, "a", 5, [Chunk(ref(1) + ref(2) + ref(3) + ref(4), ((7,),))], [5, 6])
    parts = [job.of_node(node) for node in range(2)]
    assert [part.region for part in parts] == [5, 6]
    assert [slots(part.chunks[0].refs) for part in parts] == [[1, 2], [3, 4]]
    alone = Job(1, kind, "a", 5, [])
    assert alone.of_node(0) is alone


# -- the scheduler's side


class FakeConnection:
    """In place of a `Connection`."""

    def __init__(self, role: str, instance: str, rank: int, version: str, path: str, hooks: Any) -> None:
        self.hooks = hooks
        self.connected = False
        self.connection = 0
        self.hello: Any = None
        self.settings = SimpleNamespace(chunk_tokens=CHUNKS)
        self.sent: list[tuple[Op, Any]] = []
        self.callbacks: dict[int, Callable[[Reply], None]] = {}
        self.forwarded: list[tuple[Op, int, bytes]] = []
        self.started = False
        self.on_other: Any = None

    def start(self) -> None:
        self.started = True

    def up(self) -> None:
        self.connection += 1
        self.connected = True
        self.hello = SimpleNamespace(settings=self.settings)
        self.hooks.on_hello(self.hello)

    def lose(self) -> None:
        self.connected = False
        self.callbacks.clear()
        self.hooks.on_lost()

    def send(self, op: Op, body: Any) -> bool:
        self.sent.append((op, body))
        return self.connected

    def request(self, op: Op, body: Any, on_reply: Callable[[Reply], None]) -> int | None:
        if not self.connected:
            return None
        self.sent.append((op, body))
        tag = len(self.sent)
        self.callbacks[tag] = on_reply
        return tag

    def forward(self, op: Op, tag: int, body: bytes) -> bool:
        self.forwarded.append((op, tag, body))
        return self.connected

    def drop(self, tag: int) -> None:
        self.callbacks.pop(tag, None)


class Owner:
    """The scheduler side's hooks, in order of their calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def held(self, region: int | None) -> Held:
        return Held(requests=("a",))

    def after_hello(self) -> None:
        self.calls.append("after_hello")

    def on_hello(self, reply: Any) -> None:
        self.calls.append("on_hello")

    def on_lost(self) -> None:
        self.calls.append("on_lost")

    def before_unmap(self) -> None:
        self.calls.append("before_unmap")

    def on_off(self, reason: str) -> None:
        self.calls.append("on_off")


class Setup:
    """Two nodes. The second one's answers are given by the test."""

    def __init__(self) -> None:
        self.owner = Owner()
        self.nodes = Nodes(2, "engine", "0.32.0", "/socket", self.owner)
        self.own: Any = self.nodes._own
        self.replies: list[Reply] = []

    def connect(self, models: tuple[str, str] = ("m", "m"), chunk: int = CHUNKS, connection: int = 1) -> None:
        self.own.up()
        self.nodes.reported(0, [Described(models[0])])
        self.nodes.reported(1, [Described(models[1]), Up(connection, chunk)])

    def request(self, op: Op, body: Any) -> int:
        tag = self.nodes.request(op, body, self.replies.append)
        assert tag is not None
        return tag

    def messages(self) -> list[Passed]:
        taken: list[Passed] = pickle.loads(pickle.dumps(self.nodes.take())).get(1, [])
        return taken

    def answers(self, tag: int, own: Any, other: Any, partial: bool = False) -> None:
        """Both nodes answer; a text is an error."""
        self.own.callbacks[tag](_reply(tag, own, False))
        passed = next(message for message in self.messages() if message.answered)
        self.nodes.reported(1, [_reply(passed.tag, other, partial)])


def _reply(tag: int, body: Any, partial: bool) -> Reply:
    error = ErrorBody(code=body) if isinstance(body, str) else None
    return Reply(tag, partial, error, b"" if error else encode(body), [])


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> Setup:
    monkeypatch.setattr(nodes_module, "Connection", FakeConnection)
    monkeypatch.setattr(relay_module, "Connection", FakeConnection)
    return Setup()


PROBE = Probe(request="a", hashes=bytes(32))
FOUND = ProbeReply(states=b"\1", refs=ref(3), region=1)


def test_the_nodes_are_one_connection_once_all_have_reported(setup: Setup) -> None:
    setup.own.up()
    setup.nodes.reported(0, [Described("m")])
    setup.nodes.reported(1, [Up(1, CHUNKS)])
    assert setup.nodes.request(Op.PROBE, PROBE, setup.replies.append) is None
    assert not setup.nodes.connected
    setup.nodes.reported(1, [Described("m")])
    assert (setup.nodes.connected, setup.nodes.connection) == (True, 1)
    assert setup.owner.calls == ["after_hello", "on_hello"]


@pytest.mark.parametrize(
    ("models", "chunk", "connects"),
    [
        (("m", "other"), CHUNKS, False),
        (("m", "m"), 2 * CHUNKS, False),
        # KV of a node with unknown files is not the part of a model that other engines know.
        (("m", ""), CHUNKS, False),
        (("", ""), CHUNKS, True),
    ],
)
def test_nodes_with_other_files_or_chunks_are_not_used_together(
    setup: Setup, caplog: pytest.LogCaptureFixture, models: tuple[str, str], chunk: int, connects: bool
) -> None:
    setup.connect(models, chunk)
    assert setup.nodes.connected == connects
    assert ("different" in caplog.text) != connects


def test_a_request_is_answered_when_all_nodes_have(setup: Setup) -> None:
    setup.connect()
    tag = setup.request(Op.PROBE, PROBE)
    setup.own.callbacks[tag](_reply(tag, FOUND, False))
    assert setup.replies == []
    (message,) = setup.messages()
    assert decode(message.body, Probe).request == "a"
    partial = _reply(message.tag, ProbeReply(states=b"\2", refs=b""), True)
    setup.nodes.reported(1, [partial, _reply(message.tag, ProbeReply(states=b"\1", refs=ref(9), region=4), False)])
    first, last = setup.replies
    assert (first.partial, first.read(ProbeReply).states) == (True, b"\2")
    assert (last.partial, last.tag, slots(last.read(ProbeReply).refs)) == (False, tag, [3, 9])


def test_answers_are_delivered_in_order_on_the_engine_s_thread(setup: Setup) -> None:
    setup.connect()
    tag = setup.request(Op.PROBE, PROBE)
    (message,) = setup.messages()
    setup.own.callbacks[tag](_reply(tag, ProbeReply(states=b"\2", refs=b""), True))
    setup.nodes._answered(1, _reply(message.tag, FOUND, False))
    setup.own.callbacks[tag](_reply(tag, FOUND, False))
    assert setup.replies == [], "the reader thread delivers nothing"
    setup.nodes.deliver()
    assert [reply.partial for reply in setup.replies] == [True, False]


def test_an_error_of_one_node_is_that_of_all(setup: Setup) -> None:
    setup.connect()
    setup.answers(setup.request(Op.PROBE, PROBE), FOUND, "NotReady")
    (reply,) = setup.replies
    assert reply.error is not None
    assert reply.error.code == "NotReady"


def test_an_unreadable_answer_is_an_error(setup: Setup) -> None:
    setup.connect()
    setup.answers(setup.request(Op.PROBE, PROBE), FOUND, ProbeReply(states=b"\1", refs=ref(1) + ref(2)))
    (reply,) = setup.replies
    assert reply.error is not None
    assert reply.error.code == "BadAnswer"


def test_unreadable_grants_are_aborted_like_those_without_results(setup: Setup) -> None:
    setup.connect()
    tag = setup.request(Op.GRANT, Grant(request="a", chunks=[]))
    granted = bytes([GRANT_GRANTED])
    setup.answers(tag, GrantReply(granted, ref(1)), GrantReply(granted, ref(1) + ref(2)))
    (reply,) = setup.replies
    assert reply.error is None
    assert reply.read(GrantReply).results == b""


def test_a_grant_that_one_node_refused_names_no_slot(setup: Setup) -> None:
    setup.connect()
    tag = setup.request(Op.GRANT, Grant(request="a", chunks=[]))
    setup.answers(tag, GrantReply(bytes([GRANT_GRANTED]), ref(1)), "LimitReached")
    (reply,) = setup.replies
    assert reply.error is None
    assert reply.read(GrantReply).partly


def test_messages_name_the_requests_of_the_other_node(setup: Setup) -> None:
    setup.connect()
    tag = setup.request(Op.PROBE, PROBE)
    setup.nodes.send(Op.PIN, Pin(request="a", probe=tag, from_=0, to=1))
    setup.nodes.send(Op.RELEASE, Release(requests=["a"]))
    setup.nodes.send(Op.REPORT, Report())
    setup.request(Op.ABORT, Abort(grant=tag))
    probe, pin, release, abort = setup.messages()
    assert [one.op for one in (probe, pin, release, abort)] == [Op.PROBE, Op.PIN, Op.RELEASE, Op.ABORT]
    assert decode(pin.body, Pin).probe == probe.tag
    assert decode(abort.body, Abort).grant == probe.tag
    assert {one.connection for one in (probe, pin, release, abort)} == {1}


@pytest.mark.parametrize("which", ["own", "other"])
def test_one_lost_connection_ends_the_common_one(setup: Setup, which: str) -> None:
    setup.connect()
    setup.request(Op.PROBE, PROBE)
    setup.owner.calls.clear()
    if which == "own":
        setup.own.lose()
    else:
        setup.nodes.reported(1, [Lost()])
    assert setup.owner.calls == ["on_lost"]
    assert not setup.nodes.connected
    assert setup.nodes.request(Op.PROBE, PROBE, setup.replies.append) is None
    # Leases and grants still end where there is a connection.
    setup.nodes.send(Op.RELEASE, Release(requests=["a"]))
    assert (setup.nodes.request(Op.ABORT, Abort(grant=1), setup.replies.append) is None) == (which == "own")
    assert [one.op for one in setup.messages()] == ([Op.RELEASE] if which == "own" else [])
    assert setup.own.sent[1][0] == Op.RELEASE
    if which == "own":
        setup.own.up()
    else:
        setup.nodes.reported(1, [Up(2, CHUNKS)])
    assert setup.owner.calls == ["on_lost", "after_hello", "on_hello"]
    assert setup.nodes.connection == 2


def test_answers_to_an_earlier_connection_are_ignored(setup: Setup) -> None:
    setup.connect()
    tag = setup.request(Op.PROBE, PROBE)
    (message,) = setup.messages()
    setup.nodes.reported(1, [Lost(), Up(2, CHUNKS), _reply(message.tag, FOUND, False)])
    setup.own.callbacks[tag](_reply(tag, FOUND, False))
    assert setup.replies == []


def register(setup: Setup, own: bytes, other: bytes) -> Reply:
    setup.replies.clear()
    answers = [RegisterReply(ready=bool(model), model_id=model) for model in (own, other)]
    setup.answers(setup.request(Op.REGISTER, Register(world=1)), *answers)
    return setup.replies[0]


def test_all_sidecars_must_know_the_engine_by_one_identity(setup: Setup) -> None:
    setup.connect()
    assert register(setup, b"m", b"").error is None
    assert not setup.nodes.agreed
    assert register(setup, b"m", b"m").error is None
    assert setup.nodes.agreed
    differs = register(setup, b"m", b"lossy").error
    assert differs is not None
    assert differs.code == "NodesDiffer"
    assert not setup.nodes.agreed


@pytest.mark.parametrize(("first", "wait_s"), [((b"m", b""), 0.3), ((b"m", b"hashing"), 3.0)])
def test_register_is_repeated_until_all_sidecars_agree(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, first: tuple[bytes, bytes], wait_s: float
) -> None:
    now = [100.0]
    monkeypatch.setattr(registration_module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(registration_module.keys, "hashing", lambda *_: None)
    geometry = SimpleNamespace(chunk=CHUNKS, chunk_of=lambda least: least, hash_block=16, scheduler_block=16)
    cache = SimpleNamespace(prefix_caching_hash_algo="sha256")
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(world_size=2, local_world_size=1), cache_config=cache)
    reporter: Any = SimpleNamespace(start_events=lambda connection: None)
    registration = Registration(setup.nodes, Counters(), reporter, config, geometry)  # type: ignore[arg-type]
    monkeypatch.setattr(registration_module.keys, "hashing", lambda *_: Hashing("sha256", "0" * 64, 16))
    setup.connect()

    def answered(models: tuple[bytes, bytes]) -> bool:
        """Whether a REGISTER was sent, which is answered."""
        assert not registration.ensure()
        if Op.REGISTER not in [message.op for message in setup.nodes._peers[0].messages]:
            return False
        tag = max(setup.own.callbacks)
        setup.answers(tag, *(RegisterReply(ready=bool(model), model_id=model) for model in models))
        return True

    assert answered(first)
    assert not answered(first)
    now[0] += wait_s
    assert answered((b"m", b"m"))
    assert registration.ensure()


def test_identities_that_no_other_engine_has_may_differ(setup: Setup) -> None:
    setup.connect(("", ""))
    register(setup, b"one", b"two")
    assert setup.nodes.agreed


def test_an_idle_engine_stops_stepping(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    assert setup.nodes.pending, "the nodes may connect soon"
    setup.connect()
    register(setup, b"m", b"m")
    assert not setup.nodes.pending
    setup.request(Op.PROBE, PROBE)
    assert setup.nodes.pending, "a message waits for a step"
    setup.messages()
    assert not setup.nodes.pending, "no answer may ever come"
    setup.own.lose()
    assert setup.nodes.pending
    monkeypatch.setattr(nodes_module.time, "monotonic", lambda: 1e9)
    assert not setup.nodes.pending


def test_an_answer_is_late_only_after_some_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(lookups_module.time, "monotonic", lambda: now[0])
    budget = WaitForSteps(2)
    for _ in range(20):
        budget.new_step()
    now[0] = 101.0
    for _ in range(7):
        assert budget.may_poll_again(100.5)
        budget.new_step()
        now[0] += 0.5
    budget.new_step()
    assert not budget.may_poll_again(100.5)
    assert budget.may_poll_again(now[0] - 0.4), "half a second at least"
    assert not budget.may_poll_again(now[0] - 10), "and ten at most"


def test_nodes_that_never_report_are_named(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    setup.nodes.reported(0, [Described("m")])
    setup.nodes.take()
    assert not caplog.text
    monkeypatch.setattr(nodes_module.time, "monotonic", lambda: 1e9)
    setup.nodes.take()
    setup.nodes.take()
    assert caplog.text.count("nodes=1 have not reported") == 1


def test_adapters_are_not_cached_because_each_node_reads_its_own_files() -> None:
    namespaces = Namespaces(SimpleNamespace(serve=lambda *_: None), lambda path: None, 2)  # type: ignore[arg-type]
    adapter = SimpleNamespace(lora_int_id=1, lora_name="a", lora_path="/a")
    request = SimpleNamespace(
        lora_request=adapter, mm_features=[], num_prompt_tokens=1, num_tokens=1, cache_salt=None, prompt_embeds=None
    )
    state = RequestState(request, parse_controls(None), 0.0)  # type: ignore[arg-type]
    namespaces.assign(state)
    assert (state.namespace, state.refusal) == (None, "lora_on_several_nodes")


# -- the other node's side


def test_a_relay_passes_messages_of_its_connection_only(setup: Setup) -> None:
    relay = Relay(1, "engine", "0.32.0", "/socket")
    connection: Any = relay._connection
    relay.start('{"model":1}')
    connection.up()
    described, up = relay.reports()
    assert isinstance(described, Described)
    assert described.model
    assert up == Up(1, CHUNKS)
    old = Passed(0, Op.PROBE, 1 << 62, b"old", True)
    relay.take([old, old._replace(connection=1, body=b"new"), Passed(1, Op.RELEASE, 0, b"release", False)])
    assert [body for _, _, body in connection.forwarded] == [b"new", b"release"]
    connection.on_other(Reply(1 << 62, False, None, b"answer", [3]))
    connection.lose()
    reply, lost = pickle.loads(pickle.dumps(WorkerReport(nodes={1: relay.reports()}))).nodes[1]
    assert (reply.body, reply.fds, lost) == (b"answer", [], Lost())
    assert relay.reports() == []


def test_the_scheduler_s_node_only_says_its_model(setup: Setup) -> None:
    relay = Relay(0, "engine", "0.32.0", "/socket")
    relay.start('{"weights":{"instance":"i","kind":"unshared","reason":"r"}}')
    relay.take([])
    assert relay.reports() == [Described("")]

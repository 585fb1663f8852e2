"""Bodies of all messages. Names and meanings of fields are those of `protocol/src/message.rs`.

msgspec structs: unknown fields are ignored and absent ones have their default, because versions may differ by one
during an upgrade. Times are in milliseconds unless the name says otherwise.
"""

from __future__ import annotations

import builtins
from typing import Any, TypeVar

import msgspec

CHUNK_ABSENT, CHUNK_READY, CHUNK_PENDING = 0, 1, 2
(GRANT_GRANTED, GRANT_EXISTS, GRANT_NO_ROOM, GRANT_NOT_READY, GRANT_NO_PARENT, GRANT_INVALID) = range(1, 7)
GRANT_QUOTA, GRANT_TOO_LARGE = 7, 8
#: Names of the numbers in `ProbeReply.tiers`.
TIERS = {1: "memory", 2: "disk", 3: "redis", 4: "s3", 5: "filesystem"}
MEMORY = b"\x01"


class Message(msgspec.Struct, omit_defaults=True):
    """Base of all bodies."""


class ErrorBody(Message):
    code: str
    message: str = ""
    retryable: bool = False


class Settings(Message):
    """Connector settings from the sidecar's config, which has their defaults."""

    chunk_tokens: int
    #: `Prompt`, `PromptAndDecode` or `None`.
    save: str
    min_load_tokens: int
    load_timeout_ms: int
    first_poll_wait_us: int
    step_wait_us: int
    grant_timeout_ms: int
    store_bytes_in_flight: int
    skip_last_tokens: int = 0


#: Before the first HELLO response. No request is looked up or stored then.
NO_SETTINGS = Settings(0, "", 0, 0, 0, 0, 0, 0)


class Hello(Message):
    version: int
    role: str
    incarnation: bytes
    number: int
    engine: str = ""
    engine_version: str = ""
    instance: str = ""
    rank: int = 0
    fds: list[str] = []
    lock: int | None = None
    region: int | None = None
    grants: bytes = b""
    requests: list[str] = []
    watches_shrinks: bool = False
    off: str | None = None


class HelloReply(Message):
    version: int
    sidecar_version: str
    session: int
    boot: int
    settings: Settings
    #: `lock_first`, `sent`, `held`, `unmap` or `none`.
    memory: str
    features: list[str] = []
    reason: str = ""
    retry_ms: int = 0
    lock: int | None = None
    region: int | None = None
    arena_bytes: int = 0
    table_bytes: int = 0
    fds: list[str] = []


class Hashing(Message):
    algorithm: str
    root: str
    block_tokens: int
    random_root: bool = False


class Group(Message):
    kind: str
    block_tokens: int
    block_bytes: int
    shards: int
    shard: int
    writer: bool
    window_tokens: int = 0


class Register(Message):
    world: int
    local_world: int = 0
    model: str = ""
    layout: str = ""
    device: str = ""
    device_uuid: str = ""
    transfer_modes: list[str] = []
    groups: list[Group] = []
    scheduler_block_tokens: int = 0
    chunk_tokens: int = 0
    hashing: Hashing | None = None


class RegisterReply(Message):
    ready: bool
    layout_id: bytes = b""
    model_id: bytes = b""
    slot_bytes: list[int] = []
    transfer: str = ""
    transfer_reason: str = ""


class Window(Message):
    device_uuid: str = ""
    bytes: int = 0
    seen: bool = False


class WindowReply(Message):
    working: bool = False
    #: `host`, `posix_fd` or `ipc_handle`.
    kind: str = "host"
    bytes: int = 0
    stages: int = 0
    stage_bytes: int = 0
    pattern: builtins.bytes = b""
    handle: builtins.bytes = b""
    fds: list[str] = []


class Probe(Message):
    request: str
    hashes: bytes
    namespace: bytes = b""
    tail_tokens: int = 0
    local_tokens: int | None = None
    budget_ms: int = 0
    max_load_tokens: int | None = None
    prefill_tokens_per_s: int = 0
    #: The keys are no prefix: each one counts for itself.
    independent: bool = False


class ProbeReply(Message):
    states: bytes
    refs: bytes
    region: int = 0
    pending_ms: int = 0
    tiers: bytes = b""
    reason: str = ""
    declined: str = ""
    #: Of an engine over several nodes, by node (`nodes`). No sidecar sends it.
    regions: list[int] = []


class Pin(Message):
    request: str
    probe: int
    from_: int = msgspec.field(name="from")
    to: int


class Release(Message):
    requests: list[str]


class GrantChunk(Message):
    hash: builtins.bytes
    first_token: int
    tokens: int
    groups: int
    parent: builtins.bytes = b""
    block_hashes: builtins.bytes = b""
    #: Size of an opaque object; 0 for KV, whose size follows from its layout.
    bytes: int = 0


class Grant(Message):
    request: str
    chunks: list[GrantChunk]
    namespace: bytes = b""
    ttl_s: int = 0


class GrantReply(Message):
    results: bytes
    refs: bytes
    region: int = 0
    #: As in `ProbeReply`.
    regions: list[int] = []
    #: Some of several nodes granted slots, and others did not.
    partly: bool = False


class Sections(Message):
    """COMMIT and a worker's ABORT."""

    region: int
    refs: bytes


class Abort(Message):
    """A scheduler's ABORT: chunks of the GRANT with this tag; without hashes, all of it."""

    grant: int
    hashes: bytes = b""


class AbortReply(Message):
    freed: int


class Objects(Message):
    #: `remove`, `touch`, `pin`, `unpin` or `stat`.
    op: str
    hashes: bytes
    namespace: bytes = b""
    ttl_s: int = 0


class ObjectsReply(Message):
    count: int
    states: builtins.bytes = b""
    bytes: list[int] = []
    tiers: builtins.bytes = b""
    pinned: builtins.bytes = b""


class RemoteHello(Message):
    """HELLO of remote access, where the two sides share no memory. So are the other messages named `Remote`."""

    version: int
    engine: str = ""
    engine_version: str = ""
    instance: str = ""
    key: str = ""


class RemoteHelloReply(Message):
    version: int
    sidecar_version: str
    boot: int
    arena_bytes: int
    features: list[str] = []


class RemoteProbeReply(Message):
    states: builtins.bytes
    #: Length of each ready object, in order.
    bytes: list[int] = []
    reason: str = ""


class RemoteGrantReply(Message):
    results: bytes


class RemoteParts(Message):
    """READ and WRITE. A part is (position of the object in its PROBE or GRANT, offset, length)."""

    request: str
    parts: list[tuple[int, int, int]]


class RemoteReadReply(Message):
    found: bytes


#: Values in `RemoteWriteReply.written`.
WRITE_LOST, WRITE_MORE, WRITE_COMPLETE = 0, 1, 2


class RemoteWriteReply(Message):
    written: bytes


class Nothing(Message):
    """A reply without fields."""


class Events(Message):
    cursor: int
    wait_ms: int
    boot: int = 0
    snapshot: int | None = None


class Event(Message):
    kind: str
    tier: str = ""
    block_hashes: bytes = b""
    parent: bytes = b""
    tokens: int = 0
    hash: bytes = b""
    namespace: bytes = b""
    first_token: int = 0


class EventsReply(Message):
    cursor: int
    events: list[Event]
    lost: bool = False
    boot: int = 0
    next: int | None = None


class Report(Message):
    requested_tokens: int = 0
    hit_tokens: dict[str, int] = {}
    miss_tokens: dict[str, int] = {}
    load_failed_tokens: int = 0
    events: dict[str, int] = {}
    copied_bytes: dict[str, int] = {}
    copied_seconds: dict[str, float] = {}
    oldest_job_ms: int = 0


_M = TypeVar("_M", bound=Message)
_encoder = msgspec.msgpack.Encoder()


def encode(body: Message | dict[str, Any]) -> bytes:
    """Encodes a body as a msgpack map."""
    return _encoder.encode(body)


def decode(raw: bytes | memoryview, kind: type[_M]) -> _M:
    """Decodes a body. Raises `msgspec.DecodeError` (`ValidationError` if fields are invalid)."""
    return msgspec.msgpack.decode(raw, type=kind)

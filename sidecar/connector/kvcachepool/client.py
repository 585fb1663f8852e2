"""Client of opaque objects: bytes under a key, in the sidecar's memory and the tiers below it.

    client = Client()
    client.put([Item("key", b"value", Header(dtype="uint8"))])
    with client.lease(["key"]) as lease:
        found = lease[0]

A miss is None, False or a smaller count, never an exception. If the sidecar is gone, all calls raise `Unavailable` at
once, also those that wait, and the client reconnects in the background. No call waits longer than its `timeout_s`.

All clients of a process share one connection. A forked child must create its own client.
"""

from .object_async import AsyncClient, AsyncLease, AsyncLeased
from .object_client import Client, Lease, Leased, Object
from .object_types import Buffer, Error, Header, InvalidKey, Item, Key, Put, Refused, Stat, Unavailable

__all__ = [
    "AsyncClient",
    "AsyncLease",
    "AsyncLeased",
    "Buffer",
    "Client",
    "Error",
    "Header",
    "InvalidKey",
    "Item",
    "Key",
    "Lease",
    "Leased",
    "Object",
    "Put",
    "Refused",
    "Stat",
    "Unavailable",
]

"""What an object client's target names: the socket of a sidecar, or remote servers and the credentials for them."""

from __future__ import annotations

import logging
import os
import re
import ssl
import threading
from typing import NamedTuple

from . import place
from .object_local import LocalTransport
from .object_transport import Transport
from .remote_connection import Access, Server
from .remote_servers import ServersTransport
from .remote_transport import RemoteTransport

logger = logging.getLogger("kvcachepool")

_EXPECTED = "expected the path of a socket, or tls://host:port (several separated by commas)"
_SCHEME = "tls://"
_HOST_AND_PORT = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^\s/@?#:\[\],]+):([0-9]{1,5})")
#: HELLO with the key must fit into 4 KiB.
_MAX_KEY_BYTES = 1024


class Credentials(NamedTuple):
    """Arguments of the client for remote servers."""

    key: str | None = None
    key_file: str | None = None
    ca_file: str | None = None


def open_transport(target: str | None, name: str, namespace: bytes, credentials: Credentials) -> Transport:
    """The transport to a target, which connects in the background. Raises `Error` or `ValueError`."""
    target = target or place.socket_path()
    servers = servers_of(target)
    if not servers:
        return LocalTransport(target, name, namespace)
    access = _access(credentials, name)
    transports = [RemoteTransport(server, access, namespace) for server in servers]
    return transports[0] if len(transports) == 1 else ServersTransport(transports)


def servers_of(target: str) -> list[Server]:
    """The servers that a target names; empty for a path. Raises `ValueError`."""
    if "://" not in target:
        if _HOST_AND_PORT.fullmatch(target):
            raise ValueError(f"the target {target!r} has no scheme: {_EXPECTED}")
        return []
    servers: list[Server] = []
    for one in (part.strip() for part in target.split(",")):
        if not one.startswith(_SCHEME):
            raise ValueError(f"the target has {one!r}: {_EXPECTED}")
        found = _HOST_AND_PORT.fullmatch(one[len(_SCHEME) :])
        if found is None or not 0 < int(found[2]) < 65536:
            raise ValueError(f"the target has {one!r}, without a host and a port from 1 to 65535: {_EXPECTED}")
        host, port = found[1].lower(), int(found[2])
        server = Server(f"{host}:{port}", host.strip("[]"), port)
        if server in servers:
            raise ValueError(f"the target names the server {server.name!r} twice, again as {one!r}: name it once")
        servers.append(server)
    return servers


def _access(credentials: Credentials, name: str) -> Access:
    key, key_file = credentials.key, credentials.key_file
    if key is not None and key_file is not None:
        raise ValueError("expected either key or key_file, got both")
    if key is None:
        key_file = key_file or os.environ.get("KVCACHEPOOL_KEY_FILE")
        if not key_file:
            raise ValueError("remote servers need a key: set key_file, key or KVCACHEPOOL_KEY_FILE")
        read_key(key_file)
    else:
        _check_key(key, "key")
    trust = _Trust(credentials.ca_file or os.environ.get("KVCACHEPOOL_CA_FILE") or None)
    return Access(trust.context, name, (lambda: read_key(key_file)) if key_file else (lambda: key or ""))


class _Trust:
    """The TLS context for new connections, with the authorities in a file, or the system's."""

    def __init__(self, ca_file: str | None) -> None:
        """Raises `ValueError`."""
        self._ca_file = ca_file
        self._lock = threading.Lock()
        self._version = self._file_version()
        try:
            self._context = self._read()
        except OSError as error:
            raise ValueError(f"ca_file {ca_file}: expected certificates in PEM: {error}") from None

    def context(self) -> ssl.SSLContext:
        """Reads a file that has changed. One that is not readable leaves the authorities of before."""
        with self._lock:
            version = self._file_version()
            if version != self._version:
                self._version = version
                try:
                    self._context = self._read()
                except OSError as error:
                    logger.warning("keeping the certificates of before: ca_file=%s error=%s", self._ca_file, error)
            return self._context

    def _file_version(self) -> tuple[int, ...] | None:
        try:
            found = os.stat(self._ca_file or "")
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    def _read(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self._ca_file)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        return context


def read_key(path: str) -> str:
    """The first line of a key file that is not empty. Raises `ValueError`."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_MAX_KEY_BYTES * 16)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"key_file {path}: {error}") from None
    key = next((line.strip() for line in text.splitlines() if line.strip()), "")
    _check_key(key, f"key_file {path}")
    return key


def _check_key(key: object, what: str) -> None:
    if not isinstance(key, str) or not 0 < len(key.encode()) <= _MAX_KEY_BYTES:
        raise ValueError(f"{what}: expected a text of 1 to {_MAX_KEY_BYTES} bytes")

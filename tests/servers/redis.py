"""A real Redis server for tests and benchmarks: in memory only, with LRU eviction."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from servers import paths
from servers.process import Process
from servers.waiting import wait_for


class RedisServer:
    """A server that is empty at each start, with these settings on its command line. With a folder of certificates that
    has `ca` and `server`, sidecars use TLS with it, at another port.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        memory: str = "1gb",
        settings: Sequence[str] = (),
        certificates: Path | None = None,
    ) -> None:
        self.host = host
        self._memory = memory
        self._settings = [*settings]
        self.folder = paths.short_folder()
        self.port = paths.free_port()
        self.url = f"redis://{host}:{self.port}"
        self.authority: Path | None = None
        if certificates is not None:
            self.authority = certificates / "ca.crt"
            self.tls_port = paths.free_port()
            self.url = f"rediss://{host}:{self.tls_port}"
            files = {"ca-cert": self.authority, "cert": certificates / "server.crt", "key": certificates / "server.key"}
            tls = ["--tls-port", str(self.tls_port), "--tls-auth-clients", "no"]
            for name, file in files.items():
                tls += [f"--tls-{name}-file", str(file)]
            self._settings = [*tls, *settings]
        self._process: Process | None = None
        self.start()

    def config(self) -> dict[str, Any]:
        """The section `redis` of a sidecar's config."""
        return {"urls": [self.url], **({"ca": str(self.authority)} if self.authority else {})}

    def start(self) -> None:
        """Starts it, always on the same port."""
        assert self._process is None
        command = ["redis-server", "--port", str(self.port), "--bind", self.host, "--save", "", "--appendonly", "no"]
        command += ["--maxmemory", self._memory, "--maxmemory-policy", "allkeys-lru", "--dir", str(self.folder)]
        command += self._settings
        self._process = Process("redis-server", command, self.folder / "log")
        wait_for(self._answers, 20, "a Redis server that answers")

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.running(), f"the Redis server ended:\n{self._process.tail()}"
        with contextlib.suppress(OSError):
            return self.command("PING").startswith((b"+PONG", b"-NOAUTH"))
        return False

    def command(self, *words: str | bytes) -> bytes:
        """Sends one command. Returns the first line of the reply and the bytes that follow at once."""
        parts = [word.encode() if isinstance(word, str) else word for word in words]
        request = b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
        with socket.create_connection((self.host, self.port), 10) as connection:
            connection.sendall(request)
            return connection.recv(1 << 20).rstrip(b"\r\n")

    def objects(self) -> int:
        """Keys in it: heads and segments."""
        return int(self.command("DBSIZE").removeprefix(b":"))

    def keys(self) -> set[bytes]:
        """All of them."""
        command = ["redis-cli", "-h", self.host, "-p", str(self.port), "KEYS", "*"]
        return set(subprocess.run(command, check=True, capture_output=True).stdout.split())

    def freeze(self) -> None:
        """From now on it accepts connections and does not reply."""
        assert self._process is not None
        self._process.signal_all(signal.SIGSTOP)

    def kill(self) -> None:
        """SIGKILL, even if frozen. Its content is lost."""
        assert self._process is not None
        self._process.kill()
        self._process = None

    def stop(self) -> None:
        """Ends it and removes its folder."""
        if self._process is not None:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

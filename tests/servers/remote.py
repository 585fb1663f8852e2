"""The server of remote access beside a sidecar."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import Any

from servers import paths
from servers.process import Process
from servers.sidecar import Sidecar
from servers.waiting import wait_for

KEY = "the key of the tests"


class RemoteServer:
    """`kvcachepool-sidecar serve` for the sidecar at a socket. It may be killed and started again."""

    def __init__(self, sidecar: Sidecar, certificates: Path, name: str = "remote") -> None:
        """certificates: a folder with `ca.crt`, `server.crt` and `server.key` for 127.0.0.1."""
        self.log = sidecar.folder / f"{name}.log"
        #: Options of a client.
        self.options: dict[str, Any] = {"key": KEY, "ca_file": str(certificates / "ca.crt")}
        self._address = ""
        self._announced = sidecar.folder / f"{name}.address"
        self._key_file = sidecar.folder / f"{name}.key"
        self._process: Process | None = None
        self._command = ["serve", "--socket", str(sidecar.socket)]
        self._command += ["--certificate", str(certificates / "server.crt")]
        self._command += ["--private-key", str(certificates / "server.key")]
        self._command += ["--key-file", str(self._key_file), "--address-file", str(self._announced)]
        self._command += ["--admin", "127.0.0.1:0"]

    @property
    def target(self) -> str:
        """What a client connects to."""
        return f"tls://{self._address}"

    def environment(self) -> dict[str, str]:
        """Variables by which clients without options of their own find server and credentials."""
        return {
            "KVCACHEPOOL_SOCKET": self.target,
            "KVCACHEPOOL_KEY_FILE": str(self._key_file),
            "KVCACHEPOOL_CA_FILE": str(self.options["ca_file"]),
        }

    def start(self) -> RemoteServer:
        """Starts it, on the same port as before, and waits until it listens."""
        assert self._process is None
        self._announced.unlink(missing_ok=True)
        self._key_file.write_text(f"{KEY}\n")
        self._key_file.chmod(0o600)
        listen = ["--listen", self._address or "127.0.0.1:0"]
        self._process = process = Process("remote", [str(paths.sidecar_binary()), *self._command, *listen], self.log)

        def announced() -> str:
            assert process.running(), f"the server ended:\n{process.tail()}"
            with contextlib.suppress(FileNotFoundError):
                return self._announced.read_text().strip()
            return ""

        self._address = wait_for(announced, 20, "the address of the server")
        return self

    @property
    def process(self) -> Process:
        """The running process."""
        assert self._process is not None, "the server is not started"
        return self._process

    def freeze(self) -> None:
        """SIGSTOP."""
        self.process.signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        """Its end."""
        self.process.signal_all(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self._process = None

    def stop(self) -> None:
        """SIGTERM, if it runs."""
        if self._process is not None:
            self._process.stop()
            self._process = None

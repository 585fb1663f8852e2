"""The real sidecar in a folder as the pod's shared volume, and a client of any sidecar."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

from servers import paths, web
from servers.process import Process, alive, children
from servers.prometheus import Samples
from servers.waiting import wait_for

_TOKEN = "a token of the tests"


def export_connector(folder: Path, *arguments: str) -> None:
    """Writes the connector's package into the folder for PYTHONPATH."""
    subprocess.run(
        [paths.sidecar_binary(), "export-connector", str(folder), *arguments], check=True, stdout=subprocess.DEVNULL
    )


def sizes(model: Path, *arguments: str) -> dict[str, Any]:
    """What `size` computes from a model's config."""
    command = [str(paths.sidecar_binary()), "size", str(model / "config.json"), "-o", "json", *arguments]
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))


class SidecarClient:
    """A client of a sidecar's admin HTTP."""

    def __init__(self, host: str, port: int) -> None:
        self.port = port
        #: Base of the admin HTTP.
        self.url = f"http://{host}:{port}"

    def metrics(self) -> Samples:
        """The current /metrics."""
        status, text = web.get(f"{self.url}/metrics")
        assert status == 200, f"/metrics answered {status}"
        return Samples.parse(text)

    def status(self) -> dict[str, Any]:
        """The current /v1/status."""
        status, text = web.get(f"{self.url}/v1/status")
        assert status == 200, f"/v1/status answered {status}"
        answer: dict[str, Any] = json.loads(text)
        return answer

    def tier_state(self, name: str) -> str:
        """The current state of a tier in /v1/status."""
        return next(str(tier["state"]) for tier in self.status()["tiers"] if tier["name"] == name)

    def tiers_ready(self) -> bool:
        """Whether every tier serves."""
        return all(tier["state"] == "ready" for tier in self.status()["tiers"])

    def written_to(self, *tiers: str) -> bool:
        """Whether no store is on its way, and as many chunks as memory holds were written to each of these tiers."""
        metrics, memory = self.metrics(), self.status()["memory"]
        if memory["slots"]["granted"] or memory["slots"]["committed"]:
            return False
        done = "kvcachepool_tier_write_chunks_total"
        return all(metrics.total(done, tier=tier, result="stored") >= memory["chunks"] for tier in tiers)


class Sidecar(SidecarClient):
    """One sidecar. It may be started, killed and started again in the same folder."""

    def __init__(
        self,
        folder: Path,
        *,
        memory: str = "512Mi",
        config: dict[str, Any] | None = None,
        config_file: str = "config.v1.yaml",
    ) -> None:
        super().__init__("127.0.0.1", paths.free_port())
        self.folder = folder
        self.socket = folder / "sidecar.sock"
        self.log = folder / "sidecar.log"
        self._process: Process | None = None
        self._config: dict[str, Any] = {
            "socket": str(self.socket),
            "admin": {"listen": f"127.0.0.1:{self.port}"},
            "memory": {"size": memory},
            "log": {"level": "debug" if os.environ.get("KVCACHEPOOL_TEST_DEBUG") else "info", "format": "text"},
        }
        self._config_file = folder / config_file
        self._set(config or {})
        folder.mkdir(exist_ok=True)
        if not (folder / "kvcachepool").exists():
            export_connector(folder)

    def _set(self, config: dict[str, Any]) -> None:
        for section, values in config.items():
            if isinstance(values, dict):
                self._config.setdefault(section, {}).update(values)
            else:
                self._config[section] = values

    def _write_config(self) -> None:
        """Atomically, because a running sidecar may read it at any time."""
        new = self.folder / "config.new"
        new.write_text(json.dumps(self._config, indent=1))
        new.replace(self._config_file)

    def start(self, *, ready_seconds: float | None = 30) -> Sidecar:
        """Starts it and waits until /readyz succeeds, unless None is given."""
        assert self._process is None
        self._write_config()
        command = [str(paths.sidecar_binary()), "run", "--config", str(self._config_file)]
        self._process = Process("sidecar", command, self.log)
        if ready_seconds is not None:
            self.wait_ready(ready_seconds)
        return self

    def change(self, config: dict[str, Any]) -> None:
        """Changes keys that a running sidecar reloads, and waits until it has."""

        def taken() -> float:
            return self.metrics().total("kvcachepool_config_reloads_total", result="applied")

        before = taken()
        self._set(config)
        self._write_config()
        os.kill(self.process.pid, signal.SIGHUP)
        wait_for(lambda: taken() > before, 10, "the changed config in effect")

    def configure(self, config: dict[str, Any]) -> None:
        """Changes keys for the next start."""
        self._set(config)

    def wait_ready(self, seconds: float = 30) -> None:
        """Waits until the memory tier serves and all its pages are allocated: GRANTs are deferred before that."""
        process = self.process

        def ready() -> bool:
            if not process.running():
                raise AssertionError(f"the sidecar ended:\n{process.tail()}")
            if web.get(f"{self.url}/readyz", 1)[0] != 200:
                return False
            memory = self.status()["memory"]
            return memory["populated_bytes"] == memory["capacity_bytes"]

        try:
            wait_for(ready, seconds, "sidecar ready")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{web.get(f'{self.url}/readyz')}\n{process.tail()}") from None

    @property
    def process(self) -> Process:
        """The running process."""
        assert self._process is not None, "the sidecar is not started"
        return self._process

    def running(self) -> bool:
        """Whether it was started and not ended."""
        return self._process is not None and self._process.running()

    @property
    def engine_pid(self) -> int:
        """The engine process below the supervisor."""
        found = wait_for(lambda: children(self.process.pid), 10, "an engine process")
        return found[0]

    def accept_clear(self) -> None:
        """Makes the next start accept `clear`."""
        token = self.folder / "token"
        token.write_text(_TOKEN)
        self._set({"admin": {"tokenFile": str(token)}})

    def clear(self) -> None:
        """Removes all chunks from memory and from the pod's own tiers."""
        from kvcachepool import wire
        from kvcachepool.messages import Hello, encode

        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as admin:
            admin.connect(str(self.socket))
            hello = Hello(version=wire.PROTOCOL_VERSION, role="admin", incarnation=os.urandom(16), number=1)
            for op, body in ((wire.Op.HELLO, hello), (wire.Op.ADMIN, {"op": "clear", "token": _TOKEN})):
                payload = encode(body)
                admin.sendall(wire.encode_header(op, 0, 1, len(payload)) + payload)
                header = wire.decode_header(admin.recv(wire.HEADER_BYTES, socket.MSG_WAITALL))
                answer = admin.recv(header.length, socket.MSG_WAITALL)
                assert not header.flags & wire.FLAG_ERROR, answer

    def flip_memory(self) -> int:
        """Flips a bit in every page of the arena that is in use, behind the sidecar's back. Returns how many.

        The highest bit of the exponent of a float32: no model generates the same tokens with it.
        """
        folder = Path(f"/proc/{self.engine_pid}/fd")
        arena = next(file for file in folder.iterdir() if "kvcachepool-arena" in os.readlink(file))
        flipped, empty = 0, bytes(mmap.PAGESIZE)
        with arena.open("r+b", buffering=0) as opened:
            for place in range(0, os.fstat(opened.fileno()).st_size, mmap.PAGESIZE):
                page = os.pread(opened.fileno(), mmap.PAGESIZE, place)
                if page != empty:
                    os.pwrite(opened.fileno(), bytes([page[23] ^ 0x40]), place + 23)
                    flipped += 1
        return flipped

    def kill_engine(self) -> None:
        """Kills only the engine process. Waits until the supervisor has started another one."""
        dead = self.engine_pid
        os.kill(dead, signal.SIGKILL)
        wait_for(lambda: not alive(dead) and children(self.process.pid), 20, "a new engine process")

    def kill_tree(self) -> None:
        """Kills all processes, like the end of the container."""
        self.process.kill()
        self._process = None

    def freeze(self) -> None:
        """SIGSTOP to supervisor and engine."""
        self.process.signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT to both."""
        self.process.signal_all(signal.SIGCONT)

    def stop(self) -> None:
        """SIGTERM, also for a frozen one."""
        if self._process is not None:
            with contextlib.suppress(AssertionError):
                self._process.stop()
            self._process = None

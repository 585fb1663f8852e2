"""A Python class served as a tier, and Mooncake's master."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from servers import paths, web
from servers.process import Process
from servers.waiting import wait_for

BUCKET = "kv-bucket"
#: Packages of other stores, apart from those of vLLM.
PACKAGES = "tools/stores"


class StoreServer:
    """`python -m kvcachepool.store` with a class, always on the same port."""

    key_id, secret = "kvcachepool-test", "only-for-this-test"

    def __init__(
        self,
        store: str,
        config: Mapping[str, Any] | None = None,
        *,
        arguments: Sequence[str] = (),
        python_path: Sequence[Path] = (),
    ) -> None:
        self.folder = paths.short_folder()
        self.port = paths.free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._auth = self.folder / "auth"
        self._auth.mkdir()
        (self._auth / "AWS_ACCESS_KEY_ID").write_text(self.key_id)
        (self._auth / "AWS_SECRET_ACCESS_KEY").write_text(self.secret)
        self._command = [sys.executable, "-m", "kvcachepool.store", store, "--config", json.dumps(dict(config or {}))]
        self._command += ["--listen", f"127.0.0.1:{self.port}", "--auth", str(self._auth), *arguments]
        folders = [paths.ROOT / "sidecar/connector", *python_path]
        self._env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
        self._process: Process | None = None
        self.start()

    def start(self) -> StoreServer:
        """Starts it, and waits until it answers."""
        assert self._process is None
        process = self._process = Process("store", self._command, self.folder / "log", env=self._env)

        def answers() -> bool:
            assert process.running(), f"the store ended:\n{process.tail()}"
            return web.get(f"{self.endpoint}/healthz", 1)[0] == 200

        wait_for(answers, 60, "a store that answers")
        return self

    def config(self) -> dict[str, Any]:
        """The section `s3` of a sidecar's config."""
        return {"bucket": BUCKET, "endpoint": self.endpoint, "auth": str(self._auth)}

    def health(self) -> int:
        """Status of /healthz."""
        return web.get(f"{self.endpoint}/healthz", 5)[0]

    def log_text(self) -> str:
        """Its output so far."""
        return (self.folder / "log").read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process = None

    def terminate(self) -> None:
        """SIGTERM, and waits for the end."""
        process = self._process
        assert process is not None
        os.kill(process.pid, signal.SIGTERM)
        wait_for(lambda: not process.running(), 30, "the end of the store")
        self.kill()

    def stop(self) -> None:
        """Ends it and removes its folder."""
        if self._process is not None:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class MooncakeMaster:
    """Mooncake's master. Clients contribute the memory of the store."""

    def __init__(self) -> None:
        program = paths.cache() / "tools/bin/mooncake_master"
        assert program.exists(), f"{program} is not there: run `tools/setup.sh servers`"
        self.folder = paths.short_folder()
        port, metrics = paths.free_port(), paths.free_port()
        self.address = f"127.0.0.1:{port}"
        command = [str(program), f"--rpc_port={port}", f"--metrics_port={metrics}"]
        self.process = Process("mooncake_master", command, self.folder / "log")
        url = f"http://127.0.0.1:{metrics}/metrics"
        wait_for(lambda: web.get(url, 1)[0] == 200, 30, "a master that answers")

    def stop(self) -> None:
        """Ends it and removes its folder."""
        self.process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

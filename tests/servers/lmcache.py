"""LMCache's server and the arguments with which a vLLM uses it, from a virtual environment of its own.

On CPUs LMCache runs only as a server beside vLLM. Its fastest way there is shared memory, into which vLLM's worker
copies: with the default for CPUs, pickled bytes over a socket, a hit takes several times as long.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from servers import paths, web
from servers.process import Process
from servers.waiting import wait_for

_VERSION = "0.5.6"
#: Python with LMCache over the newest supported vLLM.
PYTHON = paths.cache() / "venvs" / f"lmcache-{_VERSION}" / "bin" / "python"
NAME = f"LMCache {_VERSION}"


class LmcacheServer:
    """One server on free ports of the loopback interface."""

    def __init__(
        self, log: Path, *, gigabytes: float, chunk_tokens: int, l2_adapters: Sequence[dict[str, Any]] = ()
    ) -> None:
        """`l2_adapters`: LMCache's specifications of tiers below its memory. Ours is found in the source tree."""
        self.port = paths.free_port()
        self._url = f"http://127.0.0.1:{(http := paths.free_port())}"
        command = [str(PYTHON), "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--http-host", "127.0.0.1", "--http-port", str(http), "--prometheus-port", str(paths.free_port())]
        command += ["--l1-size-gb", str(gigabytes), "--no-l1-use-lazy", "--eviction-policy", "LRU"]
        command += ["--chunk-size", str(chunk_tokens)]
        command += ["--supported-transfer-mode", "engine_driven", "--shm-name", f"kvcp-{os.getpid()}"]
        for adapter in l2_adapters:
            command += ["--l2-adapter", json.dumps(adapter)]
        env = dict(os.environ) | {"DO_NOT_TRACK": "1"}
        if l2_adapters:
            env["PYTHONPATH"] = str(paths.ROOT / "sidecar" / "connector")
        self.process = Process(NAME, command, log, env=env)

    def wait_ready(self, seconds: float = 120) -> LmcacheServer:
        """Waits until it serves."""

        def ready() -> bool:
            if not self.process.running():
                raise AssertionError(f"{NAME} ended:\n{self.process.tail(60)}")
            return web.get(f"{self._url}/healthcheck", 2)[0] == 200

        wait_for(ready, seconds, f"{NAME} ready", pause=0.25)
        return self

    def settle(self) -> None:
        """Waits until no store is under way."""

        def settled() -> bool:
            status = self.storage()
            memory, stores = status["l1_manager"], status["store_controller"]
            under_way = memory["write_locked_count"] or memory["staging_object_count"]
            return not under_way and not stores["pending_keys_count"] and not stores["in_flight_task_count"]

        wait_for(settled, 20, f"stores of {NAME}")

    def storage(self) -> dict[str, Any]:
        """What `/status` says of memory, controllers and tiers."""
        status, text = web.get(f"{self._url}/status")
        assert status == 200, f"/status answered {status}"
        storage: dict[str, Any] = json.loads(text)["storage_manager"]
        return storage

    def clear(self) -> None:
        """Empties its memory. Tiers below it keep what they have."""
        status, text = web.post(f"{self._url}/cache/clear", {"tier": "l1"})
        assert status == 200, f"/cache/clear answered {status}: {text}"

    def arguments(self) -> tuple[str, str]:
        """Arguments of a vLLM that uses this server."""
        connector = {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self.port},
        }
        return "--kv-transfer-config", json.dumps(connector)

    def stop(self) -> None:
        """SIGTERM."""
        self.process.stop(20)

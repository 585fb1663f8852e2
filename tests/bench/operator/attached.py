"""How old `status.pods.attached` of one large pool is.

Its pods never run: their status says that they do, and one server of the node answers as the sidecar of each of them.
"""

from __future__ import annotations

import json
import os
import socketserver
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import NamedTuple

from bench.operator.api import MERGE, Api, say
from bench.operator.load import POOLS, create_namespace, pool, vllm
from cluster.node import Node
from servers.paths import ROOT
from servers.waiting import wait_for

_NAMESPACE = "bench-attached"
_POOL = f"{POOLS}/namespaces/{_NAMESPACE}/kvcachepools/large"
_PODS = f"/api/v1/namespaces/{_NAMESPACE}/pods"
#: Addresses for benchmarks (RFC 2544). The node takes all of them for its own.
_ADDRESSES = "198.18"
_PORT = 9797


class Age(NamedTuple):
    """Seconds from a change in all sidecars until the pool's status showed it for all."""

    pods: int
    seconds: list[float]


def measure(api: Api, node: Node, pods: int = 1000, changes: int = 3) -> Age:
    """Lets all engines of a new pool disconnect and connect, and waits for the status each time."""
    create_namespace(api, _NAMESPACE)
    api.request("POST", _POOL.rsplit("/", 1)[0], pool("large"))
    api.each("pods", lambda number: _create(api, number), range(pods))
    node.run("ip", "route", "add", "local", f"{_ADDRESSES}.0.0/16", "dev", "lo")
    state = node.folder / "attached"
    seconds = []
    command = node.entered([sys.executable, "-m", "bench.operator.attached", str(state)])
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT / "tests")}) as server:
        try:
            state.write_text("1")
            _wait(api, pods)
            for change in range(changes):
                expected = pods * (change % 2)
                state.write_text(str(change % 2))
                start = time.monotonic()
                _wait(api, expected)
                seconds.append(time.monotonic() - start)
                say(f"  attached: {expected} after {seconds[-1]:.0f} s")
        finally:
            server.kill()
            node.run("ip", "route", "del", "local", f"{_ADDRESSES}.0.0/16", "dev", "lo")
    api.request("DELETE", f"{_PODS}?gracePeriodSeconds=0")
    api.request("DELETE", _POOL)
    return Age(pods, seconds)


def _create(api: Api, number: int) -> None:
    name = f"large-{number:04}"
    api.request("POST", _PODS, vllm(name, "large"))
    running = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
    sidecar = {"name": "kvcachepool", "image": "i", "imageID": "i", "ready": True, "started": True}
    status = {
        "phase": "Running",
        "podIP": f"{_ADDRESSES}.{number // 250}.{number % 250 + 1}",
        "initContainerStatuses": [{**sidecar, "restartCount": 0, "state": running}],
    }
    api.request("PATCH", f"{_PODS}/{name}/status", {"status": status}, kind=MERGE)


def _wait(api: Api, expected: int) -> None:
    def attached() -> bool:
        pods = api.request("GET", _POOL).get("status", {}).get("pods", {})
        return bool(pods.get("attached") == expected)

    wait_for(attached, 600, f"attached: {expected}", pause=1)


def _serve(state: Path) -> None:
    """Answers as every sidecar; the file says whether an engine is connected."""
    start = time.monotonic()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            connected = state.read_text() == "1"
            session = {"id": 1, "role": "worker", "connected": connected, "registered": True, "ready": True}
            uptime = int(time.monotonic() - start)
            status = {"version": "0.1.0", "boot": 1, "uptime_s": uptime, "state": "ready", "sessions": [session]}
            body = json.dumps(status).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = True
        daemon_threads = True
        request_queue_size = 128

    with Server(("", _PORT), Handler) as server:
        server.serve_forever()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))

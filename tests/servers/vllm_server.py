"""A real `vllm serve` with the exported connector on PYTHONPATH and no connector argument, and a client of any."""

from __future__ import annotations

import http.client
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from servers import paths, web
from servers.engine import by_source, environment
from servers.process import Process
from servers.prometheus import Samples
from servers.waiting import wait_for


class Reply(NamedTuple):
    """The result of one streamed request."""

    text: str
    first_token_seconds: float
    seconds: float
    sources: dict[str, int]


class VllmClient:
    """A client of a server."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self.url = f"http://{host}:{port}"

    def metrics(self) -> Samples:
        """The current /metrics."""
        return Samples.parse(web.get(f"{self.url}/metrics")[1])

    def complete(
        self,
        prompt: str | list[int],
        prompt_tokens: int,
        *,
        max_tokens: int = 16,
        rank: int | None = None,
        **extra: Any,
    ) -> Reply:
        """Streams one completion. Its sources are read once vLLM's counters have grown by `prompt_tokens`.

        With data parallelism `rank` chooses the engine.
        """
        before = self.metrics()
        body = {
            "model": "model",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            **extra,
        }
        connection = http.client.HTTPConnection(self.host, self.port, timeout=600)
        start = time.monotonic()
        headers = {"Content-Type": "application/json"} | ({} if rank is None else {"X-data-parallel-rank": str(rank)})
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        assert answer.status == 200, f"{answer.status}: {answer.read()!r}"
        text, first = "", 0.0
        for raw in answer:
            line = raw.decode().strip()
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            first = first or time.monotonic() - start
            event = json.loads(line[len("data: ") :])
            assert "error" not in event, line
            text += "".join(choice["text"] for choice in event["choices"])
        seconds = time.monotonic() - start
        connection.close()

        def counted() -> dict[str, int] | None:
            sources = by_source(before, self.metrics())
            return sources if sum(sources.values()) >= prompt_tokens else None

        return Reply(text, first, seconds, wait_for(counted, 10, "vLLM's counters of the request"))

    def reset_prefix_cache(self) -> None:
        """Empties vLLM's own prefix cache. Stores in flight hold blocks for a moment, and then it refuses."""

        def done() -> bool:
            status, text = web.post(f"{self.url}/reset_prefix_cache")
            assert status == 200, f"/reset_prefix_cache answered {status}: {text}"
            # Versions before 0.31 reply without a body.
            return not text or bool((json.loads(text) or {}).get("success", True))

        wait_for(done, 20, "a reset of vLLM's prefix cache", pause=0.1)

    def count_tokens(self, prompt: str) -> int:
        """Tokens of a text."""
        status, text = web.post(f"{self.url}/tokenize", {"model": "model", "prompt": prompt})
        assert status == 200, f"/tokenize answered {status}: {text}"
        return int(json.loads(text)["count"])


class VllmServer(VllmClient):
    """One server on a free port of the loopback interface."""

    def __init__(
        self,
        folder: Path | None,
        model: Path,
        log: Path,
        *arguments: str,
        env: dict[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:
        super().__init__("127.0.0.1", paths.free_port())
        command = [
            python,
            "-m",
            "vllm.entrypoints.cli.main",
            "serve",
            str(model),
            "--served-model-name",
            "model",
        ]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager", *arguments]
        variables = {"VLLM_SERVER_DEV_MODE": "1", "TMPDIR": str(log.parent)} | (env or {})
        self.process = Process("vllm serve", command, log, env=environment(folder, **variables))

    def wait_ready(self, seconds: float = 240) -> VllmServer:
        """Waits until /health succeeds."""

        def ready() -> bool:
            if not self.process.running():
                raise AssertionError(f"vllm serve ended:\n{self.process.tail(60)}")
            return web.get(f"{self.url}/health", 2)[0] == 200

        wait_for(ready, seconds, "vllm serve ready", pause=0.25)
        return self

    def kill(self) -> None:
        """SIGKILL to all its processes."""
        self.process.kill()

    def stop(self) -> None:
        """SIGTERM."""
        self.process.stop(30)

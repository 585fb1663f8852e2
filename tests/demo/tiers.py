"""The lower tiers, without Kubernetes: a pod's chunks are loaded from its disk, from Redis and from S3."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from demo.local import start_vllm
from demo.progress import at_work, main, say
from demo.workload import COLD, Model, Round, Workload
from servers import paths
from servers.pod import settle
from servers.redis import RedisServer
from servers.s3 import BUCKET, S3Server
from servers.sidecar import Sidecar
from servers.vllm_server import VllmServer
from servers.waiting import wait_for

_FROM_DISK = Round("by the pod's next sidecar, from its disk")
_FROM_REDIS = Round("by a second pod, from Redis")
_FROM_S3 = Round("by a third pod, with Redis gone, from S3")


class Pod:
    """A folder as the shared volume, a sidecar with these tiers, and a vLLM without any reference to it."""

    def __init__(self, number: int, chosen: Model, tiers: dict[str, Any]) -> None:
        self._folder = paths.short_folder()
        self._number = number
        self._chosen = chosen
        # Waits longer for a document than a busy vLLM would, because the demo shows where it comes from.
        self.sidecar = Sidecar(self._folder, memory="2Gi", config={**tiers, "cache": {"loadTimeout": "20s"}})
        self._server: VllmServer | None = None
        self._starts = 0

    def start(self, *tiers: str) -> VllmServer:
        """Starts both, with empty memory, and waits until these tiers serve."""
        self._starts += 1
        config = f"kvcachepool-sidecar run --config {self._folder}/config.v1.yaml"
        with at_work(f"pod {self._number}, its sidecar starts: {config}"):
            self.sidecar.start(ready_seconds=60)
            wait_for(lambda: all(self.sidecar.tier_state(tier) == "ready" for tier in tiers), 60, "its tiers to serve")
        self._server = start_vllm(self._folder, self._chosen, self._starts)
        return self._server

    def kill(self) -> None:
        """Kills both, so the memory tier is lost."""
        if self._server is not None:
            say(f"pod {self._number}: vLLM and sidecar are killed (SIGKILL)")
            self._server.kill()
            self._server = None
            self.sidecar.kill_tree()

    def end(self) -> None:
        """Ends both and removes the folder."""
        if self._server is not None:
            self._server.stop()
        self.sidecar.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


def demo() -> int:
    """Runs everything. Returns the exit status."""
    chosen = Model.chosen()
    with ExitStack() as ends:
        with at_work("a Redis and an S3 server start"):
            redis, s3 = RedisServer(memory="4gb"), S3Server()
            ends.callback(redis.stop)
            ends.callback(s3.stop)
        say(f"they are {redis.url} and the bucket {BUCKET} at {s3.endpoint}; each pod has a disk of its own")

        def pod(number: int) -> Pod:
            disk: Path = paths.short_folder()
            ends.callback(shutil.rmtree, disk, ignore_errors=True)
            tiers = {"disk": {"path": str(disk), "size": "4Gi"}, "redis": redis.config(), "s3": s3.config()}
            made = Pod(number, chosen, tiers)
            ends.callback(made.end)
            return made

        first, second, third = (pod(number) for number in (1, 2, 3))
        workload = Workload(first.start("disk", "redis", "s3"), first.sidecar, chosen)
        workload.attach()
        workload.ask(COLD)
        with at_work("all of it is written: to disk, Redis and S3"):
            settle(first.sidecar)
            wait_for(lambda: first.sidecar.written_to("disk", "redis", "s3"), 120, "every chunk in every tier")

        def asked_by(now: Pod, what: Round, tier: str) -> None:
            workload.vllm, workload.sidecar = now.start(tier), now.sidecar
            workload.attach()
            workload.ask(what)
            metrics = now.sidecar.metrics
            wait_for(lambda: metrics().total("kvcachepool_hit_tokens_total", tier=tier), 10, f"hits from {tier}")

        first.kill()
        asked_by(first, _FROM_DISK, "disk")
        first.kill()
        asked_by(second, _FROM_REDIS, "redis")
        second.kill()
        say("Redis is killed: what it held is lost")
        redis.kill()
        asked_by(third, _FROM_S3, "s3")
        return workload.end("The third pod runs on")


if __name__ == "__main__":
    main(demo)

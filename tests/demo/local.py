"""The sidecar and a real `vllm serve` on this machine, without Kubernetes and without any connector argument."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path

from demo.progress import at_work, main, say
from demo.workload import KV_SPACE, Model, Workload
from servers import paths
from servers.sidecar import Sidecar
from servers.vllm_server import VllmServer


def start_vllm(pod: Path, chosen: Model, number: int) -> VllmServer:
    """Starts vLLM with the pod's folder on PYTHONPATH and no other reference to the cache."""
    arguments = chosen.arguments()
    log = pod / f"vllm-{number}.log"
    server = VllmServer(pod, chosen.folder, log, *arguments, env={"VLLM_CPU_KVCACHE_SPACE": KV_SPACE})
    try:
        with at_work(f"vLLM starts: PYTHONPATH={pod} vllm serve {chosen.folder} {' '.join(arguments)}"):
            server.wait_ready(600)
    except BaseException:
        server.kill()
        raise
    return server


def demo() -> int:
    """Runs everything. Returns the exit status."""
    with ExitStack() as ends:
        chosen = Model.chosen()
        pod = paths.short_folder()
        ends.callback(shutil.rmtree, pod, ignore_errors=True)
        sidecar = Sidecar(pod, memory="2Gi")
        ends.callback(sidecar.stop)
        with at_work(f"the sidecar starts: kvcachepool-sidecar run --config {pod}/config.v1.yaml"):
            sidecar.start(ready_seconds=60)
        server = start_vllm(pod, chosen, 1)
        ends.callback(lambda: server.stop())

        def restart() -> VllmServer:
            nonlocal server
            say("vLLM is killed (SIGKILL)")
            server.kill()
            server = start_vllm(pod, chosen, 2)
            return server

        workload = Workload(server, sidecar, chosen)
        workload.attach()
        workload.run(restart)
        return workload.end("Both run on")


if __name__ == "__main__":
    main(demo)

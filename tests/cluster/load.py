"""Consecutive dry runs of pods. Each response shows whether the webhook was reachable."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from cluster.kubernetes import Kubernetes
from cluster.product import injected, pod

_THREADS = 2


class DryRuns:
    """Endless dry runs of labelled pods, until the block ends."""

    def __init__(self, kubernetes: Kubernetes, namespace: str, image: str, of: str) -> None:
        self._kubernetes = kubernetes
        self._path = f"/api/v1/namespaces/{namespace}/pods?dryRun=All"
        self._pod = pod(image, "never", of)
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(_THREADS)]
        self._began = time.monotonic()
        #: Number of responses so far.
        self.count = 0
        #: Seconds since the start at which a pod came back without a sidecar, or failed, and the reason.
        self.missed: list[str] = []

    def __enter__(self) -> DryRuns:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            missed = ""
            try:
                if not injected(self._kubernetes.request("POST", self._path, self._pod)):
                    missed = "without a sidecar"
            except Exception as error:
                missed = repr(error)
            self.count += 1
            if missed:
                self.missed.append(f"after {time.monotonic() - self._began:.1f} s: {missed}")

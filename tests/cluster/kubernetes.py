"""Access to any cluster: kubectl for complex commands, plain HTTP for frequent requests."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster import diagnostics
from cluster.slot import search_path
from servers.process import Process
from servers.waiting import TimedOut, wait_for

Object = dict[str, Any]


class Refused(AssertionError):
    """The API server or kubectl refused a request. The text is the reply."""


class Kubernetes:
    """A cluster behind a kubeconfig."""

    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig
        self._proxy: Process | None = None
        self._url = ""
        self._lock = threading.Lock()

    def kubectl(
        self,
        *arguments: str,
        stdin: str | None = None,
        namespace: str | None = None,
        seconds: float = 60,
        check: bool = True,
    ) -> str:
        """Runs kubectl and returns its output."""
        command = ["kubectl", *(["-n", namespace] if namespace else []), *arguments]
        done = subprocess.run(command, input=stdin, env=self.env(), capture_output=True, text=True, timeout=seconds)
        if check and done.returncode:
            raise Refused(f"{' '.join(command)}: {done.stderr}{done.stdout}")
        return done.stdout

    def env(self) -> dict[str, str]:
        """Environment of programs that use this cluster: kubectl, helm, the operator."""
        return {
            **os.environ,
            "KUBECONFIG": str(self.kubeconfig),
            "PATH": f"{search_path()}:{os.environ.get('PATH', '')}",
        }

    def apply(self, manifest: str | Object | list[Object], *, namespace: str | None = None, check: bool = True) -> str:
        """Applies YAML, an object or several of them (server side)."""
        text = manifest if isinstance(manifest, str) else json.dumps(_listed(manifest))
        return self.kubectl(
            "apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text, namespace=namespace, check=check
        )

    def wait(self, kind: str, name: str, until: str, *, namespace: str | None = None, seconds: float = 60) -> None:
        """`kubectl wait` for "condition=Ready", "delete", "jsonpath=...". A failure shows the content of the
        namespace.
        """
        try:
            command = ("wait", f"--for={until}", f"--timeout={seconds:g}s", kind, name)
            self.kubectl(*command, namespace=namespace, seconds=seconds + 20)
        except Refused as error:
            raise TimedOut(f"{error}\n{diagnostics.collect(self, namespace)}") from None

    def wait_for(self, condition: Callable[[], Any], seconds: float, what: str, *, namespace: str | None = None) -> Any:
        """Polls until the result is true. A failure shows the content of the namespace."""
        try:
            return wait_for(condition, seconds, what, pause=0.1)
        except TimedOut as error:
            raise TimedOut(f"{error}\n{diagnostics.collect(self, namespace)}") from None

    def request(self, method: str, path: str, body: Any = None, *, content_type: str = "application/json") -> Any:
        """A request to the API server, such as `/api/v1/namespaces`. Returns the response, JSON or text."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base() + path, data, {"Content-Type": content_type}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                text, kind = answer.read().decode(), answer.headers.get("Content-Type", "")
        except urllib.error.HTTPError as error:
            raise Refused(f"{method} {path}: {error.code}: {error.read().decode(errors='replace')}") from None
        return json.loads(text) if kind.startswith("application/json") else text

    def changes(self, path: str, since: str, seconds: int = 1) -> list[Object]:
        """Watch events of a list such as `/api/v1/pods` from a resource version on, until `seconds` from now."""
        query = urllib.parse.urlencode({"watch": "1", "resourceVersion": since, "timeoutSeconds": seconds})
        with urllib.request.urlopen(f"{self._base()}{path}?{query}", timeout=seconds + 30) as answer:
            return [json.loads(line) for line in answer]

    def minor(self) -> int:
        """34 for Kubernetes 1.34."""
        return int(self.request("GET", "/version")["minor"].rstrip("+"))

    def pod(self, namespace: str, name: str) -> Object:
        """A pod."""
        found: Object = self.request("GET", f"/api/v1/namespaces/{namespace}/pods/{name}")
        return found

    def pods(self, namespace: str, selector: str = "") -> list[Object]:
        """Pods of a namespace."""
        query = urllib.parse.urlencode({"labelSelector": selector})
        items: list[Object] = self.request("GET", f"/api/v1/namespaces/{namespace}/pods?{query}")["items"]
        return items

    def logs(self, namespace: str, pod: str, container: str = "") -> str:
        """The output of a container so far."""
        return self.kubectl("logs", pod, *(["-c", container] if container else []), namespace=namespace)

    def exec(self, namespace: str, pod: str, *command: str, container: str = "", seconds: float = 60) -> str:
        """Runs a command in a container."""
        chosen = ["-c", container] if container else []
        return self.kubectl("exec", pod, *chosen, "--", *command, namespace=namespace, seconds=seconds)

    def create_namespace(self, name: str, labels: dict[str, str] | None = None) -> None:
        """A namespace that is ready for pods."""
        metadata = {"name": name, "labels": labels or {}}
        self.request("POST", "/api/v1/namespaces", {"metadata": metadata})
        # A pod is refused before its account exists.
        accounts = f"/api/v1/namespaces/{name}/serviceaccounts"
        self.wait_for(
            lambda: self.request("GET", accounts)["items"], 30, f"the default account of {name}", namespace=name
        )

    def delete_namespace(self, name: str) -> None:
        """Requests the deletion without waiting for it."""
        self.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")
        self.kubectl("delete", "pods", "--all", "--grace-period=1", "--wait=false", namespace=name, check=False)

    def _base(self) -> str:
        with self._lock:
            if self._proxy is None or not self._proxy.running():
                self._start_proxy()
            return self._url

    def _start_proxy(self) -> None:
        """`kubectl proxy` sends requests with the kubeconfig's credentials."""
        log = Path(os.environ.get("TMPDIR", "/tmp")) / f"kvcachepool-proxy-{os.getpid()}-{time.monotonic_ns()}.log"
        self._proxy = Process("kubectl proxy", ["kubectl", "proxy", "--port=0"], log, env=self.env())
        try:
            found = wait_for(lambda: re.search(r"127\.0\.0\.1:\d+", log.read_text()), 20, "kubectl proxy listens")
        finally:
            log.unlink()
        self._url = f"http://{found[0]}"

    def close(self) -> None:
        """Stops the helper process."""
        with self._lock:
            if self._proxy is not None:
                self._proxy.kill()
                self._proxy = None


def _listed(manifest: Object | list[Object]) -> Object:
    if isinstance(manifest, list):
        return {"apiVersion": "v1", "kind": "List", "items": manifest}
    return manifest

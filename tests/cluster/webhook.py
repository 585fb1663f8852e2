"""A mutating webhook of the test on this machine, called by URL."""

from __future__ import annotations

import base64
import json
import ssl
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cluster.cluster import Cluster
from cluster.kubernetes import Object
from servers import certificates

#: Computes the operations of a JSON patch for a pod.
Mutation = Callable[[Object], list[Object]]


@contextmanager
def mutating(cluster: Cluster, name: str, namespace: str, mutation: Mutation) -> Iterator[None]:
    """A webhook for new pods of a namespace. The API server calls webhooks in the order of their names."""
    with tempfile.TemporaryDirectory() as folder:
        pki = Path(folder) / "pki"
        certificates.for_server(pki, cluster.slot.host)
        server = _serve(cluster.slot.host, pki, mutation)
        url = f"https://{cluster.slot.host}:{server.server_port}/"
        bundle = base64.b64encode((pki / "ca.crt").read_bytes()).decode()
        cluster.kubernetes.apply(_configuration(name, namespace, {"url": url, "caBundle": bundle}))
        try:
            yield
        finally:
            cluster.kubernetes.kubectl("delete", "mutatingwebhookconfiguration", name)
            server.shutdown()
            server.server_close()


def _serve(address: str, pki: Path, mutation: Mutation) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["request"]
            patch = base64.b64encode(json.dumps(mutation(asked["object"])).encode()).decode()
            response = {"uid": asked["uid"], "allowed": True, "patchType": "JSONPatch", "patch": patch}
            review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
            body = json.dumps(review).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer((address, 0), Handler)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(pki / "server.crt", pki / "server.key")
    server.socket = tls.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def _configuration(name: str, namespace: str, client: Object) -> Object:
    pods = {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]}
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": name},
        "webhooks": [
            {
                "name": f"{name}.example.com",
                "clientConfig": client,
                "rules": [pods],
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
                "failurePolicy": "Fail",
                "sideEffects": "None",
                "admissionReviewVersions": ["v1"],
            }
        ],
    }

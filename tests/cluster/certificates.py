"""Certificates of one cluster, made afresh by openssl: one authority, and a leaf for everybody who talks."""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path
from typing import NamedTuple

_CONFIG = "[req]\ndistinguished_name = none\n[none]\n"


class Leaf(NamedTuple):
    """What a certificate says: subject, further names, whether its holder serves."""

    subject: str
    names: list[str] = []
    serves: bool = False


def create(folder: Path, leaves: dict[str, Leaf]) -> None:
    """Writes ca, all leaves (.crt and .key) and the key pair of service account tokens (sa.key, sa.pub)."""
    folder.mkdir(parents=True)
    config = folder / "openssl.cnf"
    config.write_text(_CONFIG)
    new = ["openssl", "req", "-x509", "-config", str(config), "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    new += ["-nodes", "-days", "365"]
    authority = ["-subj", "/CN=kvcachepool-test-ca", "-addext", "basicConstraints=critical,CA:TRUE"]
    authority += ["-addext", "keyUsage=critical,keyCertSign,cRLSign,digitalSignature"]
    _run([[*new, *authority, "-keyout", f"{folder}/ca.key", "-out", f"{folder}/ca.crt"]])
    key = ["openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", f"{folder}/sa.key"]
    _run([key])
    # The API server takes no public key out of a PKCS 8 file.
    commands = [["openssl", "pkey", "-in", f"{folder}/sa.key", "-pubout", "-out", f"{folder}/sa.pub"]]
    for name, leaf in leaves.items():
        usage = "clientAuth,serverAuth" if leaf.serves else "clientAuth"
        extensions = ["basicConstraints=CA:FALSE", "keyUsage=digitalSignature", f"extendedKeyUsage={usage}"]
        if leaf.names:
            extensions.append("subjectAltName=" + ",".join(leaf.names))
        command = [*new, "-CA", f"{folder}/ca.crt", "-CAkey", f"{folder}/ca.key", "-subj", leaf.subject]
        for extension in extensions:
            command += ["-addext", extension]
        commands.append([*command, "-keyout", f"{folder}/{name}.key", "-out", f"{folder}/{name}.crt"])
    _run(commands)


def _run(commands: list[list[str]]) -> None:
    running = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for c in commands]
    for process in running:
        output, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(f"{' '.join(map(str, process.args))}:\n{output}")  # type: ignore[arg-type]


def write_kubeconfig(path: Path, server: str, folder: Path, name: str) -> None:
    """A kubeconfig with everything inside it, so that it may be copied."""

    def encoded(file: str) -> str:
        return base64.b64encode((folder / file).read_bytes()).decode()

    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": {"server": server, "certificate-authority-data": encoded("ca.crt")}}],
        "users": [
            {
                "name": name,
                "user": {
                    "client-certificate-data": encoded(f"{name}.crt"),
                    "client-key-data": encoded(f"{name}.key"),
                },
            }
        ],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": name}}],
        "current-context": "test",
    }
    path.write_text(json.dumps(config, indent=1))
    path.chmod(0o600)

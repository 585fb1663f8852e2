"""Identities of one cluster: the key of service account tokens, and kubeconfigs."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from servers.certificates import run


def create_token_keys(folder: Path) -> None:
    """The key pair of service account tokens: sa.key, sa.pub."""
    key = f"{folder}/sa.key"
    run([["openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", key]])
    # The API server does not read a public key from a PKCS 8 file.
    run([["openssl", "pkey", "-in", key, "-pubout", "-out", f"{folder}/sa.pub"]])


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

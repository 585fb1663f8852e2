"""Certificates created by openssl: one authority, and a leaf per peer."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

_CONFIG = "[req]\ndistinguished_name = none\n[none]\n"


class Leaf(NamedTuple):
    """A leaf certificate: subject, alternative names, whether it is for a server."""

    subject: str
    names: list[str] = []
    serves: bool = False


def create(folder: Path, leaves: dict[str, Leaf]) -> None:
    """Writes the CA and all leaves, each as .crt and .key, into a new folder."""
    folder.mkdir(parents=True)
    config = folder / "openssl.cnf"
    config.write_text(_CONFIG)
    new = ["openssl", "req", "-x509", "-config", str(config), "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    new += ["-nodes", "-days", "365"]
    authority = ["-subj", "/CN=kvcachepool-test-ca", "-addext", "basicConstraints=critical,CA:TRUE"]
    authority += ["-addext", "keyUsage=critical,keyCertSign,cRLSign,digitalSignature"]
    run([[*new, *authority, "-keyout", f"{folder}/ca.key", "-out", f"{folder}/ca.crt"]])
    commands = []
    for name, leaf in leaves.items():
        usage = "clientAuth,serverAuth" if leaf.serves else "clientAuth"
        extensions = ["basicConstraints=CA:FALSE", "keyUsage=digitalSignature", f"extendedKeyUsage={usage}"]
        if leaf.names:
            extensions.append("subjectAltName=" + ",".join(leaf.names))
        command = [*new, "-CA", f"{folder}/ca.crt", "-CAkey", f"{folder}/ca.key", "-subj", leaf.subject]
        for extension in extensions:
            command += ["-addext", extension]
        commands.append([*command, "-keyout", f"{folder}/{name}.key", "-out", f"{folder}/{name}.crt"])
    run(commands)


def for_server(folder: Path, host: str) -> None:
    """The CA, and `server` for this address."""
    create(folder, {"server": Leaf("/CN=server", [f"IP:{host}"], serves=True)})


def run(commands: list[list[str]]) -> None:
    """Runs all commands concurrently. Exits with the output of a failed one."""
    running = [subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for c in commands]
    for process in running:
        output, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(f"{' '.join(map(str, process.args))}:\n{output}")  # type: ignore[arg-type]

"""The image of the Dockerfile without docker: an archive for `docker load` and `ctr images import`.

The same programs give the same bytes. Arguments: IMAGE FOLDER-OF-PROGRAMS ARCHIVE.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_ROOTFS = Path(__file__).with_name("rootfs.sh")


def layer(programs: Path) -> bytes:
    """The file system that the Dockerfile copies, as a tar without times and owners."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([str(_ROOTFS), str(programs), folder], check=True)
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
            for path in sorted(Path(folder).rglob("*")):
                entry = tar.gettarinfo(str(path), str(path.relative_to(folder)))
                entry.uid = entry.gid = entry.mtime = 0
                entry.uname = entry.gname = ""
                if path.is_file():
                    with path.open("rb") as file:
                        tar.addfile(entry, file)
                else:
                    tar.addfile(entry)
        return out.getvalue()


def config(blob: bytes) -> bytes:
    """What a container of the image runs by itself, as the end of the Dockerfile says it."""
    document = {
        "architecture": _MACHINES[platform.machine()],
        "os": "linux",
        "config": {
            "Entrypoint": ["/usr/local/bin/kvcachepool-operator"],
            "Env": ["PATH=/usr/local/bin"],
            "User": "65532:65532",
            "WorkingDir": "/",
            "Labels": {
                "org.opencontainers.image.title": "kvcachepool",
                "org.opencontainers.image.description": "Kubernetes operator and node-local KV cache sidecar for vLLM",
                "org.opencontainers.image.licenses": "Apache-2.0",
            },
        },
        "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(blob).hexdigest()]},
    }
    return json.dumps(document, sort_keys=True).encode()


def write(image: str, programs: Path, archive: Path) -> None:
    blob = layer(programs)
    settings = config(blob)
    name = hashlib.sha256(settings).hexdigest() + ".json"
    manifest = json.dumps([{"Config": name, "RepoTags": [image], "Layers": ["layer.tar"]}]).encode()
    with tarfile.open(archive, "w", format=tarfile.GNU_FORMAT) as tar:
        for member, data in ((name, settings), ("layer.tar", blob), ("manifest.json", manifest)):
            entry = tarfile.TarInfo(member)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    write(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))

"""Container images without registry or docker: reproducible archives for `ctr images import`."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


class Archived(Protocol):
    """Anything that can be written as an archive of one image."""

    @property
    def name(self) -> str:
        """The full name with tag."""

    def write(self, path: Path) -> Path:
        """Writes the archive."""


@dataclass
class Layer:
    """Entries of one layer, by their path without a leading slash."""

    files: dict[str, tuple[bytes | Path, int]] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    folders: dict[str, int] = field(default_factory=dict)

    def add(self, path: str, content: bytes | str | Path, mode: int = 0o644) -> None:
        """A file, from bytes or from a file of this machine."""
        self.files[path.lstrip("/")] = (content.encode() if isinstance(content, str) else content, mode)

    def tar(self) -> bytes:
        """The layer's bytes: sorted, without times, owned by root."""
        for path in [*self.files, *self.links, *self.folders]:
            for parent in list(Path(path).parents)[:-1]:
                self.folders.setdefault(str(parent), 0o755)
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
            for path in sorted({*self.files, *self.links, *self.folders}):
                entry = tarfile.TarInfo(path)
                if path in self.folders:
                    entry.type, entry.mode = tarfile.DIRTYPE, self.folders[path]
                    tar.addfile(entry)
                elif path in self.links:
                    entry.type, entry.mode, entry.linkname = tarfile.SYMTYPE, 0o777, self.links[path]
                    tar.addfile(entry)
                else:
                    content, entry.mode = self.files[path]
                    data = content if isinstance(content, bytes) else content.read_bytes()
                    entry.size = len(data)
                    tar.addfile(entry, io.BytesIO(data))
        return buffer.getvalue()


@dataclass
class Image:
    """One image: its full name with tag, its layers, and its default command."""

    name: str
    layers: list[Layer]
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    user: str = ""

    def write(self, path: Path) -> Path:
        """Writes the archive."""
        layers = [layer.tar() for layer in self.layers]
        config = json.dumps(self._config(layers), sort_keys=True).encode()
        name = hashlib.sha256(config).hexdigest() + ".json"
        files = {f"{number}.tar": layer for number, layer in enumerate(layers)}
        manifest = [{"Config": name, "RepoTags": [self.name], "Layers": list(files)}]
        with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
            for member, data in {name: config, **files, "manifest.json": json.dumps(manifest).encode()}.items():
                entry = tarfile.TarInfo(member)
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
        return path

    def _config(self, layers: list[bytes]) -> dict[str, Any]:
        return {
            "architecture": _MACHINES[platform.machine()],
            "os": "linux",
            "config": {
                "Entrypoint": self.entrypoint,
                "Cmd": self.command,
                "Env": [f"{name}={value}" for name, value in self.env.items()],
                "User": self.user,
                "WorkingDir": "/",
            },
            "rootfs": {
                "type": "layers",
                "diff_ids": ["sha256:" + hashlib.sha256(layer).hexdigest() for layer in layers],
            },
            "history": [{"created_by": "kvcachepool tests"} for _ in layers],
        }

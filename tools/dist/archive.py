"""Archives whose bytes depend on their files alone: sorted, without owners, with one time and two modes."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path


def tar_gz(target: Path, files: Mapping[str, bytes | Path], epoch: int) -> None:
    """Writes a .tar.gz. A member from a path keeps only whether it is executable."""
    blob = io.BytesIO()
    with tarfile.open(fileobj=blob, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, content in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            executable = isinstance(content, Path) and content.stat().st_mode & 0o100
            entry.mode = 0o755 if executable else 0o644
            entry.mtime = epoch
            data = content.read_bytes() if isinstance(content, Path) else content
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    # Without a name and a time of its own.
    with target.open("wb") as out, gzip.GzipFile(filename="", fileobj=out, mode="wb", compresslevel=6, mtime=0) as packed:
        packed.write(blob.getvalue())

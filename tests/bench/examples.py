"""The examples that measure. Each prints one JSON object per line."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from servers import paths


def built(example: str) -> Path:
    """Path of the program."""
    return paths.example(example)


def measured(example: str, *arguments: str) -> list[dict[str, Any]]:
    """Runs an example and returns its JSON output. On failure the error contains all output."""
    done = subprocess.run([str(built(example)), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(done.args)}\n{done.stdout}{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines()]

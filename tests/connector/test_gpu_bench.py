"""The conditions that `bench.gpu` waits for before it measures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bench import gpu
from gpu import place


def test_a_window_is_measured_when_all_of_the_cache_is_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    locked = iter([0, 64, 128])
    now: list[int] = []

    class Sidecar:
        def __init__(self, folder: Any, **options: Any) -> None: ...
        def start(self) -> None: ...
        def stop(self) -> None: ...

        def status(self) -> dict[str, Any]:
            now.append(next(locked))
            return {"memory": {"locked_bytes": now[-1], "capacity_bytes": 128}}

    class Rank:
        reasons: tuple[str, ...] = ()

        def __init__(self, sidecar: Any, layout: Any) -> None: ...
        def close(self) -> None: ...
        def commit(self, reply: Any) -> None: ...
        def release(self, request: str) -> None: ...

        def granted(self, hashes: list[bytes]) -> Any:
            return SimpleNamespace(refs=b"")

        def pinned(self, hashes: list[bytes], request: str) -> Any:
            return SimpleNamespace(refs=b"")

        def copied(self, *arguments: Any) -> None:
            assert now == [0, 64, 128], "the cache is not page-locked"

    monkeypatch.setattr("servers.sidecar.Sidecar", Sidecar)
    monkeypatch.setattr("gpu.rank.Rank", Rank)
    monkeypatch.setattr(place, "device", lambda: "cuda")
    monkeypatch.setattr(place, "kv_cache", lambda *arguments: None)
    monkeypatch.setattr(gpu, "settled", lambda: None)
    monkeypatch.setattr(gpu, "Peak", lambda nbytes: SimpleNamespace(copy=lambda kind: None))
    assert len(list(gpu.window_rows(4 << 20, 1))) == 3

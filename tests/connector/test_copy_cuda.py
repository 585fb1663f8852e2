"""Copies between KV blocks and the arena over a made-up driver: what is called, and how."""

from __future__ import annotations

import ctypes

import made_up_cuda
import numpy as np
import pytest
import torch
from test_copy import BLOCKS, arena, group, layer_outermost

import kvcachepool.copy_cuda as copy_cuda
from kvcachepool.copy_cuda import CudaCopier
from kvcachepool.layout import Layout
from kvcachepool.pieces import Piece
from kvcachepool.shared import Mapping
from servers.waiting import wait_for


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return made_up_cuda.built(tmp_path_factory.mktemp("driver"))


def test_neither_copies_nor_page_locks_end_a_capture_of_vllms_thread(
    mapping: Mapping, driver: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up_cuda.install(driver, monkeypatch)
    monkeypatch.setattr(copy_cuda, "_PIN_PAUSE_S", 0.0)
    storage = torch.from_numpy(np.random.default_rng(2).integers(0, 256, 3 * 4096 * BLOCKS, dtype=np.uint8))
    copier = CudaCopier(Layout((storage,), BLOCKS, (group(layer_outermost(4096)),), "cuda", {}))
    copier.attach(mapping)
    monkeypatch.setenv("FAKE_CAPTURE", "1")
    before = driver.fake_captures_ended()
    copier.begin_thread()
    wanted = b"".join(storage.numpy().tobytes()[(layer * BLOCKS + 5) * 4096 :][:4096] for layer in range(3))
    pins = copier._pins
    assert pins is not None
    for locked in (False, True):
        wait_for(lambda locked=locked: pins._done.any() == locked, 20, "the page lock")  # type: ignore[misc]
        arena(mapping)[:] = 0
        copier.copy("store", [Piece(0, [5], [65536])], "event")
        assert arena(mapping)[65536:][: len(wanted)].tobytes() == wanted
        copier.copy("load", [Piece(0, [6], [65536])], None)
        assert storage.numpy()[6 * 4096 :][:4096].tobytes() == wanted[:4096]
    copier.synchronize()
    copier.detach()
    assert driver.fake_captures_ended() == before
    assert made_up_cuda.capture_mode(driver) == 0

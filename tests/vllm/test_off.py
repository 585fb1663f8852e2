"""Conditions that turn the cache off do so by name, and vLLM serves without it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcachepool import wire
from servers.engine import by_source
from servers.models import token_ids
from servers.pod import Pod
from servers.waiting import wait_for

Truth = Callable[..., list[int]]
NewPod = Callable[..., Pod]


def off_reasons(pod: Pod) -> list[str]:
    """Reasons that processes have reported to the sidecar."""
    return [session["off"] for session in pod.sidecar.status()["sessions"] if session["off"]]


@pytest.mark.parametrize(
    ("transfer", "reason"),
    [
        (
            {
                "kv_connector": "ExampleConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"shared_storage_path": "kv"},
            },
            "ExistingConnector/ExampleConnector",
        ),
        (
            {
                "kv_connector": "KVCachePoolConnector",
                "kv_connector_module_path": "kvcachepool.connector",
                "kv_role": "kv_both",
            },
            "LoadFailurePolicyNotRecompute",
        ),
    ],
    ids=["another-connector", "classic-argument-without-recompute"],
)
def test_configured_by_the_user(new_pod: NewPod, truth: Truth, transfer: dict[str, Any], reason: str) -> None:
    pod = new_pod()
    pod.sidecar.start()
    if "kv_connector_extra_config" in transfer:
        transfer = {**transfer, "kv_connector_extra_config": {"shared_storage_path": str(pod.folder / "kv")}}
    engine = pod.start_engine(kv_transfer_config=transfer)
    assert engine.connector == transfer["kv_connector"], "the user's choice stands"
    wait_for(
        lambda: any(reason in name for name in off_reasons(pod)),
        20,
        f"off by {reason} at the sidecar: {off_reasons(pod)}",
    )
    prompt = token_ids(1500, 201)
    assert engine.generate(prompt) == truth(prompt)
    assert pod.sidecar.status()["memory"]["chunks"] == 0


class OtherVersion:
    """A sidecar of another protocol version, which answers every frame with WrongVersion and closes."""

    def __init__(self, path: Path) -> None:
        self.frames = 0
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            # The connector's connections send HELLO one after another, in any order, so neither may wait for the other
            # here.
            threading.Thread(target=self._answer, args=(peer,), daemon=True).start()

    def _answer(self, peer: socket.socket) -> None:
        with peer:
            if header := peer.recv(16):
                self.frames += 1
                peer.sendall(refusal(header))

    def close(self) -> None:
        self._socket.close()


def refusal(header: bytes) -> bytes:
    """An error response in the layout of the real sidecar, with the next version."""
    import msgspec

    body = msgspec.msgpack.encode(
        {"code": "WrongVersion", "message": "this sidecar speaks version 2", "retryable": False}
    )
    flags = wire.FLAG_REPLY | wire.FLAG_ERROR
    return len(body).to_bytes(4, "little") + bytes([2, header[5]]) + flags.to_bytes(2, "little") + header[8:16] + body


@pytest.fixture
def other_version(new_pod: NewPod) -> Iterator[tuple[Pod, OtherVersion]]:
    pod = new_pod()
    server = OtherVersion(pod.sidecar.socket)
    yield pod, server
    server.close()


def test_sidecar_of_another_protocol_version(other_version: tuple[Pod, OtherVersion], truth: Truth) -> None:
    pod, server = other_version
    engine = pod.start_engine()
    before = engine.counters()
    prompt = token_ids(1500, 202)
    assert engine.generate(prompt) == truth(prompt)
    assert by_source(before, engine.counters())["external"] == 0
    wait_for(lambda: server.frames, 20, "a HELLO of the connector")
    wait_for(lambda: "WrongVersion" in engine.log_text(), 20, "the reason in the log")

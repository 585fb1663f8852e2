"""Ranks of several nodes create the connector together, or none of them does."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

import torch

from kvcachepool import presence
from kvcachepool.presence import agree


def decisions(store: Any, present: list[int], ranks: int, late: bool = False, strange: int = -1) -> dict[int, bool]:
    """What these ranks decide. The last of them may be late, and one may have another version."""
    found: dict[int, bool] = {}

    def rank(number: int) -> None:
        version = "other" if number == strange else "1"
        found[number] = agree(store, "0", number, ranks, version, wait_s=0.3)

    threads = [threading.Thread(target=rank, args=(number,)) for number in present]
    for thread in threads[:-1]:
        thread.start()
    if late:
        for thread in threads[:-1]:
            thread.join()
    threads[-1].start()
    for thread in threads:
        thread.join()
    return found


@pytest.fixture
def store() -> Any:
    return torch.distributed.HashStore()


def test_all_ranks_agree(store: Any) -> None:
    assert decisions(store, [0, 1, 2], 3) == {0: True, 1: True, 2: True}


def test_without_one_rank_no_rank_has_it(store: Any) -> None:
    assert decisions(store, [0, 2], 3) == {0: False, 2: False}


def test_a_late_rank_does_not_decide_otherwise(store: Any) -> None:
    assert decisions(store, [0, 1, 2], 3, late=True) == {0: False, 1: False, 2: False}


def test_engines_that_share_a_store_decide_apart(store: Any) -> None:
    assert decisions(store, [0], 2) == {0: False}
    assert not agree(store, "0", 1, 2, "1", wait_s=0.1)
    assert agree(store, "1", 0, 1, "1")


def test_ranks_with_different_versions_have_no_connector(store: Any) -> None:
    assert decisions(store, [0, 1, 2], 3, strange=1) == {0: False, 1: False, 2: False}


def test_the_form_is_of_the_classes_in_steps() -> None:
    assert len(presence.form()) == 64


class Guarded:
    """vLLM's function behind the guard, with a recorder in place of vLLM's own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, agreed: bool) -> None:
        from vllm.distributed import kv_transfer
        from vllm.distributed.kv_transfer import kv_transfer_state

        self.created: list[Any] = []
        self.reasons: list[str] = []

        def original(vllm_config: Any, *args: Any) -> None:
            self.created.append(vllm_config)

        for module in (kv_transfer, kv_transfer_state):
            monkeypatch.setattr(module, "ensure_kv_transfer_initialized", original)
        monkeypatch.setattr(presence, "_all_have_it", lambda config: agreed)
        presence.guard(lambda config: config == "ours", self.reasons.append)
        assert kv_transfer.ensure_kv_transfer_initialized is kv_transfer_state.ensure_kv_transfer_initialized
        self.call = kv_transfer_state.ensure_kv_transfer_initialized

    def run(self, nodes: int, config: str) -> tuple[int, list[str]]:
        parallel = SimpleNamespace(nnodes_within_dp=nodes)
        self.call(SimpleNamespace(parallel_config=parallel, kv_transfer_config=config), None)
        return len(self.created), self.reasons


@pytest.mark.parametrize(
    ("agreed", "nodes", "config", "expected"),
    [
        (False, 2, "ours", (0, ["NodeWithoutConnector"])),
        (True, 2, "ours", (1, [])),
        (False, 1, "ours", (1, [])),
        (False, 2, "another", (1, [])),
    ],
)
def test_only_ranks_that_agree_create_the_connector(
    monkeypatch: pytest.MonkeyPatch, agreed: bool, nodes: int, config: str, expected: tuple[int, list[str]]
) -> None:
    assert Guarded(monkeypatch, agreed).run(nodes, config) == expected

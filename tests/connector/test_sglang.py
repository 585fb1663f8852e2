"""The storage backend for SGLang, with SGLang's own host pools, factory and controllers, and the real sidecar."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stub_remote import StubRemote

from servers import sglang
from servers.sidecar import Sidecar
from servers.waiting import wait_for

if not sglang.installed():
    pytest.skip("SGLang is not installed: tools/setup.sh sglang", allow_module_level=True)

#: Layouts of host pools, and whether their pages can be addressed.
POOLS: dict[str, Callable[[], Any]] = {
    "mha-layer_first": lambda: sglang.mha_host("layer_first"),
    "mha-page_first": lambda: sglang.mha_host("page_first"),
    "mha-page_first_direct": lambda: sglang.mha_host("page_first_direct"),
    "mha-page_head": lambda: sglang.mha_host("page_head"),
    "mha-other_v-page_first": lambda: sglang.mha_host("page_first", v_head_dim=16),
    "mha-float8": lambda: sglang.mha_host("page_first", dtype=torch.float8_e4m3fn),
    "mla-layer_first": lambda: sglang.mla_host("layer_first"),
    "mla-page_first": lambda: sglang.mla_host("page_first"),
    "mla-page_first_direct": lambda: sglang.mla_host("page_first_direct"),
}
SIDE_POOLS: dict[str, tuple[str, Callable[[], Any]]] = {
    "draft": ("draft", lambda: sglang.mha_host("page_first", layer_num=1)),
    "swa": ("swa", lambda: sglang.mha_host("page_first", layer_num=2)),
    "mamba": ("mamba", lambda: sglang.mamba_host("page_first")),
    "mamba-with-side-state": ("mamba", lambda: sglang.mamba_host("page_first_direct", side_state=True)),
    "deepseek-c4-layer_first": ("deepseek_v4_c4", lambda: sglang.paged_host("layer_first")),
    "deepseek-c4-page_first": ("deepseek_v4_c4", lambda: sglang.paged_host("page_first")),
}


@pytest.fixture(scope="module", autouse=True)
def parallel() -> Iterator[None]:
    with sglang.importable(), sglang.parallel():
        yield


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Creates backends with a live connection, and closes them."""
    opened: list[Any] = []

    def make(host_pool: Any, config: Any = None, *, connected: bool = True, **side_pools: Any) -> Any:
        opened.append(sglang.backend(host_pool, config or sglang.config(), **side_pools))
        if connected:
            assert opened[-1]._client.wait_connected(20)
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def stored(backend: Any, keys: list[str], indices: torch.Tensor) -> None:
    """Stores pages and waits until they are readable, which is after the sidecar took their digests."""
    assert backend.batch_set_v1(keys, indices) == [True] * len(keys)
    wait_for(lambda: backend.batch_exists(keys) == len(keys), 10, "pages readable")


def transfer(name: str, keys: list[str], indices: torch.Tensor | None = None, **policy: Any) -> Any:
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

    return PoolTransfer(name=PoolName(name), keys=keys, host_indices=indices, **policy)


@pytest.mark.parametrize("name", POOLS)
def test_pages_come_back_in_other_slots(name: str, pool: Sidecar, made: Callable[..., Any]) -> None:
    host = POOLS[name]()
    backend = made(host)
    pages = sglang.filled(host, [1, 4, 2])
    assert backend.batch_exists(["a", "b", "c"]) == 0
    stored(backend, ["a", "b", "c"], pages.indices)
    sglang.wiped(host)
    there = sglang.at(host, [5, 3, 7])
    assert backend.batch_get_v1(["a", "b", "c"], there) == [True] * 3
    assert sglang.pages_at(host, there) == pages.content
    others = sglang.at(host, [0, 1, 2, 4, 6])
    assert not any(any(page) for page in sglang.pages_at(host, others)), "bytes outside of the pages were written"


def test_pages_are_kept_by_a_remote_server(remote: StubRemote, credentials: None, made: Callable[..., Any]) -> None:
    host = POOLS["mha-page_first"]()
    backend = made(host, sglang.config(extra={"socket": remote.target}))
    pages = sglang.filled(host, [1, 4, 2])
    stored(backend, ["a", "b", "c"], pages.indices)
    assert len(remote.objects) == 3
    sglang.wiped(host)
    there = sglang.at(host, [5, 3, 7])
    assert backend.batch_get_v1(["a", "b", "c"], there) == [True] * 3
    assert sglang.pages_at(host, there) == pages.content
    remote.close()
    assert backend.batch_exists(["a"]) == 0
    assert backend.batch_set_v1(["d"], sglang.at(host, [1])) == [False]


@pytest.mark.parametrize("name", POOLS)
def test_bytes_are_read_and_written_in_place(name: str, pool: Sidecar, made: Callable[..., Any]) -> None:
    import ctypes

    host = POOLS[name]()
    kv = made(host)._pools["kv"]
    ranges = [(one.data_ptr(), one.data_ptr() + one.numel() * one.element_size()) for one in sglang.tensors(host)]
    page = sglang.at(host, [3])
    for view in [*kv.source(page, 0), *kv.target(page, 0).buffers]:
        address = ctypes.addressof(view)
        assert any(start <= address and address + len(view) <= end for start, end in ranges)
    assert kv.target(page, 0).finish is None


@pytest.mark.parametrize("kind", SIDE_POOLS)
def test_pages_of_side_pools_come_back(kind: str, pool: Sidecar, made: Callable[..., Any]) -> None:
    name, build = SIDE_POOLS[kind]
    host, side = sglang.mha_host("page_first"), build()
    backend = made(host, **{name: side})
    kv, states = sglang.filled(host, [0, 1]), sglang.filled(side, [2, 3], seed=2)
    wanted = [transfer("kv", ["a", "b"], kv.indices), transfer(name, ["a", "b"], states.indices)]
    assert backend.batch_set_v2(wanted) == {"kv": [True] * 2, name: [True] * 2}
    wait_for(lambda: backend.batch_exists_v2(["a", "b"], [transfer(name, [])]).kv_hit_pages == 2, 10, "pages readable")
    sglang.wiped(host)
    sglang.wiped(side)
    kv_there, there = sglang.at(host, [4, 5]), sglang.at(side, [6, 1])
    wanted = [transfer("kv", ["a", "b"], kv_there), transfer(name, ["a", "b", "c"], sglang.at(side, [6, 1, 7]))]
    assert backend.batch_get_v2(wanted) == {"kv": [True] * 2, name: [True, True, False]}
    assert sglang.pages_at(host, kv_there) == kv.content
    assert sglang.pages_at(side, there) == states.content


def test_a_pool_without_bytes_never_limits_the_prefix(pool: Sidecar, made: Callable[..., Any]) -> None:
    host, side = sglang.logical_host(), sglang.paged_host("page_first")
    backend = made(host, deepseek_v4_c4=side)
    states = sglang.filled(side, [0, 1])
    assert backend.batch_set_v1(["a", "b"], torch.arange(2 * sglang.PAGE)) == [True, True]
    assert backend.batch_set_v2([transfer("deepseek_v4_c4", ["a", "b"], states.indices)]) == {
        "deepseek_v4_c4": [True, True]
    }
    asked = [transfer("deepseek_v4_c4", [])]
    wait_for(lambda: backend.batch_exists_v2(["a", "b", "c"], asked).kv_hit_pages == 2, 10, "pages readable")
    assert backend.batch_get_v1(["a", "b"], torch.arange(2 * sglang.PAGE)) == [True, True]


def test_a_pool_in_an_unsupported_form_is_a_miss(pool: Sidecar, made: Callable[..., Any]) -> None:
    host = sglang.mha_host("page_unified")
    backend = made(host)
    indices = sglang.at(host, [1])
    assert backend.batch_set_v1(["a"], indices) == [False]
    assert backend.batch_get_v1(["a"], indices) == [False]
    assert backend.batch_exists(["a"]) == 0


def test_exists_counts_from_the_front(pool: Sidecar, made: Callable[..., Any]) -> None:
    host = sglang.mha_host("page_first")
    backend = made(host)
    stored(backend, ["a", "b"], sglang.filled(host, [0, 1]).indices)
    stored(backend, ["d"], sglang.filled(host, [2]).indices)
    assert backend.batch_exists(["a", "b", "c", "d"]) == 2
    assert backend.batch_exists(["c", "a"]) == 0
    assert backend.batch_exists([]) == 0
    assert backend.exists("d")
    assert not backend.exists("c")
    # Behind the first miss nothing is loaded, because SGLang cannot use it.
    assert backend.batch_get_v1(["a", "c", "d"], sglang.at(host, [4, 5, 6])) == [True, False, False]


def test_each_pool_limits_the_prefix_by_its_policy(pool: Sidecar, made: Callable[..., Any]) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy

    host, draft, states = sglang.mha_host("page_first"), sglang.mha_host("page_first"), sglang.mamba_host("page_first")
    backend = made(host, draft=draft, mamba=states)
    keys = ["a", "b", "c", "d"]
    stored(backend, keys, sglang.filled(host, [0, 1, 2, 3]).indices)
    backend.batch_set_v2(
        [
            transfer("draft", keys[:3], sglang.at(draft, [0, 1, 2])),
            transfer("mamba", ["b", "d"], sglang.at(states, [0, 1])),
        ]
    )
    all_pages = transfer("draft", [])
    trailing = transfer("mamba", ["x"], hit_policy=PoolHitPolicy.TRAILING_PAGES)
    ignored = transfer("draft", [], hit_policy=PoolHitPolicy.BLOCK_GROUPS)
    wait_for(lambda: backend.batch_exists_v2(keys, [all_pages]).kv_hit_pages == 3, 10, "drafts readable")
    wait_for(lambda: backend.batch_exists_v2(keys, [trailing]).kv_hit_pages == 4, 10, "states readable")
    both = backend.batch_exists_v2(keys, [all_pages, trailing])
    assert (both.kv_hit_pages, both.restorable_prefix_pages) == (2, [2])
    assert both.extra_pool_hit_pages == {"kv": 4, "draft": 3, "mamba": 4}
    assert backend.batch_exists_v2(keys, [trailing]).restorable_prefix_pages == [2, 4]
    assert backend.batch_exists_v2([*keys, "e"], [ignored]).kv_hit_pages == 4
    assert backend.batch_exists_v2(["e"], [all_pages]).kv_hit_pages == 0
    assert backend.batch_exists_v2(keys, [transfer("indexer", [])]).kv_hit_pages == 0


def test_flat_pages_without_interface_v1(pool: Sidecar, made: Callable[..., Any]) -> None:
    host = sglang.mha_host("layer_first")
    backend = made(host, sglang.config(extra={"interface_v1": 0}))
    pages = [torch.randn(96, dtype=torch.bfloat16) for _ in range(3)]
    assert backend.get("a", torch.zeros(96, dtype=torch.bfloat16)) is None
    assert backend.batch_set(["a", "b"], pages[:2])
    assert backend.set("d", pages[2])
    wait_for(lambda: backend.batch_exists(["a", "b"]) == 2 and backend.exists("d"), 10, "pages readable")
    targets = [torch.zeros(96, dtype=torch.bfloat16) for _ in range(4)]
    found = backend.batch_get(["a", "b", "c", "d"], targets)
    assert found[0] is targets[0]
    assert torch.equal(found[0], pages[0])
    assert torch.equal(found[1], pages[1])
    assert found[2:] == [None, None]
    # A target of another size is a miss and stays as it is.
    other = torch.zeros(97, dtype=torch.bfloat16)
    assert backend.get("a", other) is None
    assert not other.any()
    assert backend.get("a") is None
    assert not backend.set("e", None)


def reader(host: Any, made: Callable[..., Any], **changes: Any) -> int:
    """How many of the pages a, b another server finds."""
    return int(made(host, sglang.config(**changes)).batch_exists(["a", "b"]))


def test_ranks_do_not_mix(pool: Sidecar, made: Callable[..., Any]) -> None:
    host = sglang.mha_host("page_first")
    first, second = (made(host, sglang.config(tp_rank=rank, tp_size=2)) for rank in (0, 1))
    pages = sglang.filled(host, [0, 1])
    stored(first, ["a", "b"], pages.indices)
    assert second.batch_exists(["a", "b"]) == 0
    others = sglang.filled(host, [0, 1], seed=2)
    stored(second, ["a", "b"], others.indices)
    for backend, content in ((first, pages.content), (second, others.content)):
        assert backend.batch_get_v1(["a", "b"], sglang.at(host, [5, 6])) == [True, True]
        assert sglang.pages_at(host, sglang.at(host, [5, 6])) == content
    # The same rank of another TP size holds other heads.
    assert reader(host, made, tp_rank=0, tp_size=4) == 0
    assert reader(host, made, tp_rank=0, tp_size=2, pp_rank=1, pp_size=2) == 0
    assert reader(host, made, tp_rank=0, tp_size=2, attn_cp_rank=1, attn_cp_size=2) == 0
    assert reader(host, made, tp_rank=0, tp_size=2, dp_rank=1) == 2


def test_ranks_share_the_kv_of_mla_and_nothing_else(pool: Sidecar, made: Callable[..., Any]) -> None:
    def rank(number: int) -> Any:
        return sglang.config(tp_rank=number, tp_size=2, is_mla_model=True)

    host, states, draft = sglang.mla_host("page_first"), sglang.mamba_host("page_first"), sglang.mha_host("page_first")
    first, second = (made(host, rank(number), mamba=states, draft=draft) for number in (0, 1))
    pages = sglang.filled(host, [0])
    stored(first, ["a"], pages.indices)
    first.batch_set_v2(
        [transfer("mamba", ["a"], sglang.at(states, [0])), transfer("draft", ["a"], sglang.at(draft, [0]))]
    )
    for name in ("mamba", "draft"):
        asked = [transfer(name, [])]
        wait_for(lambda asked=asked: first.batch_exists_v2(["a"], asked).kv_hit_pages == 1, 10, f"{name} readable")
        assert second.batch_exists_v2(["a"], asked).kv_hit_pages == 0, name
    assert second.batch_get_v1(["a"], sglang.at(host, [7])) == [True]
    assert sglang.pages_at(host, sglang.at(host, [7])) == pages.content


def raw(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes, which compare also where they are no numbers."""
    return bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def test_groups_of_heads_are_found_by_other_tp_sizes(pool: Sidecar, made: Callable[..., Any]) -> None:
    """With `page_head` and `tp_lcm_size`, one rank of one stores its heads so that two ranks of two load them."""
    whole, half = sglang.mha_host("page_head"), sglang.mha_host("page_head", head_num=1)
    alone = made(whole, sglang.config(tp_lcm_size=2, should_split_heads=True))
    stored(alone, ["a", "b"], sglang.filled(whole, [0, 1]).indices)
    for rank in (0, 1):
        backend = made(half, sglang.config(tp_rank=rank, tp_size=2, tp_lcm_size=2))
        assert backend.batch_exists(["a", "b"]) == 2
        assert backend.batch_get_v1(["a", "b"], sglang.at(half, [3, 4])) == [True, True]
        assert raw(half.kv_buffer[:, 3:5]) == raw(whole.kv_buffer[:, 0:2, rank : rank + 1])
    # And back: the heads of both ranks are one page of one rank.
    other = sglang.mha_host("page_head")
    assert made(other, sglang.config(tp_lcm_size=2, should_split_heads=True)).batch_get_v1(
        ["a", "b"], sglang.at(other, [6, 7])
    ) == [True, True]
    assert raw(other.kv_buffer[:, 6:8]) == raw(whole.kv_buffer[:, 0:2])
    assert reader(sglang.mha_host("page_head"), made) == 0


def test_another_arrangement_or_model_is_a_miss(pool: Sidecar, made: Callable[..., Any]) -> None:
    host = sglang.mha_host("page_first")
    stored(made(host), ["a", "b"], sglang.filled(host, [0, 1]).indices)
    assert reader(sglang.mha_host("page_first"), made) == 2
    assert reader(sglang.mha_host("page_first", page_size=32), made) == 0
    assert reader(sglang.mha_host("page_first", page_size=8), made) == 0
    assert reader(sglang.mha_host("page_first_direct"), made) == 0
    assert reader(sglang.mha_host("page_first", dtype=torch.float16), made) == 0
    assert reader(sglang.mha_host("page_first", start_layer=3, end_layer=5), made) == 0
    assert reader(host, made, model_name="other") == 0
    assert reader(host, made, extra={"model_id": "other"}) == 0
    assert reader(host, made, extra={"interface_v1": 0}) == 0
    assert reader(host, made, extra={"namespace": "other"}) == 0


def test_what_was_cleared_is_not_found_any_more(pool: Sidecar, made: Callable[..., Any]) -> None:
    host = sglang.mha_host("page_first")
    first, second = made(host), made(host)
    stored(first, ["a", "b"], sglang.filled(host, [0, 1]).indices)
    assert first.clear()
    assert first.batch_exists(["a", "b"]) == 0
    assert second.batch_exists(["a", "b"]) == 2
    stored(first, ["a"], sglang.filled(host, [3], seed=2).indices)
    assert second.batch_exists(["a", "b"]) == 2
    # SGLang clears all ranks of a server, and they agree again.
    assert second.clear()
    assert second.batch_exists(["a", "b"]) == 1


def test_an_update_of_weights_clears(pool: Sidecar, made: Callable[..., Any]) -> None:
    """SGLang's own updater, with a model that fails to load after it changed some weights."""
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    def load(*arguments: Any, **options: Any) -> tuple[bool, str]:
        raise OSError("the disk is gone")

    host = sglang.mha_host("page_first")
    backend = made(host)
    stored(backend, ["a"], sglang.filled(host, [0]).indices)
    updater = object.__new__(SchedulerWeightUpdaterManager)
    runner = SimpleNamespace(weight_updater=SimpleNamespace(update_weights_from_disk=load))
    updater.tp_worker = SimpleNamespace(weight_update_runners=lambda: [("target", runner)])
    updater.draft_worker = updater.metrics_collector = None
    with pytest.raises(OSError, match="the disk is gone"):
        updater.update_weights_from_disk(
            SimpleNamespace(model_path="m", load_format="auto", recapture_cuda_graph=False)
        )
    assert backend.batch_exists(["a"]) == 0
    names = [name for name in vars(SchedulerWeightUpdaterManager) if name.startswith("update_weights_from_")]
    assert sorted(name.rpartition("_")[2] for name in names) == ["disk", "distributed", "ipc", "tensor"]


def test_wrong_numbers_of_indices_are_misses(pool: Sidecar, made: Callable[..., Any]) -> None:
    host = sglang.mha_host("page_first")
    backend = made(host)
    assert backend.batch_set_v1(["a", "b"], sglang.at(host, [0])) == [False, False]
    assert backend.batch_get_v1(["a"], sglang.at(host, [0])[:-1]) == [False]
    assert backend.batch_set_v2([transfer("indexer", ["a"], sglang.at(host, [0]))]) == {"indexer": [False]}
    assert backend.batch_get_v2([transfer("kv", ["a"], None)]) == {"kv": [False]}
    assert backend.batch_exists(["a"]) == 0


def test_pages_that_exist_count_as_stored(pool: Sidecar, made: Callable[..., Any]) -> None:
    host = sglang.mha_host("page_first")
    backend = made(host)
    pages = sglang.filled(host, [0])
    stored(backend, ["a"], pages.indices)
    assert backend.batch_set_v1(["a", "b"], sglang.filled(host, [1, 2], seed=2).indices) == [True, True]
    assert backend.batch_get_v1(["a"], sglang.at(host, [5])) == [True]
    assert sglang.pages_at(host, sglang.at(host, [5])) == pages.content


def test_a_page_larger_than_memory_is_not_stored(pool: Sidecar, made: Callable[..., Any]) -> None:
    host = sglang.mha_host("page_first", pages=1, head_num=128, head_dim=4096)
    backend = made(host, sglang.config(extra={"timeout_s": 20}))
    assert backend._pools["kv"].nbytes > pool.status()["memory"]["capacity_bytes"]
    assert backend.batch_set_v1(["a"], sglang.at(host, [0])) == [False]
    assert backend.batch_get_v1(["a"], sglang.at(host, [0])) == [False]


def test_large_requests_are_split(pool: Sidecar, made: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import kvcachepool.sglang as module

    host = sglang.mha_host("page_first")
    backend = made(host)
    monkeypatch.setattr(module, "_BATCH_BYTES", 2 * backend._pools["kv"].nbytes + 1)
    keys = ["a", "b", "c", "d", "e"]
    pages = sglang.filled(host, [0, 1, 2, 3, 4])
    stored(backend, keys, pages.indices)
    sglang.wiped(host)
    assert backend.batch_get_v1([*keys, "f"], sglang.at(host, [8, 7, 6, 5, 4, 3])) == [True] * 5 + [False]
    assert sglang.pages_at(host, sglang.at(host, [8, 7, 6, 5, 4])) == pages.content


def test_a_changed_slot_is_a_miss(pool: Sidecar, made: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The sidecar took the memory back while the page was copied."""
    from kvcachepool.client import Leased

    host = sglang.mha_host("page_first")
    backend = made(host)
    stored(backend, ["a", "b"], sglang.filled(host, [0, 1]).indices)
    calls = iter([True, False])
    real = Leased.read_into

    def read_into(self: Leased, buffers: Any, offset: int = 0) -> bool:
        return real(self, buffers, offset) and next(calls)

    monkeypatch.setattr(Leased, "read_into", read_into)
    assert backend.batch_get_v1(["a", "b"], sglang.at(host, [4, 5])) == [True, False]


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """The call's result, which must come within this time."""
    start = time.monotonic()
    result = call()
    assert time.monotonic() - start < seconds
    return result


def test_without_a_sidecar_everything_is_a_miss(
    volume: Path, made: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCACHEPOOL_SOCKET", str(volume / "sidecar.sock"))
    host = sglang.mha_host("page_first")
    backend = within(2, lambda: made(host, connected=False))
    indices, flat = sglang.at(host, [0]), torch.zeros(16, dtype=torch.uint8)
    assert within(2, lambda: backend.batch_exists(["a"])) == 0
    assert within(2, lambda: backend.batch_set_v1(["a"], indices)) == [False]
    assert within(2, lambda: backend.batch_get_v1(["a"], indices)) == [False]
    assert within(2, lambda: backend.batch_exists_v2(["a"], [transfer("kv", [])]).kv_hit_pages) == 0
    assert within(2, lambda: backend.batch_get_v2([transfer("kv", ["a"], indices)])) == {"kv": [False]}
    assert within(2, lambda: backend.get("a", flat)) is None
    assert not within(2, lambda: backend.set("a", flat))
    assert backend.clear()


def test_a_sidecar_that_restarts_is_used_again(pool: Sidecar, made: Callable[..., Any]) -> None:
    host = sglang.mha_host("page_first")
    backend = made(host, sglang.config(extra={"timeout_s": 5}))
    pages = sglang.filled(host, [0, 1])
    stored(backend, ["a", "b"], pages.indices)
    pool.kill_engine()
    # Memory survives the engine process.
    wait_for(lambda: backend.batch_exists(["a", "b"]) == 2, 30, "pages of the earlier engine process")
    pool.kill_tree()
    assert within(6, lambda: backend.batch_set_v1(["c"], sglang.at(host, [2]))) == [False]
    assert within(6, lambda: backend.batch_get_v1(["a"], sglang.at(host, [2]))) == [False]
    pool.start()
    wait_for(lambda: backend.batch_set_v1(["a", "b"], pages.indices) == [True, True], 30, "stores after the restart")
    wait_for(lambda: backend.batch_exists(["a", "b"]) == 2, 10, "pages readable")
    assert backend.batch_get_v1(["a", "b"], sglang.at(host, [4, 5])) == [True, True]
    assert sglang.pages_at(host, sglang.at(host, [4, 5])) == pages.content


def test_a_frozen_sidecar_delays_no_longer_than_the_timeout(pool: Sidecar, made: Callable[..., Any]) -> None:
    host = sglang.mha_host("page_first")
    backend = made(host, sglang.config(extra={"timeout_s": 0.5}))
    stored(backend, ["a"], sglang.filled(host, [0]).indices)
    pool.freeze()
    try:
        assert within(3, lambda: backend.batch_exists(["a"])) == 0
        assert within(3, lambda: backend.batch_get_v1(["a"], sglang.at(host, [1]))) == [False]
        assert within(3, lambda: backend.batch_set_v1(["b"], sglang.at(host, [1]))) == [False]
    finally:
        pool.thaw()
    wait_for(lambda: backend.batch_exists(["a"]) == 1, 20, "pages after the thaw")


@pytest.mark.parametrize(
    "bad",
    [
        {"socket": 1},
        {"namespace": None},
        {"model_id": 7},
        {"timeout_s": 0},
        {"timeout_s": "2"},
        {"timeout_s": True},
        {"trust_mm_hashes": "yes"},
    ],
)
def test_bad_settings_are_named(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        sglang.backend(sglang.mha_host("page_first"), sglang.config(extra=bad))


def test_statistics_are_those_since_the_last_call(pool: Sidecar, made: Callable[..., Any]) -> None:
    host = sglang.mha_host("page_first")
    assert made(host).get_stats() is None
    backend = made(host, sglang.config(enable_storage_metrics=True))
    stored(backend, ["a", "b"], sglang.filled(host, [0, 1]).indices)
    backend.batch_get_v1(["a", "b", "c"], sglang.at(host, [3, 4, 5]))
    stats = backend.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([2], [2])
    assert stats.backup_bandwidth[0] > 0
    assert stats.prefetch_bandwidth[0] > 0
    assert backend.get_stats().prefetch_pgs == []


def test_a_model_without_identity_is_never_stored(pool: Sidecar, made: Callable[..., Any]) -> None:
    host = sglang.mha_host("page_first")
    backend = made(host, sglang.config(extra={"model_id": ""}))
    indices = sglang.at(host, [0])
    assert backend.batch_set_v1(["a"], indices) == [False]
    assert backend.batch_exists(["a"]) == 0
    assert not backend.set("a", torch.zeros(4))
    assert pool.status()["memory"]["chunks"] == 0


# SGLang's own controller


@pytest.fixture
def controlled(pool: Sidecar) -> Iterator[Callable[..., Any]]:
    """Creates SGLang's controller over host pools, and ends its threads."""
    running: list[Any] = []

    def make(host_pool: Any, *, interface_v1: int = 1, **side_pools: Any) -> Any:
        settings = sglang.config(extra={"interface_v1": interface_v1}).extra_config
        running.append(sglang.controller(host_pool, sglang.mha_device(), settings, **side_pools))
        assert running[-1].storage_backend._client.wait_connected(20)
        return running[-1]

    yield make
    for one in running:
        one.detach_storage_backend()


def prefetched(controller: Any, tokens: list[int], extra_pools: list[Any] | None = None) -> Any:
    """Does what SGLang's scheduler does with a prompt: query, allocate, load. Returns the operation when it is done,
    with the tokens that came in `completed_tokens` and the pages of other pools in `pool_hits`.
    """
    operation = controller.prefetch(SimpleNamespace(rid="request"), tokens, extra_pools=extra_pools)
    assert controller.prefetch_hit_queue.get(timeout=20) is operation
    operation.pool_hits = {}
    if not operation.storage_hit_count:
        return operation
    operation.host_indices = controller.mem_pool_host.alloc(operation.storage_hit_count)
    controller.prefetch_buffer.put(operation)
    while True:
        ack = controller.ack_prefetch_queue.get(timeout=20)
        operation.completed_tokens = max(operation.completed_tokens, ack.completed_tokens or 0)
        operation.pool_hits |= ack.pool_hits or {}
        if ack.completed_req:
            return operation


def taken(host_pool: Any, count: int, seed: int = 1) -> sglang.Filled:
    """Allocates this many slots in a pool with random bytes."""
    indices = host_pool.alloc(count)
    content = sglang.filled(
        host_pool, [int(one) // sglang.slots(host_pool) for one in indices[:: host_pool.page_size]], seed
    )
    assert torch.equal(content.indices, indices)
    return content


TOKENS = list(range(100, 100 + 3 * sglang.PAGE))


def hashes() -> list[str]:
    """SGLang's names of the pages of `TOKENS`."""
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    return list(get_storage_hash_str(TOKENS, None, page_size=sglang.PAGE))


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
@pytest.mark.parametrize("interface_v1", [1, 0])
def test_the_controller_stores_and_loads(layout: str, interface_v1: int, controlled: Callable[..., Any]) -> None:
    host = sglang.mha_host(layout)
    writer = controlled(host, interface_v1=interface_v1)
    pages = taken(host, len(TOKENS))
    writer.write_storage(pages.indices, TOKENS, hashes())
    assert writer.ack_backup_queue.get(timeout=20).completed_tokens == len(TOKENS)
    wait_for(lambda: writer.storage_backend.batch_exists(hashes()) == 3, 10, "pages readable")

    other = sglang.mha_host(layout)
    sglang.wiped(other)
    other.alloc(sglang.PAGE)
    loaded = prefetched(controlled(other, interface_v1=interface_v1), [*TOKENS, *range(sglang.PAGE)])
    assert loaded.completed_tokens == len(TOKENS)
    assert sglang.pages_at(other, loaded.host_indices) == pages.content


def test_the_controller_stores_and_loads_several_pools(controlled: Callable[..., Any]) -> None:
    """KV, a draft model's KV in the same slots, and one state at the end of the prompt."""
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName

    def pools() -> tuple[Any, Any, Any]:
        host = sglang.mha_host("page_first")
        return host, sglang.mha_host("page_first", layer_num=1), sglang.mamba_host("page_first")

    def wanted(states: torch.Tensor) -> list[Any]:
        draft = transfer("draft", [], indices_from_pool=PoolName.KV)
        return [draft, transfer("mamba", hashes()[-1:], states, hit_policy=PoolHitPolicy.TRAILING_PAGES)]

    host, draft, mamba = pools()
    writer = controlled(host, draft=draft, mamba=mamba)
    pages, state = taken(host, len(TOKENS)), taken(mamba, 1, 2)
    drafts = sglang.filled(draft, [int(one) // sglang.PAGE for one in pages.indices[:: sglang.PAGE]], 3)
    writer.write_storage(pages.indices, TOKENS, hashes(), extra_pools=wanted(state.indices))
    assert writer.ack_backup_queue.get(timeout=20).completed_tokens == len(TOKENS)
    asked = wanted(state.indices)
    wait_for(lambda: writer.storage_backend.batch_exists_v2(hashes(), asked).kv_hit_pages == 3, 10, "pages readable")

    host, draft, mamba = pools()
    for one in (host, draft, mamba):
        sglang.wiped(one)
        one.alloc(one.page_size)
    slot = mamba.alloc(1)
    loaded = prefetched(controlled(host, draft=draft, mamba=mamba), TOKENS, wanted(slot))
    assert loaded.completed_tokens == len(TOKENS)
    assert loaded.pool_hits["mamba"] == 1
    assert sglang.pages_at(host, loaded.host_indices) == pages.content
    assert sglang.pages_at(draft, loaded.host_indices) == drafts.content
    assert sglang.pages_at(mamba, slot) == state.content


def test_the_controller_goes_on_without_a_sidecar(controlled: Callable[..., Any], pool: Sidecar) -> None:
    host = sglang.mha_host("page_first")
    controller = controlled(host)
    pool.kill_tree()
    loaded = prefetched(controller, TOKENS)
    assert (loaded.storage_hit_count, loaded.completed_tokens) == (0, 0)
    controller.write_storage(host.alloc(len(TOKENS)), TOKENS, hashes())
    assert controller.ack_backup_queue.get(timeout=20).completed_tokens == 0
    assert {thread.is_alive() for thread in (controller.prefetch_thread, controller.backup_thread)} == {True}
    assert controller.clear_storage_backend()


def test_calls_from_several_threads(pool: Sidecar, made: Callable[..., Any]) -> None:
    """SGLang's threads for prefetch and backup use one backend at the same time."""
    host = sglang.mha_host("page_first")
    backend = made(host, sglang.config(extra={"timeout_s": 20}))
    failures: list[str] = []
    pages = sglang.filled(host, list(range(8)))

    def work(number: int) -> None:
        keys = [f"{number}-{page}" for page in range(2)]
        mine = pages.indices[2 * number * sglang.PAGE : (2 * number + 2) * sglang.PAGE]
        for _ in range(20):
            if backend.batch_set_v1(keys, mine) != [True, True]:
                failures.append(f"{number} was not stored")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    keys = [f"{number}-{page}" for number in range(4) for page in range(2)]
    wait_for(lambda: backend.batch_exists(keys) == 8, 10, "pages readable")
    assert backend.batch_get_v1(keys, sglang.at(host, list(range(8, 16)))) == [True] * 8
    assert sglang.pages_at(host, sglang.at(host, list(range(8, 16)))) == pages.content

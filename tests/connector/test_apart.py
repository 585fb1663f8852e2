"""Prompts that must not share KV never use the same key: adapters, tags, salts, images, embeddings, sessions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

import torch
from engine_loop import Loop, prompt
from hanging_disk import HangingDisk
from scripted_pool import ScriptedPool
from steps import connected, reports
from stub_sidecar import Received
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from kvcachepool import provenance
from kvcachepool.wire import Op
from servers.waiting import wait_for

Make = Callable[..., Loop]
TOKENS = prompt(256, 7)


def keys_of(pool: ScriptedPool, name: str) -> set[tuple[bytes, bytes]]:
    """(namespace, hash) of everything that a request loads and stores."""
    wait_for(pool.processed_all, 10, "all frames processed")
    frames = [f for op in (Op.PROBE, Op.GRANT) for f in pool.frames(op) if f.body["request"] == name]
    return {key for frame in frames for key in pool.keys(frame)}


def image(identifier: str, at: int = 10) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=None, modality="image", identifier=identifier, mm_position=PlaceholderRange(offset=at, length=20)
    )


def adapter(folder: Path, content: bytes, number: int = 1, in_place: bool = False) -> LoRARequest:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_bytes(b"{}")
    (folder / "adapter_model.safetensors").write_bytes(content)
    return LoRARequest("a", number, str(folder), load_inplace=in_place)


def hashed(engine: Loop, lora: LoRARequest, since_s: float = 0.0) -> None:
    """Waits until the adapter's content is known for uses that began then."""
    scheduler = engine.connector._scheduler
    assert scheduler is not None
    wait_for(lambda: scheduler._namespaces.hashes.get(lora.lora_path, lora.lora_int_id, since_s), 10, "content hash")


@pytest.fixture(autouse=True)
def front_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's front process, which proves the names of items."""
    monkeypatch.setenv(provenance.VARIABLE, "0" * 32)
    monkeypatch.setattr(provenance, "_given", provenance.Given())


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({}, {"cache_salt": "x"}),
        ({"cache_salt": "x"}, {"cache_salt": "y"}),
        ({}, {"params": {"kvcachepool.tags": "tenant"}}),
        ({"params": {"kvcachepool.tags": ["a", "b"]}}, {"params": {"kvcachepool.tags": ["ab"]}}),
        ({"params": {"kvcachepool.tags": {"tenant": "a"}}}, {"params": {"kvcachepool.tags": {"tenant": "b"}}}),
        ({}, {"params": {"lmcache.tag.tenant": "a"}}),
        ({"params": {"lmcache.tag.tenant": "a"}}, {"params": {"lmcache.tag.app": "a"}}),
        ({"params": {"kvcachepool.tags": "a"}}, {"params": {"kvcachepool.tags": "a", "lmcache.tag.tenant": "a"}}),
        ({"mm_features": [image("a" * 64)]}, {"mm_features": [image("b" * 64)]}),
        ({"mm_features": [image("a" * 64)]}, {"mm_features": [image("a" * 64, 11)]}),
        (
            {"mm_features": [image("a" * 64)], "cache_salt": "x"},
            {"mm_features": [image("a" * 64)], "cache_salt": "x", "proven": False},
        ),
    ],
)
def test_no_key_is_shared(scripted: ScriptedPool, loop: Make, one: dict[str, Any], two: dict[str, Any]) -> None:
    engine = connected(loop())
    engine.generate("one", TOKENS, **one)
    engine.forget_local()
    assert engine.generate("two", TOKENS, **two) == 0
    engine.drain()
    assert keys_of(scripted, "one")
    assert keys_of(scripted, "two")
    assert not keys_of(scripted, "one") & keys_of(scripted, "two")


@pytest.mark.parametrize(
    "same",
    [
        {"cache_salt": "x"},
        {"params": {"kvcachepool.tags": {"tenant": "a", "app": "b"}}},
        {"params": {"lmcache.tag.tenant": "a", "lmcache.tag.app": 1}},
        {"mm_features": [image("a" * 64)]},
        {"mm_features": [image("named by a user")], "cache_salt": "x"},
        {"mm_features": [image("named by a user")], "cache_salt": "x", "params": {"kvcachepool.tags": "tenant"}},
    ],
)
def test_equal_prompts_in_one_namespace_share(scripted: ScriptedPool, loop: Make, same: dict[str, Any]) -> None:
    engine = connected(loop())
    engine.generate("one", TOKENS, **same)
    engine.forget_local()
    assert engine.generate("two", TOKENS, **same) == 256


@pytest.mark.parametrize("params", [{"kvcachepool.tags": 42}, {"lmcache.tag.tenant": ["a"]}])
def test_invalid_tags_share_nothing(scripted: ScriptedPool, loop: Make, params: dict[str, Any]) -> None:
    engine = connected(loop())
    engine.generate("one", TOKENS)
    engine.forget_local()
    assert engine.generate("two", TOKENS, params=params) == 0
    engine.drain()
    assert not keys_of(scripted, "two")
    wait_for(lambda: reports(scripted, "miss_tokens").get("invalid_tags", 0) > 0, 10, "the miss by its reason")


def test_a_namespace_records_whether_other_processes_can_name_it(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    tagged = [{"kvcachepool.tags": f"tenant {number}"} for number in range(4)]
    for life in ("shared", "alone"):
        names = [f"{life} {number}" for number in range(len(tagged))]
        for name, params in zip(names, tagged, strict=True):
            engine.generate(name, TOKENS, params=params)
        spaces = {space for name in names for space, _ in keys_of(scripted, name)}
        assert [space[-1] & 1 for space in spaces] == [life == "alone"] * len(tagged)
        engine.connector.reset_cache()
    engine.generate("plain", TOKENS)
    assert {space[-1] & 1 for space, _ in keys_of(scripted, "plain")} == {1}


@pytest.mark.parametrize("params", [{}, {"kvcachepool.tags": "tenant"}])
@pytest.mark.parametrize("name", ["my-image-1", "c" * 64])
def test_an_image_that_a_user_named_is_not_cached(
    scripted: ScriptedPool, loop: Make, name: str, params: dict[str, Any]
) -> None:
    """Everyone may send any tags."""
    engine = connected(loop())
    engine.generate("one", TOKENS, mm_features=[image(name)], proven=False, params=params)
    engine.drain()
    assert not keys_of(scripted, "one")
    wait_for(lambda: reports(scripted, "miss_tokens") == {"multimodal_named_by_user": 256}, 10, "counted")


@pytest.mark.parametrize("reason", ["invalid_tags", "lora_content_unknown"])
def test_a_name_in_a_request_that_is_not_cached_for_another_reason_is_remembered(
    scripted: ScriptedPool, loop: Make, tmp_path: Path, reason: str
) -> None:
    """vLLM's own prefix cache holds the item under this name."""
    engine = connected(loop())
    why: dict[str, Any] = {"params": {"kvcachepool.tags": 42}}
    if reason == "lora_content_unknown":
        why = {"lora_request": LoRARequest("a", 1, str(tmp_path / "absent"))}
    engine.generate("one", TOKENS, mm_features=[image("d" * 64)], proven=False, **why)
    wait_for(lambda: reports(scripted, "miss_tokens") == {reason: 256}, 10, "counted")
    engine.generate("later", TOKENS, mm_features=[image("d" * 64)])
    engine.drain()
    assert not keys_of(scripted, "later")


def test_a_session_with_an_image_named_by_a_user_stores_nothing_more(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    request = engine.add("session", prompt(300, 1), output=3, resumable=True)
    engine.until(lambda: request.status.name == "WAITING_FOR_STREAMING_REQ", what="session waits for input")
    engine.drain()
    before = keys_of(scripted, "session")
    assert before
    update = engine.request(
        "session", prompt(600, 2), output=3, resumable=True, mm_features=[image("d" * 64)], proven=False
    )
    engine.connector.arrive(update)
    engine.scheduler.add_request(update)
    engine.until(lambda: request.status.name == "WAITING_FOR_STREAMING_REQ", what="session waits again")
    engine.abort("session")
    engine.drain()
    assert keys_of(scripted, "session") == before
    engine.generate("later", TOKENS, mm_features=[image("d" * 64)])
    assert not keys_of(scripted, "later"), "vLLM may hold what the user sent under this name"


@pytest.mark.parametrize("late", [False, True])
def test_nothing_is_stored_of_an_image_whose_name_a_user_gives_meanwhile(
    scripted: ScriptedPool, loop: Make, late: bool
) -> None:
    """vLLM may have computed what the user sent, under this name."""
    engine = connected(loop(step_tokens=64))
    engine.add("waits", prompt(1024, 7), mm_features=[image("a" * 64, 800)])
    if late:
        engine.until(lambda: scripted.frames(Op.GRANT), what="the first chunk is requested")
    computed = engine.requests["waits"].num_computed_tokens
    assert computed < 512
    refused = {"params": {"kvcachepool.tags": 1}}
    engine.connector.arrive(engine.request("a user's", TOKENS, mm_features=[image("a" * 64)], proven=False, **refused))
    engine.run("waits")
    engine.drain()
    wait_for(scripted.processed_all, 10, "all frames processed")
    requested = [chunk for frame in scripted.frames(Op.GRANT) for chunk in frame.body["chunks"]]
    assert max((chunk["first_token"] + chunk["tokens"] for chunk in requested), default=0) <= computed


def test_a_session_with_a_salt_stores_all_chunks_again_once_a_user_names_an_image(
    scripted: ScriptedPool, loop: Make
) -> None:
    engine = connected(loop())
    request = engine.add("session", prompt(256, 1), output=3, resumable=True, cache_salt="x")
    engine.until(lambda: request.status.name == "WAITING_FOR_STREAMING_REQ", what="session waits for input")
    engine.drain()
    before = keys_of(scripted, "session")
    update = engine.request(
        "session",
        prompt(600, 2),
        output=3,
        resumable=True,
        cache_salt="x",
        mm_features=[image("d" * 64)],
        proven=False,
    )
    engine.connector.arrive(update)
    engine.scheduler.add_request(update)
    engine.until(lambda: request.status.name == "WAITING_FOR_STREAMING_REQ", what="session waits again")
    engine.abort("session")
    engine.drain()
    after = keys_of(scripted, "session") - before
    assert len({space for space, _ in before | after}) == 2
    assert {first for _, first in before} < {found for _, found in after}


def test_an_adapter_is_uncached_until_its_content_is_known(scripted: ScriptedPool, loop: Make, tmp_path: Path) -> None:
    engine = connected(loop())
    one = adapter(tmp_path / "one", b"first")
    engine.generate("early", TOKENS, lora_request=one)
    hashed(engine, one)
    engine.forget_local()
    engine.generate("one", TOKENS, lora_request=one)
    engine.forget_local()
    assert engine.generate("again", TOKENS, lora_request=one) == 256
    engine.forget_local()
    engine.generate("plain", TOKENS)
    engine.drain()
    assert not keys_of(scripted, "one") & keys_of(scripted, "plain")


def test_a_hanging_file_system_delays_no_hook_and_its_adapter_is_uncached(
    scripted: ScriptedPool, loop: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = connected(loop())
    one = adapter(tmp_path / "one", b"first")
    hashed(engine, one)
    engine.add_adapter(one)
    disk = HangingDisk(monkeypatch, tmp_path / "one")
    disk.answers.clear()
    engine.add("slow", TOKENS, lora_request=one)
    engine.connector.adapter_loaded(one)
    engine.generate("plain", prompt(256, 8))
    assert engine.external["plain"] == 0
    engine.run("slow")
    engine.forget_local()
    assert not keys_of(scripted, "slow")
    assert keys_of(scripted, "plain")
    wait_for(lambda: reports(scripted, "miss_tokens").get("lora_content_unknown") == 256, 10, "counted")
    assert set(disk.callers) == {"kvcachepool-lora-check"}
    disk.answers.set()
    hashed(engine, one, time.monotonic())
    engine.generate("cold", TOKENS, lora_request=one)
    engine.forget_local()
    assert engine.generate("warm", TOKENS, lora_request=one) == 256
    disk.answers.clear()
    engine.add("last", TOKENS, lora_request=one)
    engine.connector.shutdown()
    disk.answers.set()


def test_the_early_probe_is_sent_once_the_adapter_is_known(scripted: ScriptedPool, loop: Make, tmp_path: Path) -> None:
    engine = connected(loop())
    one = adapter(tmp_path / "one", b"first")
    hashed(engine, one)
    engine.generate("first", TOKENS, lora_request=one)
    engine.connector.arrive(engine.request("early", TOKENS, lora_request=one))
    scripted.wait_for(lambda frames: [f for f in frames if f.op == Op.PROBE and f.body["request"] == "early"])


def test_another_adapter_with_the_same_name_and_path_shares_nothing(
    scripted: ScriptedPool, loop: Make, tmp_path: Path
) -> None:
    def run(name: str, content: bytes) -> None:
        engine = connected(loop(engine_id=name))
        request = adapter(tmp_path / "adapter", content)
        hashed(engine, request)
        engine.generate(name, TOKENS, lora_request=request)
        engine.drain()

    run("one", b"first")
    run("two", b"second")
    assert keys_of(scripted, "one")
    assert not keys_of(scripted, "one") & keys_of(scripted, "two")


def test_an_adapter_that_is_loaded_in_place_is_not_cached(scripted: ScriptedPool, loop: Make, tmp_path: Path) -> None:
    engine = connected(loop())
    one = adapter(tmp_path / "one", b"first")
    hashed(engine, one)
    engine.generate("before", TOKENS, lora_request=one)
    engine.forget_local()
    stored = set(scripted.chunks)
    assert stored
    two = adapter(tmp_path / "two", b"second", in_place=True)
    for name, lora in (("after", two), ("under the id's first path", one)):
        assert engine.generate(name, TOKENS, lora_request=lora) == 0
        # Only the pool is checked here: vLLM 0.30's own prefix cache identifies adapters by name alone.
        engine.forget_local()
        assert not keys_of(scripted, name)
    assert set(scripted.chunks) == stored
    wait_for(lambda: reports(scripted, "miss_tokens").get("lora_loaded_in_place") == 2 * 256, 10, "counted")


def test_an_id_of_two_adapters_is_not_cached_any_more(scripted: ScriptedPool, loop: Make, tmp_path: Path) -> None:
    """vLLM computes with the first one, whatever the request says."""
    engine = connected(loop())
    one, other = adapter(tmp_path / "one", b"first"), adapter(tmp_path / "other", b"second")
    for each in (one, other):
        hashed(engine, each)
    engine.generate("one", TOKENS, lora_request=one)
    engine.drain()
    assert keys_of(scripted, "one")
    for name, each in (("other", other), ("again", one)):
        engine.generate(name, prompt(256, 9), lora_request=each)
        engine.drain()
        assert not keys_of(scripted, name)


def test_requests_whose_adapter_is_replaced_store_nothing_more(
    scripted: ScriptedPool, loop: Make, tmp_path: Path
) -> None:
    engine = connected(loop(step_tokens=64))
    one = adapter(tmp_path / "one", b"first")
    hashed(engine, one)
    request = engine.add("running", prompt(2048, 7), lora_request=one)
    scheduler = engine.connector._scheduler
    assert scheduler is not None
    # Open until it is answered, which may be before this check.
    engine.until(lambda: scheduler._stores._open or scripted.frames(Op.GRANT), what="the first chunk is requested")
    wait_for(lambda: not scheduler._stores._open, 10, "the first chunk is granted")
    engine.step()
    wait_for(lambda: scripted.chunks, 10, "the first chunk is stored")
    engine.connector.adapter_loaded(adapter(tmp_path / "two", b"second", in_place=True))
    computed = request.num_computed_tokens
    assert computed < 2000
    engine.run("running")
    engine.drain()
    requested = [chunk for frame in scripted.frames(Op.GRANT) for chunk in frame.body["chunks"]]
    assert max(chunk["first_token"] + chunk["tokens"] for chunk in requested) <= computed
    engine.forget_local()
    again = LoRARequest("a", 2, one.lora_path)
    hashed(engine, again)
    engine.generate("another id", TOKENS, lora_request=again)
    engine.drain()
    assert not keys_of(scripted, "another id"), "vLLM's own cache may hold blocks of both under this name and path"


def test_an_adapter_with_changed_files_is_not_cached(scripted: ScriptedPool, loop: Make, tmp_path: Path) -> None:
    engine = connected(loop())
    one = adapter(tmp_path / "one", b"first")
    hashed(engine, one)
    engine.generate("one", TOKENS, lora_request=one)
    two = adapter(tmp_path / "one", b"second", number=2)
    hashed(engine, two)
    assert engine.generate("two", TOKENS, lora_request=two) == 0
    engine.drain()
    assert not keys_of(scripted, "two"), "vLLM's own cache finds blocks of the first by name and path"


def checking(engine: Loop) -> Loop:
    """A connected engine that compares the KV of adapters with their content."""
    engine.checks_adapters = True
    return connected(engine)


def committed(pool: ScriptedPool) -> bool:
    wait_for(pool.processed_all, 10, "all frames processed")
    return bool(pool.chunks)


def test_the_kv_of_an_adapter_whose_files_change_before_vllm_reads_them_is_not_stored(
    scripted: ScriptedPool, loop: Make, tmp_path: Path
) -> None:
    engine = checking(loop())
    one = adapter(tmp_path / "one", b"first")
    hashed(engine, one)
    request = engine.request("one", TOKENS, lora_request=one)
    engine.connector.arrive(request)
    hashed(engine, one, time.monotonic())
    engine.add("one", TOKENS, early=False, lora_request=one)
    scheduler = engine.connector._scheduler
    assert scheduler is not None
    adapter(tmp_path / "one", b"second")
    engine.run("one")
    engine.drain()
    assert keys_of(scripted, "one"), "slots were requested, because the scheduler side does not know of the change"
    assert not committed(scripted)
    engine.generate("later", prompt(256, 8), lora_request=one)
    engine.drain()
    assert not keys_of(scripted, "later")
    wait_for(lambda: reports(scripted, "miss_tokens").get("lora_content_changed") == 256, 10, "counted")


def test_no_kv_is_loaded_for_an_adapter_whose_files_change_before_vllm_reads_them(
    scripted: ScriptedPool, loop: Make, tmp_path: Path
) -> None:
    def start(name: str) -> Loop:
        return checking(loop(engine_id=name))

    engine = start("one")
    one = adapter(tmp_path / "one", b"first")
    hashed(engine, one)
    engine.generate("stores", TOKENS, lora_request=one)
    engine.drain()
    assert committed(scripted)
    engine = start("two")
    hashed(engine, one)
    engine.add_adapter(one)
    assert engine.generate("loads", TOKENS, lora_request=one) == 256
    for name, loaded_first in (("three", True), ("four", False)):
        engine = start(name)
        one = adapter(tmp_path / "one", b"first")
        hashed(engine, one)
        request = engine.request(name, TOKENS, lora_request=one)
        engine.connector.arrive(request)
        hashed(engine, one, time.monotonic())
        adapter(tmp_path / "one", b"second")
        if loaded_first:
            engine.add_adapter(one)
        assert engine.generate(name, TOKENS, early=False, lora_request=one) == 0
        engine.drain()


def test_an_adapter_that_was_read_before_its_files_were_hashed_is_not_cached(
    scripted: ScriptedPool, loop: Make, tmp_path: Path
) -> None:
    engine = checking(loop(engine_id="one"))
    one = adapter(tmp_path / "one", b"second")
    hashed(engine, one)
    engine.generate("stores", TOKENS, lora_request=one)
    engine.drain()
    stored = set(scripted.chunks)
    engine = checking(loop(engine_id="two"))
    scheduler = engine.connector._scheduler
    assert scheduler is not None
    go_on = threading.Event()
    scheduler._namespaces.hashes._reader.submit(lambda: go_on.wait(10) and None)
    one = adapter(tmp_path / "one", b"first")
    engine.add_adapter(one)
    content = (tmp_path / "one" / "adapter_model.safetensors").stat()
    adapter(tmp_path / "one", b"second")
    assert (tmp_path / "one" / "adapter_model.safetensors").stat() != content
    go_on.set()
    hashed(engine, one)
    assert engine.generate("hit", TOKENS, lora_request=one) == 0, "the pool has KV of the second"
    engine.drain()
    for seed in (8, 9):
        engine.generate(f"store {seed}", prompt(256, seed), lora_request=one)
        engine.drain()
    wait_for(scripted.processed_all, 10, "all frames processed")
    assert set(scripted.chunks) == stored


def test_an_adapter_that_vllm_reads_again_with_other_content_is_not_cached(
    scripted: ScriptedPool, loop: Make, tmp_path: Path
) -> None:
    engine = connected(loop())
    one = adapter(tmp_path / "one", b"first")
    hashed(engine, one)
    engine.generate("one", TOKENS, lora_request=one)
    engine.forget_local()
    stored = set(scripted.chunks)
    assert stored
    engine.load_adapter(one)
    assert engine.generate("same", TOKENS, lora_request=one) == 256
    engine.drain()
    adapter(tmp_path / "one", b"second")
    engine.load_adapter(one)
    adapter(tmp_path / "one", b"first")
    engine.generate("plain", prompt(256, 8))
    engine.drain()
    wait_for(scripted.processed_all, 10, "all frames processed")
    stored = set(scripted.chunks)
    assert engine.generate("again", TOKENS, lora_request=one) == 0
    engine.drain()
    two = LoRARequest("a", 2, one.lora_path)
    hashed(engine, two)
    engine.generate("another id", prompt(256, 9), lora_request=two)
    engine.drain()
    assert not keys_of(scripted, "again") | keys_of(scripted, "another id")
    assert set(scripted.chunks) == stored


def test_a_load_fails_if_vllm_reads_other_files_of_its_adapter_before_it_is_reported(
    scripted: ScriptedPool, loop: Make, tmp_path: Path
) -> None:
    engine = checking(loop())
    one = adapter(tmp_path / "one", b"first")
    hashed(engine, one)
    engine.generate("one", TOKENS, lora_request=one)
    engine.forget_local()
    engine.hold_results = True
    engine.add("loading", TOKENS, lora_request=one)
    worker = engine.worker._worker
    assert worker is not None
    engine.until(lambda: worker._ended_loads, what="the copy's end")
    adapter(tmp_path / "one", b"second")
    engine.load_adapter(one)
    engine.hold_results = False
    engine.run("loading")
    assert engine.external["loading"] == 0


def test_no_kv_is_loaded_for_an_adapter_that_is_replaced_after_the_hit_was_promised(
    scripted: ScriptedPool, loop: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The input thread announces the replacement while vLLM allocates blocks."""
    engine = connected(loop())
    one = adapter(tmp_path / "one", b"first")
    hashed(engine, one)
    engine.generate("one", TOKENS, lora_request=one)
    engine.forget_local()
    allocated = engine.connector.update_state_after_alloc

    def replaced(*arguments: Any) -> None:
        engine.connector.adapter_loaded(adapter(tmp_path / "one", b"first", in_place=True))
        allocated(*arguments)

    monkeypatch.setattr(engine.connector, "update_state_after_alloc", replaced)
    assert engine.generate("promised", TOKENS, lora_request=one) == 0


@pytest.mark.parametrize("elsewhere", [False, True])
def test_adapters_are_uncached_in_a_vllm_whose_loads_are_not_seen(
    elsewhere: bool, scripted: ScriptedPool, loop: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if elsewhere:  # vLLM 0.31 then reads other files than those of the path
        monkeypatch.setattr(LoRARequest, "tensorizer_config_dict", {"tensorizer_dir": "s3://b"}, raising=False)
    else:
        monkeypatch.delattr(WorkerLoRAManager, "_load_adapter")
    engine = loop(lora=True)
    connected(engine)
    one = adapter(tmp_path / "one", b"first")
    engine.generate("one", TOKENS, lora_request=one)
    engine.drain()
    assert not keys_of(scripted, "one")
    wait_for(lambda: reports(scripted, "miss_tokens").get("lora_reads_unseen") == 256, 10, "counted")


def test_prompt_embeddings_of_one_length_share_nothing(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    one, two = torch.randn(256, 8), torch.randn(256, 8)
    engine.generate("one", [], prompt_embeds=one)
    engine.forget_local()
    assert engine.generate("two", [], prompt_embeds=two) == 0
    engine.forget_local()
    assert engine.generate("one again", [], prompt_embeds=one) == 256
    assert not keys_of(scripted, "one") & keys_of(scripted, "two")


def test_a_session_that_edits_its_tokens_stores_under_the_new_tokens(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    first, more = prompt(100, 1), prompt(150, 2)
    request = engine.add("session", first, output=3, resumable=True)
    engine.until(lambda: request.status.name == "WAITING_FOR_STREAMING_REQ", what="session waits for input")
    update = engine.request("session", more, output=3, resumable=True)
    engine.scheduler.add_request(update)
    engine.until(lambda: request.status.name == "WAITING_FOR_STREAMING_REQ", what="session waits again")
    whole = list(request.prompt_token_ids or [])
    assert len(whole) > 250
    engine.drain()
    engine.abort("session")
    engine.forget_local()
    assert engine.generate("whole", whole) >= 192, "and what is loaded is right"


def test_the_tail_of_a_sessions_new_prompt_is_stored_while_that_of_the_old_one_is_unanswered(
    scripted: ScriptedPool, loop: Make
) -> None:
    engine = connected(loop(step_tokens=64))
    late: list[Received] = []

    def tail_waits(frame: Received) -> bool:
        if not late and frame.body["chunks"][-1]["tokens"] < 64:
            late.append(frame)
        return bool(late) and frame is late[0]

    scripted.on_grant = tail_waits
    request = engine.add("session", prompt(100, 1), output=3, resumable=True)
    engine.until(lambda: request.status.name == "WAITING_FOR_STREAMING_REQ", what="session waits for input")
    scripted.wait_for(lambda frames: late)
    engine.scheduler.add_request(engine.request("session", prompt(300, 2), output=3, resumable=True))
    engine.step()
    scheduler = engine.connector._scheduler
    assert scheduler is not None
    scripted.late(late[0], scripted.grants(late[0]))
    wait_for(lambda: late[0].tag not in scheduler._stores._open, 10, "the old tail is answered")
    engine.until(lambda: request.status.name == "WAITING_FOR_STREAMING_REQ", what="session waits again")
    engine.drain()
    whole = request.num_prompt_tokens
    requested = [(c["first_token"], c["tokens"]) for f in scripted.frames(Op.GRANT) for c in f.body["chunks"]]
    assert (whole // 64 * 64, whole % 64 // 16 * 16) in requested


def test_random_hash_roots_are_reported(scripted: ScriptedPool, loop: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core import kv_cache_utils

    engine = connected(loop())
    engine.generate("one", TOKENS)
    hashing = next(f.body["hashing"] for f in scripted.frames(Op.REGISTER) if f.body.get("hashing"))
    assert hashing["algorithm"].startswith("sha256/py3.")
    assert hashing["root"] == kv_cache_utils.NONE_HASH.hex()
    assert hashing["block_tokens"] == 16
    assert not hashing.get("random_root", False)
    from kvcachepool import keys

    monkeypatch.delattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    hashing = keys.hashing("sha256_cbor", 16)
    assert hashing is not None
    assert hashing.random_root
    assert hashing.algorithm == "sha256_cbor"

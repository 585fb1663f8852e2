"""The connector beside a transport between prefill and decode: vLLM's own code chooses one layout for both."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from engine_loop import Loop, prompt
from peer import REMOTE, Peer
from scripted_pool import ScriptedPool
from steps import connected, reports
from test_plugin import engine_args, platform, transfer
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends import utils as backends
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvcachepool import layout, place, plugin, preflight
from kvcachepool.connector import KVCachePoolConnector
from kvcachepool.metrics import CacheStats
from kvcachepool.wire import Op
from servers import models
from servers.waiting import wait_for

Make = Callable[..., Loop]

#: What vLLM's attention backends for NVIDIA GPUs support, most preferred first: most of them all layouts, FlashInfer on
#: Blackwell two, FlexAttention one.
SUPPORTED = {
    "any": [one.name for one in backends._DEFAULT_LAYOUT_PREFERENCE],
    "trtllm": ["LBHNC", "BLHNC"],
    "flex": ["LBNHC"],
}


@pytest.fixture
def composing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The plugin of a pool with `existingConnector: Compose`, and the reported reasons."""
    reported: list[str] = []
    monkeypatch.setattr(plugin, "report_off", reported.append)
    monkeypatch.setattr(place, "settings", lambda: {"existingConnector": "Compose"})
    original = EngineArgs.create_engine_config
    plugin.register()
    yield reported
    EngineArgs.create_engine_config = original
    delattr(EngineArgs, "_kvcachepool_original")


class StandIn(KVConnectorBase_V1):
    """A fake of a connector that cannot be imported here. It has no preferred layout."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        raise NotImplementedError


def importable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs a fake if vLLM's module cannot be imported here."""
    try:
        KVConnectorFactory.get_connector_class_by_name(name)
    except ImportError:
        assert name == "MoRIIOConnector", f"{name} can no longer be imported here"
        monkeypatch.setitem(KVConnectorFactory._registry, name, lambda: StandIn)


def resolved(config: Any, supported: str) -> KVCacheLayout:
    """The layout that EngineCore chooses."""
    config.cache_config.kv_cache_layout = None
    return backends.resolve_kv_cache_layout(config, [SUPPORTED[supported]])


def multi(*children: dict[str, Any]) -> Any:
    return transfer("MultiConnector", kv_connector_extra_config={"connectors": list(children)})


def child(name: str) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both"}


OWN_CONFIG = child(preflight.CONNECTOR) | {
    "kv_connector_module_path": preflight.MODULE,
    "kv_load_failure_policy": "recompute",
}
WAYS = {
    "alone": lambda name: transfer(name),
    "in a MultiConnector": lambda name: multi(child(name)),
    "with this connector by the user": lambda name: multi(child(name), dict(OWN_CONFIG)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", ["tiny", "mla"])
@pytest.mark.parametrize("name", sorted(preflight.TRANSPORTS))
def test_a_transport_keeps_its_own_layout(
    composing: list[str], monkeypatch: pytest.MonkeyPatch, name: str, model: str, way: str
) -> None:
    importable(name, monkeypatch)
    given = {"model": str(models.model(model)), "kv_transfer_config": WAYS[way](name)}
    # The models are configured for CPUs, where MLA is refused for another reason.
    monkeypatch.setattr(plugin, "model_refusal", lambda config: None)
    composed = engine_args(**given).create_engine_config()
    monkeypatch.setenv("KVCACHEPOOL_DISABLE", "1")
    without = engine_args(**given | {"kv_transfer_config": transfer(name)}).create_engine_config()
    assert composing == ["Disabled"]
    children = composed.kv_transfer_config.kv_connector_extra_config["connectors"]
    assert [one["kv_connector"] for one in children] == [name, "KVCachePoolConnector"]
    platform(monkeypatch, "cuda", "cuda")
    for supported in SUPPORTED:
        chosen = resolved(composed, supported)
        assert chosen == resolved(without, supported)
        kind = "MLAAttentionSpec" if model == "mla" else "FullAttentionSpec"
        served = [row for row in layout.table()["backends"].values() if "cuda" in row["devices"]]
        assert all(chosen.name in row["layouts"] for row in served if kind in row["specs"] and len(row["layouts"]) > 1)


def test_alone_the_connector_requests_the_block_major_layout(
    composing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine_args().create_engine_config()
    assert config.kv_transfer_config.kv_connector == "KVCachePoolConnector"
    platform(monkeypatch, "cuda", "cuda")
    assert resolved(config, "any") == KVCacheLayout.BLHNC
    assert resolved(config, "flex") == KVCacheLayout.LBNHC


def stats_of(config: Any) -> Any:
    """The stats that a MultiConnector takes from this connector after a step, for vLLM's front process."""
    own = object.__new__(KVCachePoolConnector)
    own._vllm_config = SimpleNamespace(kv_transfer_config=config)
    own._failures = {}
    own._scheduler = SimpleNamespace(stats=lambda: CacheStats(data={"hits": 1}), counters=None)
    both = object.__new__(MultiConnector)
    both._connectors = [own]
    return both.get_kv_connector_stats()


def test_a_multiconnector_gets_no_stats(composing: list[str]) -> None:
    config = engine_args(kv_transfer_config=transfer("NixlConnector")).create_engine_config().kv_transfer_config
    own = KVTransferConfig(**config.kv_connector_extra_config["connectors"][1])
    assert stats_of(own) is None
    unknown = stats_of(transfer("KVCachePoolConnector"))
    with pytest.raises(ValueError, match="not registered"):
        MultiConnector.build_kv_connector_stats({name: one.data for name, one in unknown.data.items()})


def test_a_transport_that_cannot_be_imported_fails_as_without_the_plugin(
    composing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM imports it when it creates the config, so the error is the user's own."""
    missing = ModuleType("nowhere")
    monkeypatch.setitem(sys.modules, "nowhere", missing)
    given = transfer("NixlConnector", kv_connector_module_path="nowhere")
    with pytest.raises(AttributeError, match="NixlConnector not found in nowhere"):
        engine_args(kv_transfer_config=given).create_engine_config()


def decoding(loop: Make, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Loop:
    """A decode pod: the connector beside a transport."""
    engine = connected(loop(peer=Peer, **options))
    monkeypatch.setattr(Peer, "engine", engine)
    return engine


def test_a_pod_that_computes_beside_a_transport_stores_and_loads(
    scripted: ScriptedPool, loop: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = decoding(loop, monkeypatch)
    tokens = prompt(512, 1)
    engine.generate("cold", tokens)
    engine.generate("behind", tokens + prompt(256, 2))
    engine.forget_local()
    assert len(scripted.chunks) == 12
    assert engine.generate("warm", tokens) == 512


@pytest.mark.parametrize("length", [512, 500])
def test_kv_of_a_peer_is_not_stored(
    scripted: ScriptedPool, loop: Make, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    scripted.settings["save"] = "PromptAndDecode"
    engine = decoding(loop, monkeypatch)
    engine.generate("decode", prompt(length, 1), output=200, params=dict(REMOTE))
    engine.drain()
    assert engine.external["decode"] == length
    assert scripted.chunks == {}


def test_kv_that_a_peer_sends_unasked_is_not_stored(
    scripted: ScriptedPool, loop: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = decoding(loop, monkeypatch)
    monkeypatch.setattr(Peer, "quiet", True)
    engine.generate("decode", prompt(512, 1), output=10)
    engine.drain()
    assert scripted.chunks == {}


def test_a_request_behind_kv_of_a_peer_is_not_stored(
    scripted: ScriptedPool, loop: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = decoding(loop, monkeypatch)
    tokens = prompt(512, 1)
    engine.generate("decode", tokens, params=dict(REMOTE))
    engine.generate("behind", tokens + prompt(256, 2))
    engine.drain()
    assert scripted.chunks == {}
    engine.generate("other prompt", prompt(256, 3))
    engine.drain()
    assert len(scripted.chunks) == 4
    engine.forget_local()
    engine.generate("after", tokens + prompt(256, 2))
    engine.drain()
    assert len(scripted.chunks) == 16, "vLLM computed all of it itself"


def test_requests_behind_kv_of_a_peer_in_its_own_step_are_not_stored(
    scripted: ScriptedPool, loop: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = decoding(loop, monkeypatch)
    monkeypatch.setattr(Peer, "quiet", True)
    tokens = prompt(512, 1)
    engine.add("decode", tokens)
    engine.add("behind", tokens + prompt(1, 2))
    engine.run("decode", "behind")
    engine.drain()
    assert scripted.chunks == {}


def test_kv_that_was_computed_after_a_peer_was_lost_is_stored(
    scripted: ScriptedPool, loop: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = decoding(loop, monkeypatch)
    monkeypatch.setattr(Peer, "lost", True)
    engine.generate("decode", prompt(512, 1), params=dict(REMOTE))
    engine.drain()
    assert len(scripted.chunks) == 8


def test_a_prompt_that_a_peer_sends_is_not_looked_up(
    scripted: ScriptedPool, loop: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = decoding(loop, monkeypatch)
    tokens = prompt(512, 1)
    engine.generate("cold", tokens)
    engine.forget_local()
    probes = len(scripted.frames(Op.PROBE))
    engine.generate("decode", tokens, params=dict(REMOTE))
    assert len(scripted.frames(Op.PROBE)) == probes
    wait_for(lambda: reports(scripted, "miss_tokens").get("remote_prefill") == 512, 10, "the reason of the miss")


def test_a_prompt_whose_peer_is_lost_is_looked_up(
    scripted: ScriptedPool, loop: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = decoding(loop, monkeypatch)
    monkeypatch.setattr(Peer, "lost", True)
    tokens = prompt(512, 1)
    engine.generate("cold", tokens)
    engine.forget_local()
    engine.generate("decode", tokens, params=dict(REMOTE))
    assert len(scripted.frames(Op.PIN)) == 1


@pytest.mark.parametrize(("tokens", "looked_up"), [(640, False), (512, True)])
def test_a_prompt_of_which_a_peer_has_more_is_not_looked_up(
    scripted: ScriptedPool, loop: Make, monkeypatch: pytest.MonkeyPatch, tokens: int, looked_up: bool
) -> None:
    """A decode pod keeps the KV of a conversation for the next prefill."""
    engine = decoding(loop, monkeypatch)
    engine.generate("local", prompt(512, 1))
    engine.drain()
    probes = len(scripted.frames(Op.PROBE))
    parameters = {"do_remote_decode": True, "remote_block_ids": [[7]], "remote_num_tokens": tokens}
    engine.generate("next", prompt(512, 1) + prompt(256, 2), params=parameters)
    assert (len(scripted.frames(Op.PROBE)) > probes) == looked_up


def test_without_a_transport_its_parameters_have_no_effect(scripted: ScriptedPool, loop: Make) -> None:
    engine = connected(loop())
    engine.generate("cold", prompt(512, 1))
    engine.forget_local()
    assert engine.generate("warm", prompt(512, 1), params=dict(REMOTE)) == 512

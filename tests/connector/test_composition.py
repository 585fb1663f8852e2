"""The connector beside a transport between prefill and decode: vLLM's own code chooses one layout for both."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

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
from servers import models

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

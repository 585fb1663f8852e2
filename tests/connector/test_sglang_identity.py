"""What identifies the model of an SGLang server: contents, arguments, the environment, and when nothing does."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from identity_source import sglang_arguments, sglang_environment

from servers import paths, sglang
from servers.waiting import wait_for

if not sglang.installed():
    pytest.skip("SGLang is not installed: tools/setup.sh sglang", allow_module_level=True)

SOURCE = sglang.SITE / "sglang"


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    with sglang.importable():
        yield


def Arguments(folder: Path, **changes: Any) -> Any:
    """SGLang's own record of a server's arguments."""
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(**({"model_path": str(folder)} | changes))


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets the start of the server that creates identities from now on. Files that exist are older than that."""
    from kvcachepool import sglang_model

    def start(name: str) -> None:
        monkeypatch.setattr(sglang_model, "server_start", lambda: name)

    monkeypatch.setattr(sglang_model, "start_time", time.time)
    start("first")
    return start


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts: Callable[[str], None]) -> Path:
    """A folder with a model's files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def identity(arguments: Any, model_id: str | None = None, **options: Any) -> str | None:
    from kvcachepool.sglang_model import ModelIdentity

    found = ModelIdentity(arguments, "model", model_id, **options)
    with_weights = wait_for(lambda: found.poll() or (found._failed and "unknown"), 20, "an identity")
    return None if with_weights == "unknown" else str(with_weights)


def test_the_generation_of_the_gpus_is_identity_for_quantised_models(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvcachepool import sglang_model

    def on(capability: str, **arguments: Any) -> str | None:
        monkeypatch.setattr(sglang_model, "_device", lambda: capability)
        return identity(Arguments(model, **arguments))

    assert on("(9, 0)") == on("(10, 0)")
    assert on("(9, 0)", quantization="fp8") != on("(10, 0)", quantization="fp8")
    (model / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    assert on("(9, 0)") == on("(9, 0)") != on("(10, 0)")


def test_the_identity_is_of_contents_and_settings(model: Path) -> None:
    first = identity(Arguments(model))
    assert first is not None
    assert identity(Arguments(model)) == first
    assert identity(Arguments(model, kv_cache_dtype="fp8_e5m2")) != first
    assert identity(Arguments(model, speculative_draft_model_path=str(model))) != first
    adapters = [f"a={model}", {"lora_name": "a", "lora_path": str(model)}, SimpleNamespace(lora_path=str(model))]
    found = {
        identity(Arguments(model, lora_paths=given)) for given in [[one] for one in adapters] + [{"a": str(model)}]
    }
    assert len(found) == 1
    assert not found & {None, first}
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "rope_theta": 5}))
    second = identity(Arguments(model))
    assert second not in (None, first)
    (model / "model.safetensors").write_bytes(b"WEIGHTS")
    assert identity(Arguments(model)) not in (None, first, second)


def test_files_that_changed_after_sglang_loaded_them_identify_nothing(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from kvcachepool.sglang_model import ModelIdentity

    for arguments in (Arguments(model), Arguments(model, lora_paths=[f"a={model}"])):
        found = ModelIdentity(arguments, "model", None)
        (model / "model.safetensors").write_bytes(os.urandom(7))
        wait_for(lambda found=found: found.poll() or found._failed, 20, "an answer")
        assert (found.poll(), found._failed) == (None, True)
    assert "WeightsChangedDuringStart" in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"load_format": "dummy"},
        {"model_path": "s3://bucket/model"},
        {"model_path": "/no/such/folder"},
        {"custom_weight_loader": ["a.b"]},
        {"forward_hooks": [{}]},
        {"lora_paths": ["a=/no/such/folder"]},
    ],
)
def test_a_model_that_cannot_be_identified_needs_a_name(changes: dict[str, Any], model: Path) -> None:
    arguments = Arguments(model, **changes)
    assert identity(arguments) is None
    assert identity(None) is None
    named = identity(arguments, "revision 1")
    assert named not in (None, identity(arguments, "revision 2"))


# What keeps a server's KV to itself

Starts = Callable[[str], None]


def shared(starts: Starts, arguments: Callable[[], Any], model_id: str | None = None, **options: Any) -> bool:
    """Whether two starts of a server have one identity. Each must have one."""
    found = []
    for name in ("first", "second"):
        starts(name)
        found.append(identity(arguments(), model_id, **options))
    assert None not in found
    return found[0] == found[1]


MEDIA: list[dict[str, Any]] = [
    {"model_type": "qwen2_vl", "vision_config": {"depth": 2}},
    {"model_type": "whisper", "audio_config": {}},
    {"model_type": "omni", "thinker_config": {"vision_config": {}}},
    {"model_type": "other", "image_token_id": 7},
    {"architectures": ["LlavaLlamaForCausalLM"]},
]


@pytest.mark.parametrize("config", MEDIA)
def test_a_model_whose_images_clients_may_name_keeps_its_kv_to_itself(
    config: dict[str, Any], model: Path, starts: Starts, caplog: pytest.LogCaptureFixture
) -> None:
    (model / "config.json").write_text(json.dumps(config))
    assert not shared(starts, lambda: Arguments(model))
    assert "MediaNamedByClients" in caplog.text
    assert shared(starts, lambda: Arguments(model), trust_mm_hashes=True)


def test_a_text_model_is_shared_by_all_starts(model: Path, starts: Starts) -> None:
    assert shared(starts, lambda: Arguments(model))


def test_sglang_says_whether_requests_may_bring_images(model: Path, starts: Starts) -> None:
    """SGLang's own model config, which the server's arguments carry, wins over the file."""

    def arguments(images: bool) -> Any:
        made = Arguments(model)
        made._model_config = SimpleNamespace(is_multimodal=images)
        return made

    assert not shared(starts, lambda: arguments(True))
    assert not shared(starts, lambda: arguments(True), "revision 1")
    (model / "config.json").write_text(json.dumps(MEDIA[0]))
    assert shared(starts, lambda: arguments(False))
    assert shared(starts, lambda: arguments(False), "revision 1")
    # A model without files does not say whether it takes images.
    assert not shared(starts, lambda: Arguments(model), "revision 1")
    assert shared(starts, lambda: Arguments(model), "revision 1", trust_mm_hashes=True)


def test_the_arguments_of_a_rank_carry_sglangs_model_config() -> None:
    from sglang.srt.arg_groups.model_override_base import model_config_of

    arguments = Arguments(paths.cache() / "models" / "tiny-v1")
    model_config_of(arguments)  # SGLang's launcher does this before it starts ranks with a copy of its arguments
    assert pickle.loads(pickle.dumps(arguments))._model_config.is_multimodal is False


def unlisted(**values: Any) -> Any:
    """A record of arguments like SGLang's, with some that no table lists."""
    import msgspec

    fields = [("model_path", str), ("load_format", str, "auto"), *[(name, Any, None) for name in values]]
    return msgspec.defstruct("ServerArgs", fields)


def test_an_argument_in_no_table_keeps_the_kv_to_the_server(
    model: Path, starts: Starts, caplog: pytest.LogCaptureFixture
) -> None:
    record = unlisted(new_precision=None)
    assert shared(starts, lambda: record(str(model)))
    assert not shared(starts, lambda: record(str(model), new_precision="fp2"))
    assert not shared(starts, lambda: record(str(model), new_precision="fp2"), "revision 1", trust_mm_hashes=True)
    assert "UnknownIdentityField" in caplog.text
    assert "new_precision" in caplog.text
    # An object that does not tell its arguments from others.
    assert identity(SimpleNamespace(model_path=str(model), load_format="auto")) is None
    assert not shared(starts, lambda: None, "revision 1", trust_mm_hashes=True)


def test_a_variable_in_no_table_keeps_the_kv_to_the_server(
    model: Path, starts: Starts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SGLANG_NEW_PRECISION", "fp2")
    assert not shared(starts, lambda: Arguments(model))
    assert "SGLANG_NEW_PRECISION" in caplog.text


DECIDING: list[dict[str, Any]] = [
    {"flashinfer_mxfp4_moe_precision": "bf16"},
    {"moe_runner_backend": "triton"},
    {"fp8_gemm_runner_backend": "cutlass"},
    {"fp4_gemm_runner_backend": "cutlass"},
    {"bf16_gemm_backend": "torch"},
    {"enable_w4a4_mxfp4_megamoe": True},
    {"deepep_dispatcher_output_dtype": "bf16"},
    {"flashinfer_a2a_dispatch_type": "bf16"},
    {"enable_quant_communications": True},
    {"prefill_kv_cache_dequant_dtype": "bf16"},
    {"enable_precise_embedding_interpolation": True},
    {"mm_attention_backend": "fa3"},
    {"enable_deepseek_v4_fp4_indexer": True},
    {"rl_on_policy_target": "fsdp"},
    {"attention_backend": "triton"},
]


def test_arguments_and_variables_that_change_kv_are_identity(
    model: Path, starts: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [identity(Arguments(model)), *[identity(Arguments(model, **changes)) for changes in DECIDING]]
    for name, value in {
        "SGLANG_NVFP4_CKPT_FP8_GEMM_IN_ATTN": "1",
        "SGLANG_FP8_IGNORED_LAYERS": "lm_head",
        "SGLANG_FORCE_FP8_MARLIN": "1",
        "NVIDIA_TF32_OVERRIDE": "0",
    }.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            found.append(identity(Arguments(model)))
    # SGLang reads the old prefix too.
    with monkeypatch.context() as patch:
        patch.setenv("SGL_FORCE_FP8_MARLIN", "1")
        assert identity(Arguments(model)) == found[-2]
    assert None not in found
    assert len(set(found)) == len(found)
    assert shared(starts, lambda: Arguments(model, **DECIDING[0]))


def test_what_cannot_change_kv_is_not_identity(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = identity(Arguments(model))
    monkeypatch.setenv("SGLANG_LOG_MS", "1")
    monkeypatch.setenv("SGLANG_DISAGGREGATION_WAITING_TIMEOUT", "7")
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "")
    for service in ("SGLANG_QWEN", "SGL_ROUTER"):  # set by Kubernetes for a Service of this name
        for name in ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_80_TCP", "PORT_80_TCP_ADDR"):
            monkeypatch.setenv(f"{service}_{name}", "10.0.0.1")
    assert identity(Arguments(model, port=7, mem_fraction_static=0.5, log_level="debug", host="::")) == first


def test_weights_or_code_from_elsewhere_need_a_name(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert identity(Arguments(model, weight_cache_mode="client")) is None
    monkeypatch.setenv("SGLANG_EXTERNAL_MODEL_PACKAGE", "ours")
    assert identity(Arguments(model)) is None
    assert identity(Arguments(model), "revision 1") is not None


def test_sglangs_plugins_are_identity(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcachepool import sglang_settings

    first = identity(Arguments(model))
    monkeypatch.setattr(sglang_settings, "plugins", lambda: ["a=b:c 1.0"])
    assert identity(Arguments(model)) not in (None, first)


# The tables


def test_every_argument_and_variable_of_sglang_is_in_the_tables() -> None:
    from kvcachepool import sglang_identity as table

    known = {*table.ARGUMENTS.names(), *table.FOREIGN_ARGUMENTS}
    assert sglang_arguments(SOURCE) - known == set()
    known = {*table.ENVIRONMENT.names(), *table.FOREIGN_ENVIRONMENT}
    assert sglang_environment(SOURCE) - known == set()


def test_every_name_of_the_tables_exists_in_sglang() -> None:
    from kvcachepool import sglang_identity as table

    assert {*table.ARGUMENTS.names(), *table.FOREIGN_ARGUMENTS} - sglang_arguments(SOURCE) == set()
    variables = {*table.ENVIRONMENT.names(), *table.FOREIGN_ENVIRONMENT}
    of_libraries = {"NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"}
    assert variables - sglang_environment(SOURCE) == of_libraries


def test_each_name_is_in_one_list_and_each_reason_is_a_sentence() -> None:
    from kvcachepool import sglang_identity as table

    for fields, foreign in (
        (table.ARGUMENTS, table.FOREIGN_ARGUMENTS),
        (table.ENVIRONMENT, table.FOREIGN_ENVIRONMENT),
    ):
        listed = [*fields.identity, *(name for names in fields.irrelevant.values() for name in names), *foreign]
        assert len(listed) == len(set(listed))
        assert all(len(reason) > 10 and names for reason, names in fields.irrelevant.items())


# Files that change while the server starts


def replaced_file(model: Path) -> None:
    other = model / "other"
    other.write_bytes(b"WEIGHTS")
    os.utime(other, (1, 1))
    other.rename(model / "model.safetensors")


def replaced_config(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "rope_theta": 5}))


def replaced_link(model: Path) -> None:
    """As volumes that switch versions at once do it."""
    model.unlink()
    model.symlink_to(model.parent / "v2")


@pytest.mark.parametrize("replace", [replaced_file, replaced_config, replaced_link])
def test_files_replaced_between_the_start_and_the_backend_identify_nothing(
    replace: Callable[[Path], None], model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kvcachepool import sglang_model

    if replace is replaced_link:
        for version in ("v1", "v2"):
            (model.parent / version).mkdir()
            for file in model.iterdir():
                (model.parent / version / file.name).write_bytes(file.read_bytes())
        model.rename(model.parent / "first")
        model.symlink_to(model.parent / "v1")
    begun = time.time()
    monkeypatch.setattr(sglang_model, "start_time", lambda: begun)
    wait_for(lambda: time.time() > begun + 0.02, 5, "the file system's clock")
    replace(model)
    assert identity(Arguments(model)) is None
    assert "WeightsChangedDuringStart" in caplog.text
    monkeypatch.setattr(sglang_model, "start_time", time.time)
    assert identity(Arguments(model)) is not None


def test_without_the_start_of_the_server_files_identify_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kvcachepool import sglang_model

    monkeypatch.setattr(sglang_model, "start_time", lambda: None)
    assert identity(Arguments(model)) is None
    assert "StartTimeUnknown" in caplog.text


def test_a_server_starts_with_its_launcher_and_files_are_older_than_their_reader() -> None:
    rank = "from kvcachepool.sglang_settings import *; print(server_start(), start_time())"
    launcher = (
        "import subprocess, sys; from kvcachepool.sglang_settings import *; print(start_time(), flush=True)\n"
        f"for _ in range(2): subprocess.run([sys.executable, '-c', {rank!r}], check=True)"
    )
    connector = Path(__file__).parents[2] / "sidecar" / "connector"
    found = []
    for _ in range(2):
        before = time.time()
        done = subprocess.run(
            [sys.executable, "-c", launcher],
            env=os.environ | {"PYTHONPATH": str(connector)},
            check=True,
            capture_output=True,
            text=True,
        )
        (started,), first, second = (line.split() for line in done.stdout.splitlines())
        assert first[0] == second[0]
        assert before - 0.02 < float(started) < float(first[1]) < float(second[1]) < time.time()
        found.append(first[0])
    assert found[0] != found[1]
    assert re.search(r"pid:\[\d+\]", found[0]), "containers have processes of the same number"

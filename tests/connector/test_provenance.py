"""An image's name is trusted only if vLLM's front process computed it, with vLLM's own classes on both sides."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import engine_loop
import pytest
from PIL import Image
from vllm.lora.request import LoRARequest
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.inputs import PlaceholderRange
from vllm.multimodal.media import MediaWithBytes
from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataParser, parse_mm_uuids
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.request import Request

from kvcachepool import provenance
from kvcachepool.controls import INVALID, NO_CONTROLS, Controls, Uncacheable, namespace
from vllm import SamplingParams

HEX = "ab" * 32


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process without wrapped methods."""
    monkeypatch.delenv(provenance.VARIABLE, raising=False)
    monkeypatch.setattr(provenance, "_front", provenance._FrontProcess())
    monkeypatch.setattr(provenance, "_given", provenance.Given())
    kept = [(ProcessorInputs, "get_mm_hashes"), (InputProcessor, "process_inputs")]
    kept += [(InputProcessor, "inject_into_mm_cache")]
    before = [(owner, name, getattr(owner, name)) for owner, name in kept]
    yield
    for owner, name, value in before:
        setattr(owner, name, value)
    if hasattr(InputProcessor, provenance._MARK):
        delattr(InputProcessor, provenance._MARK)


@pytest.fixture(scope="module")
def processor() -> InputProcessor:
    made = InputProcessor(engine_loop.base_config())
    made.mm_encoder_cache_size = 1000  # the model has no encoder
    return made


def picture(shade: int = 0) -> Image.Image:
    return Image.new("RGB", (4, 4), (shade, 0, 0))


def names(image: Any, given: str | None = None, **kwargs: Any) -> dict[str, list[str]]:
    """vLLM's names of an image."""
    items = MultiModalDataParser().parse_mm_data({"image": image})
    uuids = parse_mm_uuids({"image": [given]} if given is not None else None)
    inputs = ProcessorInputs([], items, uuids, kwargs)
    return inputs.get_mm_hashes("model", "sha256")


def request(
    processor: InputProcessor,
    called: dict[str, list[str]],
    salt: str | None = None,
    lora: LoRARequest | None = None,
    **sampling: Any,
) -> Request:
    """The scheduler's view of a request with items of these names."""
    engine_input: Any = {
        "type": "multimodal",
        "prompt_token_ids": [5] * 40,
        "mm_kwargs": {"image": [None] * len(called["image"])},
        "mm_placeholders": {"image": [PlaceholderRange(2 + 4 * i, 4) for i in range(len(called["image"]))]},
        "mm_hashes": called,
    }
    if salt is not None:
        engine_input["cache_salt"] = salt
    made = processor.process_inputs(
        "one", engine_input, SamplingParams(max_tokens=1, **sampling), ("generate",), lora_request=lora
    )
    return Request.from_engine_core_request(made, None)


def shared(request: Request, controls: Controls = NO_CONTROLS) -> bool:
    """Whether the request may be cached."""
    try:
        namespace(request, controls, "", lambda lora: b"\1" * 32)
    except Uncacheable:
        return False
    return True


def test_an_image_without_a_name_is_cached_under_its_content(processor: InputProcessor) -> None:
    provenance.watch_front()
    called = names(picture())
    made = request(processor, called)
    assert made.mm_features[0].identifier == called["image"][0]
    assert shared(made)


@pytest.mark.parametrize("kwargs", [{}, {"max_pixels": 1}])
@pytest.mark.parametrize("name", [HEX, HEX * 2, "my-image"])
def test_an_item_name_of_a_user_is_not_trusted(processor: InputProcessor, name: str, kwargs: dict[str, Any]) -> None:
    provenance.watch_front()
    made = request(processor, names(picture(), name, **kwargs))
    assert not shared(made)
    assert shared(request(processor, names(picture(), name, **kwargs), salt="mine")), "he shares it with himself"
    assert not shared(made, Controls(tags="mine")), "others may send the same tags"


def test_an_image_with_an_embedded_name_is_not_trusted(processor: InputProcessor) -> None:
    """vLLM uses the tag as the hash. A conversion, as of plain images, drops it."""
    provenance.watch_front()
    image = picture()
    image.getexif()[Image.ExifTags.Base.ImageID] = uuid.UUID(int=1)
    with_bytes = MediaWithBytes(image, b"encoded")
    items: Any = {"image": ImageProcessorItems([with_bytes])}
    called = ProcessorInputs([], items).get_mm_hashes("model", "sha256")
    other = MediaWithBytes(image, b"others")
    assert MultiModalHasher.hash_kwargs("sha256", model_id="model", image=other) == called["image"][0]
    assert not shared(request(processor, called))


def test_a_hash_from_a_client_is_not_trusted_although_vllm_computed_an_equal_one(
    processor: InputProcessor,
) -> None:
    provenance.watch_front()
    called = names(picture())
    copied = {"image": ["".join(list(called["image"][0]))]}
    assert copied == called
    assert not shared(request(processor, copied))


def test_a_content_hash_that_a_user_sent_is_not_trusted_any_more(
    processor: InputProcessor,
) -> None:
    """vLLM's own caches may hold the item of that user."""
    provenance.watch_front()
    called = names(picture(1))
    assert shared(request(processor, called))
    assert shared(request(processor, names(picture(2), called["image"][0]), salt="mine")), "under his own salt"
    assert not shared(request(processor, names(picture(1))))
    other = names(picture(3))
    processor.inject_into_mm_cache({"image": [str(other["image"][0])]}, {"image": []})
    assert not shared(request(processor, names(picture(3))))
    assert shared(request(processor, names(picture(4))))


def test_the_scheduler_remembers_given_names_of_another_front_process(processor: InputProcessor) -> None:
    provenance.watch_front()
    called = names(picture())
    made = request(processor, called)
    foreign = request(processor, called)
    foreign.sampling_params.extra_args = None
    assert shared(made)
    assert not shared(foreign)
    assert not shared(made)


def test_the_scheduler_remembers_given_names_of_requests_that_it_refuses(processor: InputProcessor) -> None:
    """vLLM computes them, and keeps their KV under those names."""

    def unknown(lora: Any) -> bytes:
        raise Uncacheable("lora_content_unknown")

    provenance.watch_front()
    for shade, controls, lora in (
        (1, Controls(tags=INVALID), None),
        (2, NO_CONTROLS, LoRARequest("a", 1, "/a")),
    ):
        called = names(picture(shade))
        foreign, made = request(processor, called), request(processor, called)
        foreign.sampling_params.extra_args, foreign.lora_request = None, lora
        assert shared(made)
        with pytest.raises(Uncacheable, match=r"invalid_tags|lora_content_unknown"):
            namespace(foreign, controls, "", unknown)
        assert not shared(made)


def test_without_the_plugin_in_the_front_process_nothing_is_trusted(processor: InputProcessor) -> None:
    assert not shared(request(processor, names(picture())))


@pytest.mark.parametrize("token", ["", "guess", "0" * 32])
def test_a_token_from_a_user_is_not_trusted(
    processor: InputProcessor, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = request(processor, names(picture()), extra_args={provenance.KEY: token})
    assert not shared(made)
    monkeypatch.setenv(provenance.VARIABLE, "1" * 32)
    assert not shared(made)


def test_the_users_arguments_are_kept_and_their_object_is_not_changed(processor: InputProcessor) -> None:
    provenance.watch_front()
    his = {"a": 1}
    made = request(processor, names(picture()), extra_args=his)
    assert made.sampling_params.extra_args["a"] == 1
    assert his == {"a": 1}


def test_the_token_of_one_request_proves_no_other(processor: InputProcessor) -> None:
    """For reused parameters that vLLM does not copy."""
    provenance.watch_front()
    token = os.environ[provenance.VARIABLE]
    made = request(processor, names(picture(), HEX), extra_args={provenance.KEY: token})
    assert not shared(made)
    assert made.sampling_params.extra_args == {}


def test_an_adapters_name_before_a_hash_is_no_name_of_a_user() -> None:
    provenance.watch_front()
    lora = SimpleNamespace(lora_name="tower")
    token = {provenance.KEY: os.environ[provenance.VARIABLE]}

    def made(identifier: Any, lora: Any = None) -> Any:
        features = [SimpleNamespace(identifier=identifier)]
        return SimpleNamespace(
            mm_features=features, lora_request=lora, sampling_params=SimpleNamespace(extra_args=token)
        )

    assert provenance.proven(made(f"tower:{HEX}", lora))
    assert not provenance.proven(made(f"tower:{HEX}"))
    assert not provenance.proven(made(None))
    assert not provenance.proven(made("A" * 64))


def test_too_many_given_names_end_the_trust_in_all() -> None:
    given = provenance.Given(limit=2)
    for n in range(3):
        given.add(f"{n:064x}")
    assert HEX in given
    given = provenance.Given(limit=2)
    for n in range(9):
        given.add(f"name {n}")
    assert HEX not in given


def test_without_a_needed_name_of_vllm_nothing_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = ProcessorInputs.get_mm_hashes
    monkeypatch.delattr(InputProcessor, "inject_into_mm_cache")
    with pytest.raises(AttributeError):
        provenance.watch_front()
    assert ProcessorInputs.get_mm_hashes is hashes
    assert provenance.VARIABLE not in os.environ
    monkeypatch.undo()

"""One model of each family: the same answers as vLLM's own prefix hits, from memory and from disk.

In bfloat16 an answer depends on where a prompt is split, so vLLM's own hit with the same split is the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from servers.models import model, token_ids
from servers.pod import Pod
from servers.sidecar import sizes
from servers.waiting import wait_for

NewPod = Callable[..., Pod]

PROMPT = 3000

#: Model, type of its numbers, tokens of vLLM's blocks.
_FAMILIES = [
    pytest.param("tiny", "float32", 128, id="full"),
    pytest.param("window", "float32", 128, id="window"),
    pytest.param("sinks", "bfloat16", 128, id="sinks"),
    pytest.param("chunked", "bfloat16", 128, id="chunked"),
    pytest.param("gdn", "bfloat16", 256, id="gdn"),
]
# Without AMX no backend of vLLM for CPUs supports prefixes with MLA.
if "amx_tile" in Path("/proc/cpuinfo").read_text():
    _FAMILIES.append(pytest.param("mla", "bfloat16", 16, id="mla-amx"))


@pytest.mark.parametrize(("name", "dtype", "block"), _FAMILIES)
def test_answers_are_those_of_vllms_own_hits(new_pod: NewPod, disk: Path, name: str, dtype: str, block: int) -> None:
    config: dict[str, Any] = {"disk": {"path": str(disk), "size": "1Gi"}, "cache": {"loadTimeout": "20s"}}
    prompt = token_ids(PROMPT, 301)
    pod = new_pod(config=config).start(name, dtype=dtype)
    cold = pod.generate(prompt)
    assert (cold.local, cold.external) == (0, 0)
    wait_for(lambda: pod.sidecar.written_to("disk"), 20, "every chunk on disk")
    local = pod.generate(prompt)
    assert local.local > 2560

    def loaded() -> float:
        """The worker's counter, which it reports with a step."""
        pod.engine.generate([1], max_tokens=1)
        return pod.sidecar.metrics().total("kvcachepool_connector_copied_bytes_total", direction="load")

    before = loaded()
    warm = pod.generate_again(prompt)
    assert (warm.local, warm.external, warm.tokens) == (0, local.local, local.tokens)
    size = sizes(model(name), "--dtype", dtype, f"--block-size={block}", f"--tokens={warm.external}")
    assert pod.chunk_bytes() == size["chunk_bytes"]
    needed = size["prompt"]["loaded_bytes"]
    wait_for(lambda: loaded() > before, 10, "the worker's report")
    copied = loaded() - before
    assert needed <= copied <= needed * 1.05, f"{copied} bytes were loaded, and {needed} are needed"

    pod.engine.stop()
    pod.sidecar.kill_tree()
    other = new_pod(config=config).start(name, dtype=dtype)
    from_disk = other.generate(prompt)
    assert (from_disk.local, from_disk.external, from_disk.tokens) == (0, local.local, local.tokens)


@pytest.mark.parametrize(
    "speculation",
    [
        {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4},
        {"method": "draft_model", "model": "tiny-other", "num_speculative_tokens": 2},
    ],
    ids=["ngram", "draft-model"],
)
def test_speculation_changes_no_answer_and_the_drafts_kv_is_loaded(
    new_pod: NewPod, truth: Callable[..., list[int]], speculation: dict[str, Any]
) -> None:
    """A draft model's layers are in the KV groups of the model, so a hit has their KV too."""
    if "model" in speculation:
        speculation = speculation | {"model": str(model(speculation["model"]))}
    pod = new_pod().start(speculative_config=speculation)
    prompt = token_ids(400, 306) * 3
    cold = pod.generate(prompt, max_tokens=24)
    warm = pod.generate_again(prompt, max_tokens=24)
    assert (cold.external, warm.external) == (0, 1152)
    assert cold.tokens == warm.tokens == truth(prompt, max_tokens=24)
    layers = 8 if "model" in speculation else 4
    assert pod.chunk_bytes() == 256 * layers * 2 * 2 * 64 * 4

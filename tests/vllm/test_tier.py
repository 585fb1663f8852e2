"""vLLM's own tiered offloading in a real engine, with the tier of this project below its host memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from servers.models import model, token_ids
from servers.pod import BLOCK, Pod, settle
from servers.versions import newest
from servers.waiting import wait_for

Truth = Callable[..., list[int]]
NewPod = Callable[..., Pod]

_starts = itertools.count()

PROMPT = 2000
HIT = PROMPT // BLOCK * BLOCK

#: vLLM's spec, with copies for CPUs between KV blocks and host memory: vLLM has them for GPUs only.
_ON_CPUS = """
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

class Copies(OffloadingWorker):
    def __init__(self, kv_caches, region):
        self.pairs = [(one.tensor, region.create_next_worker_view(one.page_size_bytes)) for one in kv_caches.tensors]
        self.region = region
        self.finished = []

    def submit_store(self, job_id, src_spec, dst_spec):
        for block, row in zip(src_spec.block_ids, dst_spec.chunk_ids, strict=True):
            for blocks, rows in self.pairs:
                rows[row] = blocks[block]
        self.finished.append(TransferResult(job_id, True))
        return True

    def submit_load(self, job_id, src_spec, dst_spec):
        for row, block in zip(src_spec.chunk_ids, dst_spec.block_ids, strict=True):
            for blocks, rows in self.pairs:
                blocks[block] = rows[row]
        self.finished.append(TransferResult(job_id, True))
        return True

    def get_finished(self):
        finished, self.finished = self.finished, []
        return finished

    def wait(self, job_ids):
        pass

    def shutdown(self):
        self.pairs.clear()
        self.region.cleanup()

class OnCpus(TieringOffloadingSpec):
    def get_worker(self, kv_caches):
        region = SharedOffloadRegion(
            self._engine_id, self.num_chunks, 0, self.kv_bytes_per_chunk, self.cpu_page_size_per_worker
        )
        return Copies(kv_caches, region)
"""


@pytest.fixture
def pod(new_pod: NewPod) -> Iterator[Pod]:
    """A pod whose engines use vLLM's offloading."""
    if not newest():
        pytest.skip("VllmTooOld: the tier needs the newest vLLM")
    pod = new_pod()
    (pod.folder / "offloading_on_cpus.py").write_text(_ON_CPUS)
    pod.sidecar.start()
    yield pod
    # vLLM leaves its host memory behind when it is killed.
    for left in Path("/dev/shm").glob(f"vllm_offload_{pod.folder.name}*"):
        left.unlink()


def start(pod: Pod, name: str | Path = "tiny", **tier: Any) -> None:
    """Starts an engine."""
    extra = {
        "spec_name": "OnCpus",
        "spec_module_path": "offloading_on_cpus",
        "cpu_bytes_to_use": 64 << 20,
        "secondary_tiers": [{"type": "KVCachePoolTier", "module_path": "kvcachepool.vllm_tier", **tier}],
    }
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "engine_id": f"{pod.folder.name}-{next(_starts)}",
        "kv_connector_extra_config": extra,
    }
    engine = pod.start_engine(name, kv_transfer_config=transfer)
    assert engine.connector == "OffloadingConnector"
    assert "the KV cache pool is off" not in engine.log_text()

    def shared() -> bool:
        # vLLM collects the tier's numbers in its steps.
        engine.generate(token_ids(8, 1), max_tokens=2)
        return engine.counters().total("kvcachepool:offload_tier_shared") == 1

    wait_for(shared, 60, "the content of the model's files")
    engine.take_sources()


def loaded(pod: Pod) -> int:
    """Prompt tokens that the last request loaded."""
    return pod.engine.take_sources()["one"][1]


def test_engines_load_what_the_tier_has_until_a_reset_and_compute_without_a_sidecar(pod: Pod, truth: Truth) -> None:
    prompt, other = token_ids(PROMPT, 71), token_ids(PROMPT, 72)
    start(pod)
    for each in (prompt, other):
        assert (pod.engine.generate(each), loaded(pod)) == (truth(each), 0)
    pod.engine.reset()
    assert (pod.engine.generate(prompt), loaded(pod)) == (truth(prompt), HIT)
    settle(pod.sidecar)
    pod.engine.reset(external=True)
    # A reset with the connector forgets the tier.
    assert (pod.engine.generate(prompt), loaded(pod)) == (truth(prompt), 0)
    pod.engine.stop()
    settle(pod.sidecar)

    start(pod)
    assert (pod.engine.generate(prompt), loaded(pod)) == (truth(prompt), HIT), "the model's files identify it"
    pod.sidecar.kill_tree()
    assert (pod.engine.generate(other), loaded(pod)) == (truth(other), 0)


def test_other_weights_under_the_same_path_load_nothing(pod: Pod, truth: Truth) -> None:
    prompt = token_ids(PROMPT, 73)
    path = pod.folder / "model"
    path.symlink_to(model("tiny"))
    start(pod, path)
    assert pod.engine.generate(prompt) == truth(prompt)
    pod.engine.stop()
    settle(pod.sidecar)
    path.unlink()
    path.symlink_to(model("tiny-other"))
    start(pod, path)
    pod.engine.generate(prompt)
    assert loaded(pod) == 0
    pod.engine.stop()
    path.unlink()
    path.symlink_to(model("tiny"))
    start(pod, path)
    assert (pod.engine.generate(prompt), loaded(pod)) == (truth(prompt), HIT)

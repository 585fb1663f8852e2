"""A real vLLM with its own tiered offloading, and the tier of this project below it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import unittest.mock
from pathlib import Path
from typing import Any

from gpu import place

PROMPT_TOKENS, CHUNK_TOKENS = 512, 64
#: The last chunk of a prompt may wait for the first tokens of the answer.
CHUNKS = PROMPT_TOKENS // CHUNK_TOKENS - 1


def transfer_config(socket: str, cpu_bytes: int = 1 << 30) -> dict[str, Any]:
    """vLLM's `--kv-transfer-config`."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": cpu_bytes,
            "block_size": CHUNK_TOKENS,
            "secondary_tiers": [{"type": "KVCachePoolTier", "module_path": "kvcachepool.vllm_tier", "socket": socket}],
        },
    }


class Tier(place.OnDevice):
    """Two starts of an engine, one after the other, above one sidecar."""

    needs = ("msgspec",)

    def setUp(self) -> None:
        if place.rehearsal():
            self.skipTest("Rehearsal: vLLM's offloading runs on GPUs only")
        for module in ("vllm", "transformers"):
            if importlib.util.find_spec(module) is None:
                self.skipTest(f"No{module.capitalize()}: the module {module} is not installed")
        try:
            importlib.import_module("kvcachepool.vllm_tier")
        except ImportError as error:
            # Its own name of the reason: VllmTooOld.
            self.skipTest(str(error))
        from servers import paths
        from servers.sidecar import Sidecar

        self.folder = paths.short_folder()
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.sidecar = Sidecar(self.folder / "pod", memory="1Gi")
        self.addCleanup(self.sidecar.stop)
        self.sidecar.start()

    def model(self) -> Path:
        """A model of random weights, below this test's folder."""
        from servers import models

        with unittest.mock.patch.dict(os.environ, KVCACHEPOOL_CACHE=str(self.folder)):
            return models.model("tiny")

    def answered(self, start: int) -> tuple[str, float]:
        """The answer of a new vLLM to the same prompt, and how many chunks it loaded from the tier."""
        from servers import models
        from servers.vllm_server import VllmServer

        server = VllmServer(
            self.sidecar.folder,
            self.model(),
            self.folder / f"vllm-{start}.log",
            "--kv-transfer-config",
            json.dumps(transfer_config(str(self.sidecar.socket))),
            "--max-model-len",
            "2048",
            "--gpu-memory-utilization",
            "0.3",
            env={"HOME": str(self.folder), "XDG_CACHE_HOME": str(self.folder / "cache")},
        )
        try:
            server.wait_ready(300)
            reply = server.complete(models.token_ids(PROMPT_TOKENS, 1), PROMPT_TOKENS)

            def stored() -> bool:
                return start > 0 or counted("store", "stored") >= CHUNKS

            def counted(operation: str, result: str) -> float:
                found = server.metrics().total(
                    "kvcachepool:offload_tier_chunks_total", operation=operation, result=result
                )
                return float(found)

            place.wait_for(stored, 60, "the chunks stored")
            return reply.text, counted("load", "loaded")
        finally:
            server.stop()

    def test_a_restarted_engine_loads_what_the_first_one_stored_and_answers_the_same(self) -> None:
        cold, none = self.answered(0)
        warm, loaded = self.answered(1)
        assert none == 0
        assert loaded >= CHUNKS, f"{loaded} chunks were loaded"
        assert warm == cold

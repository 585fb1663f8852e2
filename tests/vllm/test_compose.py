"""The connector beside a transport between prefill and decode in a real vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable

from servers.models import token_ids
from servers.pod import Pod

Truth = Callable[..., list[int]]
NewPod = Callable[..., Pod]

#: A minimal transport: it requires a layout, transfers nothing, and records which hooks ran.
_TRANSPORT = """
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1, KVConnectorMetadata, KVConnectorTransferResults, SupportsHMA
)

class NixlConnector(KVConnectorBase_V1, SupportsHMA):
    @classmethod
    def get_required_kvcache_layout(cls, vllm_config):
        return "LBHNC"

    def register_kv_caches(self, kv_caches):
        print("transport: register_kv_caches", flush=True)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        assert num_external_tokens == 0

    def build_connector_meta(self, scheduler_output):
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request, block_ids):
        print("transport: request_finished", flush=True)
        return False, None

    def request_finished(self, request, block_ids):
        return False, None

    def get_transfer_results(self, finished_req_ids):
        return KVConnectorTransferResults()

    def start_load_kv(self, forward_context, **kwargs): pass
    def wait_for_layer_load(self, layer_name): pass
    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): pass
    def wait_for_save(self): pass
"""


def test_a_transport_and_the_cache_work_in_one_engine(new_pod: NewPod, truth: Truth) -> None:
    pod = new_pod()
    (pod.folder / "fake_transport.py").write_text(_TRANSPORT)
    (pod.folder / "settings.json").write_text(json.dumps({"existingConnector": "Compose"}))
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": "fake_transport",
        "kv_role": "kv_both",
    }
    pod.start(kv_transfer_config=transfer)
    assert pod.engine.connector == "MultiConnector"
    prompt = token_ids(2000, 321)
    cold = pod.generate(prompt)
    warm = pod.generate_again(prompt)
    assert (cold.external, warm.external) == (0, 1920)
    assert cold.tokens == warm.tokens == truth(prompt)
    log = pod.engine.log_text()
    assert "transport: register_kv_caches" in log
    assert "transport: request_finished" in log

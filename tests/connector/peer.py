"""A stand-in for a transport between prefill and decode: the KV of a prompt comes from another vLLM."""

from __future__ import annotations

from typing import Any, ClassVar

from engine_loop import contents
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)

#: Parameters of a request whose prompt another vLLM has computed.
REMOTE = {"do_remote_prefill": True}


class Peer(KVConnectorBase_V1, SupportsHMA):
    """Loads all of a prompt that vLLM does not hold. Both sides run in one process.

    engine: the `Loop` whose blocks it fills.
    quiet: it also loads prompts of requests without parameters, inside a step, like MoRIIO.
    lost: its peers have gone, so its loads fail.
    """

    engine: ClassVar[Any] = None
    quiet: ClassVar[bool] = False
    lost: ClassVar[bool] = False
    _loading: ClassVar[dict[str, Any]] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if self.quiet:
            return request.num_prompt_tokens - num_computed_tokens - 1, False
        if not (request.kv_transfer_params or {}).get("do_remote_prefill"):
            return 0, False
        return request.num_prompt_tokens - num_computed_tokens, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens and self.quiet:
            self._fill(request)
        elif num_external_tokens:
            Peer._loading[request.request_id] = request
            request.kv_transfer_params["do_remote_prefill"] = False

    def _fill(self, request: Any) -> None:
        engine, end = Peer.engine, request.num_prompt_tokens
        tables = engine.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        for group, row in enumerate(tables):
            engine._write(group, row, contents(request, end, {0: 0}), 0, end - self.quiet)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        ended = set(Peer._loading)
        for request in Peer._loading.values():
            if not self.lost:
                self._fill(request)
        Peer._loading.clear()
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=ended if self.lost else set())

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def register_kv_caches(self, kv_caches: Any) -> None:
        """Does nothing."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Does nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing."""

    def wait_for_save(self) -> None:
        """Does nothing."""

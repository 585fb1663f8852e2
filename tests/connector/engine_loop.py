"""vLLM's real scheduler and block pool, the real connector, a real KV cache in host memory, and a model that only
writes.

What a block of a prompt must hold is a function of all tokens before it and of what keeps prompts apart (salt,
adapter). Before each forward the loop compares everything that attention would read with that: wrong KV never goes
unseen.
"""

from __future__ import annotations

import copy
import functools
import os
import pickle
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import KVTransferConfig, LoRAConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvcachepool import provenance
from kvcachepool.connector import KVCachePoolConnector
from kvcachepool.descriptor import witness
from kvcachepool.preflight import COMPOSED
from servers import models

HEADS, SIZE, LAYERS = 2, 32, 2
WINDOW = 64


@functools.cache
def base_config() -> VllmConfig:
    """A config of the tiny model, created once."""
    return EngineArgs(
        model=str(models.model("tiny")),
        dtype="float32",
        max_model_len=8192,
        enforce_eager=True,
        enable_prefix_caching=True,
    ).create_engine_config()


class Loop:
    """One engine: scheduler, connector (both sides in this process), KV cache."""

    def __init__(
        self,
        *,
        blocks: int = 256,
        block_tokens: int = 16,
        step_tokens: int = 512,
        windows: bool = False,
        states: bool = False,
        scratch_states: int = 0,
        last_state_only: bool = False,
        engine_id: str = "engine-1",
        max_seqs: int = 64,
        events: bool = False,
        world: int = 1,
        role: str = "kv_both",
        peer: type[KVConnectorBase_V1] | None = None,
        ranks: int = 1,
        lora: bool = False,
    ) -> None:
        """`peer`: a transport that runs before this connector, in a MultiConnector. `ranks`: of data parallelism."""
        self.config = copy.copy(base_config())
        self.config.kv_transfer_config = KVTransferConfig(
            kv_connector="KVCachePoolConnector",
            kv_connector_module_path="kvcachepool.connector",
            kv_role=role,
            kv_load_failure_policy="recompute",
            engine_id=engine_id,
        )
        if peer is not None:
            self.config.kv_transfer_config = _beside(peer, self.config.kv_transfer_config)
        witness(self.config)
        if events:
            from vllm.config import KVEventsConfig

            self.config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        self.config.cache_config = copy.copy(self.config.cache_config)
        self.config.cache_config.block_size = block_tokens
        self.config.cache_config.num_gpu_blocks = blocks
        self.config.cache_config.kv_cache_layout = "LBHNC"
        if lora:
            self.config.lora_config = LoRAConfig()
        self.config.scheduler_config = copy.copy(self.config.scheduler_config)
        self.config.scheduler_config.max_num_batched_tokens = step_tokens
        self.config.scheduler_config.max_num_scheduled_tokens = step_tokens
        self.config.scheduler_config.max_num_seqs = max_seqs
        self.config.scheduler_config.async_scheduling = False
        self.config.parallel_config = copy.copy(self.config.parallel_config)
        self.config.parallel_config.world_size = world
        self.config.parallel_config.data_parallel_size = ranks
        self.block_tokens = block_tokens
        self.windows = windows
        self.states = states
        if states:
            self.config.cache_config.mamba_cache_mode = "align"
        self.kv_cache_config, self.caches = _kv_cache(blocks, block_tokens, windows, states, scratch_states)
        if last_state_only:
            self.kv_cache_config.prefix_cache_retention_interval = 0
        self.config.compilation_config = copy.copy(self.config.compilation_config)
        self.config.compilation_config.static_forward_context = {
            layer: _module("GDN_ATTN" if states and group else "CPU_ATTN")
            for group, spec in enumerate(self.kv_cache_config.kv_cache_groups)
            for layer in spec.layer_names
        }
        self.worker = self.make_worker()
        init_none_hash(sha256)
        scheduler_block, hash_block = resolve_kv_cache_block_sizes(self.kv_cache_config, self.config)
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=self.kv_cache_config,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=scheduler_block,
            hash_block_size=hash_block,
            log_stats=True,
        )
        # The tiny model has no vision, but requests of these tests contain images.
        self.scheduler.max_num_encoder_input_tokens = 4096
        self.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=4096)
        self._hasher = get_request_block_hasher(hash_block, sha256)
        self.connector: KVCachePoolConnector = _own(self.scheduler.connector)
        self.requests: dict[str, Request] = {}
        self.done: dict[str, str] = {}
        self.computed: dict[str, int] = {}
        self.external: dict[str, int] = {}
        self.rewrite_metadata: Callable[[Any], None] | None = None
        self.rewrite_output: Callable[[KVConnectorOutput], None] | None = None
        self.hold_results = False
        self.completions_only = False  # like a wrapper without `get_transfer_results`
        self.frames_processed: Callable[[], bool] = lambda: True
        self.steps = 0
        self.weights = 0
        self.old_local = False  # vLLM's own prefix cache is known to hold KV of the first weights
        self._lives: dict[tuple[str, int], dict[int, int]] = {}
        self.adapters: dict[int, bytes] = {}  # the content that the worker has read for each adapter's id
        #: Compares with the adapter's content, not its path. vLLM's own prefix cache does not.
        self.checks_adapters = False

    def make_worker(self) -> Any:
        """The worker side, in this process."""
        composed = self.config.kv_transfer_config.kv_connector == "MultiConnector"
        kind = MultiConnector if composed else KVCachePoolConnector
        worker: Any = kind(self.config, KVConnectorRole.WORKER, self.kv_cache_config)
        worker.register_kv_caches(self.caches)
        if composed:
            worker._worker = _own(worker)._worker
        return worker

    # -- requests

    def request(
        self, name: str, tokens: list[int], *, output: int = 1, params: dict[str, Any] | None = None, **more: Any
    ) -> Request:
        """A request as EngineCore creates it from the input."""
        sampling = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
        if params is not None:
            sampling.extra_args = {"kv_transfer_params": params}
        if more.pop("proven", True):  # as if vLLM's front process had computed the names of all items
            sampling.extra_args = {**(sampling.extra_args or {}), provenance.KEY: os.environ.get(provenance.VARIABLE)}
        skip = more.pop("skip_reading", None)
        if skip is not None:
            sampling.skip_reading_prefix_cache = skip
        embeds = more.get("prompt_embeds")
        return Request(name, None if embeds is not None else tokens, sampling, None, block_hasher=self._hasher, **more)

    def add(self, name: str, tokens: list[int], *, early: bool = True, **more: Any) -> Request:
        """Adds a request, with or without the plugin's early lookup."""
        request = self.request(name, tokens, **more)
        if early:
            receiving = threading.Thread(target=self.connector.arrive, args=(request,), name="input")
            receiving.start()
            receiving.join()
        self.requests[name] = request
        self.scheduler.add_request(request)
        return request

    def abort(self, name: str) -> None:
        """The client disconnected."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self.done[name] = "aborted"

    # -- steps

    def step(self) -> Any:
        """One engine step; returns vLLM's SchedulerOutput."""
        self.steps += 1
        output = self.scheduler.schedule()
        metadata = pickle.loads(pickle.dumps(output.kv_connector_metadata))
        if self.rewrite_metadata is not None:
            self.rewrite_metadata(metadata)
        self._load_adapters(output)
        self.worker.handle_preemptions(metadata)
        self.worker.bind_connector_metadata(metadata)
        self.worker.start_load_kv(None)
        scheduled = output.num_scheduled_tokens
        sampled: list[list[int]] = []
        for name, count in scheduled.items():
            sampled.append(self._forward(self.scheduler.requests[name], count))
        if scheduled:
            self.worker.wait_for_save()
        reported = KVConnectorOutput()
        if not self.hold_results:
            if self.completions_only:
                reported.finished_recving = self.worker.get_finished(output.finished_req_ids)[1]
            else:
                results = self.worker.get_transfer_results(output.finished_req_ids)
                reported.finished_recving = results.finished_recving or None
                reported.failed_recving = results.failed_recving
            reported.invalid_block_ids = self.worker.get_block_ids_with_load_errors()
            reported.kv_connector_worker_meta = self.worker.build_connector_worker_meta()
        if self.rewrite_output is not None:
            self.rewrite_output(reported)
        self.worker.clear_connector_metadata()
        ran = ModelRunnerOutput(
            req_ids=list(scheduled),
            req_id_to_index={name: index for index, name in enumerate(scheduled)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=reported,
        )
        for outputs in self.scheduler.update_from_output(output, ran).values():
            for one in outputs.outputs:
                if one.finish_reason is not None:
                    self.done[one.request_id] = str(one.finish_reason)
        return output

    def _load_adapters(self, output: Any) -> None:
        """Loads the adapters of a step before anything else, as vLLM's workers do."""
        for name in output.num_scheduled_tokens:
            lora = self.scheduler.requests[name].lora_request
            if lora is not None and (lora.lora_int_id not in self.adapters or lora.load_inplace):
                self.load_adapter(lora)

    def load_adapter(self, lora: Any) -> None:
        """The worker reads the adapter's files, also after it dropped it from memory."""
        worker = _own(self.worker)
        worker.adapter_read_begins(lora)
        file = Path(lora.lora_path) / "adapter_model.safetensors"
        self.adapters[lora.lora_int_id] = file.read_bytes() if file.exists() else b""
        worker.adapter_read_ended(lora, True)

    def add_adapter(self, lora: Any) -> None:
        """vLLM's call to load an adapter before its first request."""
        self.connector.adapter_loaded(lora)
        self.load_adapter(lora)

    def until(self, condition: Callable[[], Any], seconds: float = 20.0, what: str = "condition") -> None:
        """Steps until the condition is true."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
            if not self.step().total_num_scheduled_tokens:
                time.sleep(0.001)

    def run(self, *names: str, seconds: float = 20.0) -> None:
        """Steps until these requests have ended."""
        self.until(lambda: all(name in self.done for name in names), seconds, f"end of {names}")

    def drain(self, seconds: float = 20.0) -> None:
        """Steps until no store is in flight and the worker's reports were processed."""
        self.until(lambda: not self.connector.has_pending_push_work(), seconds, "stores drained")
        self.until(self.frames_processed, seconds, "COMMITs processed")

    def generate(self, name: str, tokens: list[int], **more: Any) -> int:
        """Runs one request to its end. Returns the tokens that came from the pool."""
        self.add(name, tokens, **more)
        self.run(name)
        return self.external.get(name, 0)

    def forget_local(self) -> None:
        """Empties vLLM's own prefix cache, after waiting for stores in flight."""
        self.drain()
        assert self.scheduler.reset_prefix_cache()

    def free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def close(self) -> None:
        """Ends both sides."""
        self.connector.shutdown()
        self.worker.shutdown()

    # -- the model, which only writes

    def _forward(self, request: Request, count: int) -> list[int]:
        begin = request.num_computed_tokens
        if output_is_first(request) and request.request_id not in self.computed:
            stats = request.prefill_stats
            self.computed[request.request_id] = begin
            if stats is not None:
                self.external[request.request_id] = stats.num_external_cached_tokens
        # _update_after_schedule has counted the step already
        begin -= count
        end = begin + count
        lora = request.lora_request
        adapter = self.adapters[lora.lora_int_id] if self.checks_adapters and lora is not None else None
        values = contents(request, end, self._weights_of(request, begin), adapter)
        for group, row in enumerate(self.scheduler.kv_cache_manager.get_block_ids(request.request_id)):
            first = 0
            if group and self.states:
                self._next_state(request, group, row, values, begin, end)
                continue
            if group and self.windows:
                first = max(0, begin - WINDOW + 1) // self.block_tokens * self.block_tokens
            self._check(request, group, row, values, first, begin)
            self._write(group, row, values, begin, end)
        if end < request.num_tokens:
            return []
        return [int(values[-1]) % 4000 + 3]

    def reload_weights(self) -> None:
        """The model computes with other weights from now on. Running requests keep their blocks, as in vLLM."""
        self.connector.weights_changed("reload_weights")
        self.weights += 1
        for request in self.scheduler.running:
            self._weights_of(request, 0)[request.num_computed_tokens] = self.weights
        self.connector.weights_changed("reload_weights")

    def _weights_of(self, request: Request, begin: int) -> dict[int, int]:
        """Weights that the request is computed with, by the first token."""
        life = request.request_id, request.num_preemptions
        if life not in self._lives:
            external = request.prefill_stats.num_external_cached_tokens if request.prefill_stats is not None else 0
            local = begin - external if self.old_local else 0
            self._lives[life] = {0: 0, local: self.weights}
        return self._lives[life]

    def _layers(self, group: int) -> list[torch.Tensor]:
        return [self.caches[name] for name in self.kv_cache_config.kv_cache_groups[group].layer_names]

    def _check(self, request: Request, group: int, row: list[int], values: np.ndarray, first: int, end: int) -> None:
        size = self.block_tokens
        for layer, tensor in enumerate(self._layers(group)):
            for at in range(first, end, size):
                block, stop = row[at // size], min(at + size, end)
                assert block != 0, f"{request.request_id}: attention reads the null block at token {at}"
                want = torch.from_numpy(values[at:stop] + layer)
                got = tensor[block, :, : stop - at, :]
                assert bool((got == want[None, :, None]).all()), (
                    f"{request.request_id}: wrong KV in group {group}, layer {layer}, block {block}, tokens {at}.."
                )

    def _next_state(
        self, request: Request, group: int, row: list[int], values: np.ndarray, begin: int, end: int
    ) -> None:
        """Reads the state at token `begin` and writes that at `end`: a state depends on all tokens before it."""
        size = self.block_tokens
        for layer, tensor in enumerate(self._layers(group)):
            states = tensor.flatten(1).view(torch.float32)
            if begin:
                block = row[(begin - 1) // size]
                assert block != 0, f"{request.request_id}: the model reads the null block as the state at token {begin}"
                assert bool((states[block] == float(values[begin - 1] + layer)).all()), (
                    f"{request.request_id}: wrong state in group {group}, layer {layer}, block {block}, token {begin}"
                )
            with torch.inference_mode():
                states[row[(end - 1) // size]] = float(values[end - 1] + layer)

    def _write(self, group: int, row: list[int], values: np.ndarray, begin: int, end: int) -> None:
        size = self.block_tokens
        with torch.inference_mode():
            for layer, tensor in enumerate(self._layers(group)):
                at = begin
                while at < end:
                    stop = min(end, (at // size + 1) * size)
                    data = torch.from_numpy(values[at:stop] + layer)
                    tensor[row[at // size], :, at % size : at % size + stop - at, :] = data[None, :, None]
                    at = stop


def _own(connector: Any) -> Any:
    """This package's connector, also in a MultiConnector."""
    return connector._connectors[-1] if isinstance(connector, MultiConnector) else connector


def _beside(peer: type[KVConnectorBase_V1], own: KVTransferConfig) -> KVTransferConfig:
    """The config of a MultiConnector of both, as the plugin makes it."""
    transport = {"kv_connector": peer.__name__, "kv_connector_module_path": peer.__module__, "kv_role": "kv_both"}
    child = {
        "kv_connector": own.kv_connector,
        "kv_connector_module_path": own.kv_connector_module_path,
        "kv_role": own.kv_role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {COMPOSED: True},
    }
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        engine_id=own.engine_id,
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"connectors": [transport, child]},
    )


def output_is_first(request: Request) -> bool:
    """Whether no token was generated yet."""
    return request.num_output_tokens == 0


def contents(request: Request, end: int, weights: dict[int, int], adapter: bytes | None = None) -> np.ndarray:
    """The expected KV of the first `end` tokens: one float per token, from all tokens up to it and the weights."""
    embeds = request.prompt_embeds
    path = request.lora_request.lora_path if request.lora_request else None
    apart = (request.cache_salt, path if adapter is None else adapter)
    state = zlib.crc32(repr(apart).encode())
    values: np.ndarray = np.empty(end, dtype=np.float32)
    items = {f.mm_position.offset: f.identifier for f in request.mm_features}
    for position in range(end):
        state = zlib.crc32(b"%d" % weights[position], state) if weights.get(position) else state
        word = request.all_token_ids[position].to_bytes(4, "little")
        if embeds is not None and position < len(embeds):
            word += embeds[position].numpy().tobytes()
        if position in items:
            word += items[position].encode()
        state = zlib.crc32(word, state)
        values[position] = state & 0xFFFFF
    return values


def _module(backend: str) -> Any:
    """What the connector reads of an attention module."""
    return SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend), isa="vec")


def _kv_cache(
    blocks: int, block_tokens: int, windows: bool, states: bool, scratch_states: int
) -> tuple[Any, dict[str, torch.Tensor]]:
    caches: dict[str, torch.Tensor] = {}
    tensors, groups = [], []
    page = HEADS * block_tokens * 2 * SIZE * 4
    with torch.inference_mode():
        raw = torch.zeros(page * blocks * LAYERS, dtype=torch.int8)
    for number in range(2 if windows or states else 1):
        layers = [f"layer.{number}.{i}" for i in range(LAYERS)]
        options: dict[str, Any] = {
            "block_size": block_tokens,
            "num_kv_heads": HEADS,
            "head_size": SIZE,
            "dtype": torch.float32,
        }
        spec: Any = interface.FullAttentionSpec(**options)
        if number and windows:
            spec = interface.SlidingWindowSpec(**options, sliding_window=WINDOW)
        elif number:
            shapes, dtypes = ((3, 8), (HEADS, SIZE)), (torch.float32, torch.float32)
            spec = interface.MambaSpec(
                block_size=block_tokens,
                shapes=shapes,
                dtypes=dtypes,
                page_size_padded=page,
                mamba_cache_mode="align",
                num_speculative_blocks=scratch_states,
            )
        placed = interface.KVCacheTensor(size=raw.numel(), layers=layers, layer_stride=page * blocks, block_stride=page)
        views = interface.create_kv_cache_views(raw, spec, blocks, KVCacheLayout.LBHNC, placed)
        caches |= dict(zip(layers, views, strict=True))
        tensors.append(placed)
        groups.append(interface.KVCacheGroupSpec(layers, spec))
    config = interface.KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=tensors, kv_cache_groups=groups, kv_cache_layout="LBHNC"
    )
    return config, caches


def prompt(count: int, seed: int) -> list[int]:
    """Token ids that depend only on the seed."""
    return models.token_ids(count, seed)

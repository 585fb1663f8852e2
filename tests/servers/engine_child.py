"""The process behind `engine.Engine`: reads one JSON line per operation and answers with one.

`engine_child.py REQUESTS REPLIES` is one engine. `engine_child.py SOCKET` imports vLLM once, which takes longer than to
start a small engine, and forks an engine for every message on the socket.
"""

from __future__ import annotations

import copy
import ctypes
import faulthandler
import functools
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from typing import Any


class Operations:
    """One method per operation. Arguments and results are JSON."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.last: dict[str, list[Any]] = {}
        # By request: (local, external) cached tokens, and the difference between each token and the second best.
        self.sources: dict[str, list[int]] = {}
        self.margins: dict[str, list[float]] = {}
        self.loads_failed = 0
        self.raised: list[str] = []

    def start(self, **arguments: Any) -> str | None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        if transfer := arguments.pop("kv_transfer_config", None):
            from vllm.config import KVTransferConfig

            arguments["kv_transfer_config"] = KVTransferConfig(**transfer)
        if arguments.pop("weights_from_files", False):
            arguments["weight_transfer_config"] = _weights_from_files()
        if events := arguments.pop("kv_events_config", None):
            from vllm.config import KVEventsConfig

            arguments["kv_events_config"] = KVEventsConfig(**events)
        self.engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self._watch_prefills()
        self._watch_loads()
        chosen = self.engine.vllm_config.kv_transfer_config
        return chosen.kv_connector if chosen is not None else None

    def _watch_prefills(self) -> None:
        get_output = self.engine.engine_core.get_output

        def watched() -> Any:
            outputs = get_output()
            for output in outputs.outputs:
                if stats := getattr(output, "prefill_stats", None):
                    cached = [stats.num_local_cached_tokens, stats.num_external_cached_tokens]
                    self.sources[_given_name(output.request_id)] = cached
            return outputs

        self.engine.engine_core.get_output = watched

    def _watch_loads(self) -> None:
        core = getattr(self.engine.engine_core, "engine_core", None)
        connector = core.scheduler.get_kv_connector() if core is not None else None
        if connector is None:
            return
        update = connector.update_connector_output

        def watched(output: Any) -> None:
            self.loads_failed += len(getattr(output, "failed_recving", None) or ())
            update(output)

        connector.update_connector_output = watched

    def add(
        self,
        name: str,
        tokens: list[int],
        max_tokens: int,
        salt: str | None,
        params: dict[str, Any] | None,
        lora: list[Any] | None,
        margins: bool,
    ) -> None:
        from vllm import SamplingParams

        prompt: dict[str, Any] = {"prompt_token_ids": tokens}
        if salt is not None:
            prompt["cache_salt"] = salt
        extra = {"kv_transfer_params": params} if params is not None else None
        sampling = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            extra_args=extra,
            detokenize=False,
            logprobs=2 if margins else None,
        )
        self.last.pop(name, None)
        self.engine.add_request(name, prompt, sampling, lora_request=_adapter(lora) if lora is not None else None)

    def step(self) -> dict[str, list[Any]]:
        outputs = {}
        for output in self.engine.step():
            first = output.outputs[0]
            outputs[output.request_id] = [list(first.token_ids), output.finished, first.finish_reason]
            if output.finished and first.logprobs:
                self.margins[output.request_id] = [_margin(chosen) for chosen in first.logprobs]
        self.last |= outputs
        return outputs

    def run(self, seconds: float) -> dict[str, list[Any]]:
        deadline = time.monotonic() + seconds
        while self.engine.has_unfinished_requests():
            if time.monotonic() > deadline:
                raise TimeoutError(f"requests not finished in {seconds:g} s: {self.states()}")
            self.step()
        done, self.last = self.last, {}
        return done

    def drain(self, seconds: float) -> None:
        core = getattr(self.engine.engine_core, "engine_core", None)
        if core is None:
            # With worker processes the engine steps by itself.
            return
        deadline = time.monotonic() + seconds
        while core.scheduler.has_requests():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the engine still has work after {seconds:g} s: {self.states()}")
            self.engine.step()

    def abort(self, names: list[str]) -> None:
        try:
            self.engine.abort_request(names)
        except TypeError:
            self.engine.abort_request(names, internal=False)

    def reset(self, external: bool, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self.engine.reset_prefix_cache(reset_connector=external):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the prefix cache could not be reset in {seconds:g} s")
            self.drain(seconds)

    def rpc(self, method: str, kwargs: dict[str, Any], callable_: bool) -> None:
        """`collective_rpc` of a worker's method, or of a function that calls it."""

        def call(worker: Any) -> None:
            getattr(worker, method)(**kwargs)

        if callable_:
            self.engine.collective_rpc(call)
        else:
            self.engine.collective_rpc(method, kwargs=kwargs)

    def sleep(self, level: int) -> None:
        self.engine.sleep(level=level)

    def wake_up(self) -> None:
        self.engine.wake_up()

    def try_reset(self, external: bool) -> bool:
        return bool(self.engine.reset_prefix_cache(reset_connector=external))

    def load_adapter(self, lora: list[Any], in_place: bool) -> None:
        self.engine.add_lora(_adapter(lora, load_inplace=in_place))

    def take_sources(self) -> dict[str, list[int]]:
        taken, self.sources = self.sources, {}
        return taken

    def take_failed_loads(self) -> int:
        taken, self.loads_failed = self.loads_failed, 0
        return taken

    def take_margins(self) -> dict[str, list[float]]:
        taken, self.margins = self.margins, {}
        return taken

    def delay_load(self, seconds: float) -> None:
        """Delays the next load's copy in this process by this time."""
        copier: Any = importlib.import_module("kvcachepool.copy_cpu").CpuCopier
        copy = copier.copy

        def late(self: Any, kind: str, *arguments: Any) -> None:
            if kind == "load":
                copier.copy = copy
                time.sleep(seconds)
            copy(self, kind, *arguments)

        copier.copy = late

    def raise_next(self, owner: str, name: str, times: int) -> None:
        """The connector's method raises at its next calls. Earlier failures are reset."""
        module, _, class_name = owner.rpartition(".")
        cls = getattr(importlib.import_module(f"kvcachepool.{module}"), class_name)
        method = getattr(cls, name)

        @functools.wraps(method)
        def raises(*arguments: Any, **more: Any) -> Any:
            nonlocal times
            if not times:
                return method(*arguments, **more)
            times -= 1
            self.raised.append(f"{owner}.{name}")
            raise RuntimeError(f"raised by a test in {owner}.{name}")

        setattr(cls, name, raises)
        groups = importlib.import_module("vllm.distributed.kv_transfer")
        for connector in (self.engine.engine_core.engine_core.scheduler.connector, groups.get_kv_transfer_group()):
            connector.bugs = 0

    def take_raised(self) -> list[str]:
        taken, self.raised = self.raised, []
        return taken

    def states(self) -> dict[str, str]:
        core = getattr(self.engine.engine_core, "engine_core", None)
        if core is None:
            return {}
        return {_given_name(name): request.status.name for name, request in core.scheduler.requests.items()}

    def counters(self) -> list[tuple[str, dict[str, str], float]]:
        from prometheus_client import REGISTRY

        return [
            (sample.name, dict(sample.labels), sample.value)
            for metric in REGISTRY.collect()
            if metric.name.startswith(("vllm:", "kvcachepool"))
            for sample in metric.samples
            if not sample.name.endswith(("_bucket", "_created"))
        ]


def _weights_from_files() -> Any:
    """A weight transfer whose trainer is a folder, because vLLM's own need a GPU."""
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.reload import layerwise

    class FromFiles(WeightTransferEngine[Any, Any]):
        init_info_cls = update_info_cls = dict

        def init_transfer_engine(self, init_info: Any) -> None: ...
        def start_weight_update(self) -> None: ...
        def finish_weight_update(self) -> None: ...
        def receive_weights(self, update_info: Any) -> None: ...
        def shutdown(self) -> None: ...

        def update_weights(self, update_info: dict[str, Any]) -> None:
            config = copy.copy(self.vllm_config.model_config)
            config.model = update_info["path"]
            loader: Any = get_model_loader(self.vllm_config.load_config)
            weights = loader.get_all_weights(config, self.model)
            layerwise.initialize_layerwise_reload(self.model)
            self.model.load_weights(weights)
            layerwise.finalize_layerwise_reload(self.model, config)

    WeightTransferEngineFactory.register_engine("files", FromFiles)
    return WeightTransferConfig(backend="files")


def _given_name(request_id: str) -> str:
    """The original name: vLLM appends a random part to given names."""
    return request_id.rsplit("-", 1)[0]


def _adapter(lora: list[Any], **more: Any) -> Any:
    from vllm.lora.request import LoRARequest

    name, number, path = lora
    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=path, **more)


def _margin(chosen: Any) -> float:
    best, second = sorted((float(entry.logprob) for entry in chosen.values()), reverse=True)[:2]
    return best - second


def serve(requests: Any, replies: Any) -> None:
    """Serves until the other end closes. SIGABRT writes the stacks of all threads to the log."""
    faulthandler.enable()
    operations = Operations()
    for line in requests:
        operation, arguments = json.loads(line)
        try:
            answer, error = getattr(operations, operation)(**arguments), None
        except Exception as caught:
            traceback.print_exc()
            answer, error = None, repr(caught)
        replies.write(json.dumps([answer, error]) + "\n")
        replies.flush()


def fork_engines(orders: socket.socket) -> None:
    """Forks an engine per message until the other end closes. In each fork it returns when that engine has ended."""
    importlib.import_module("vllm.engine.arg_utils")
    importlib.import_module("vllm.v1.engine.llm_engine")
    # No process waits for the forks.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, fds, _, _ = socket.recv_fds(orders, 1 << 20, 3)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            orders.close()
            _become(json.loads(message), *fds)
            return
        for fd in fds:
            os.close(fd)
        orders.send(str(pid).encode())


def _become(env: dict[str, str], requests: int, replies: int, log: int) -> None:
    """Gives the fork the environment, group and output of a new process, and serves."""
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for fd in (1, 2):
        os.dup2(log, fd)
    os.close(log)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    if threads := env.get("OMP_NUM_THREADS"):
        # OpenMP read it when the parent imported torch.
        importlib.import_module("torch").set_num_threads(int(threads))
    sys.path[:0] = filter(None, env["PYTHONPATH"].split(":"))
    _fork_workers()
    serve(os.fdopen(requests), os.fdopen(replies, "w"))


def _fork_workers() -> None:
    """Makes vLLM fork its processes, which it spawns on CPUs. It asks this function before each."""

    def fork() -> None:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    system: Any = importlib.import_module("vllm.utils.system_utils")
    assert system._maybe_force_spawn
    system._maybe_force_spawn = fork


if __name__ == "__main__":
    # This folder must not precede the environment's packages.
    sys.path.pop(0)
    if len(sys.argv) == 2:
        fork_engines(socket.socket(fileno=int(sys.argv[1])))
    else:
        serve(os.fdopen(int(sys.argv[1])), os.fdopen(int(sys.argv[2]), "w"))

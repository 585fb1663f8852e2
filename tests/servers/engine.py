"""vLLM's engine in a process of its own, stepped from a test: requests are added, stepped, aborted one by one.

The engine runs in that process itself (no worker processes) unless several ranks are requested, so a test decides what
happens between two steps. Worker processes are forks too: they need no imports of their own, which on a machine with
two cores take longer than most tests.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NamedTuple

from servers import paths
from servers.process import Process
from servers.prometheus import Samples
from servers.waiting import TimedOut, readable, wait_for

_CHILD = Path(__file__).with_name("engine_child.py")
_START_SECONDS = 600.0


class Adapter(NamedTuple):
    """A LoRA adapter, as in vLLM's requests."""

    name: str
    number: int
    path: str


class Output(NamedTuple):
    """The output of a request."""

    tokens: list[int]
    finished: bool
    reason: str | None


class EngineFailed(AssertionError):
    """The engine's process ended or raised."""


def environment(folder: Path | None, **extra: str) -> dict[str, str]:
    """Environment of any vLLM process: the exported connector on PYTHONPATH, and no other reference to it."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("KVCACHEPOOL_", "VLLM_"))}
    env |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    env["PYTHONPATH"] = str(folder) if folder else ""
    env["VLLM_LOGGING_LEVEL"] = "INFO"
    # The workers of several ranks compile functions, which takes longer than to start them. By default the results are
    # in TMPDIR.
    env["TORCHINDUCTOR_CACHE_DIR"] = str(paths.cache() / "torchinductor")
    return env | extra


def _spawn(python: Path, log: Path, env: dict[str, str], fds: tuple[int, int]) -> Process:
    command = [str(python), str(_CHILD), *map(str, fds)]
    return Process("vLLM's engine", command, log, env=env, pass_fds=fds)


class _Forks:
    """A process that has imported vLLM. Engines are forks of it."""

    def __init__(self) -> None:
        self._folder = paths.short_folder()
        self._orders, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with child_end:
            command = [sys.executable, str(_CHILD), str(child_end.fileno())]
            self._process = Process(
                "vLLM's imports", command, self._folder / "log", env=environment(None), pass_fds=(child_end.fileno(),)
            )

    def fork(self, log: Path, env: dict[str, str], fds: tuple[int, int]) -> Process:
        """Forks an engine with this environment and its output in the log."""
        with log.open("ab") as output, contextlib.suppress(OSError):
            socket.send_fds(self._orders, [json.dumps(env).encode()], [*fds, output.fileno()])
            if answer := self._orders.recv(100):
                return Process.forked("vLLM's engine", int(answer), log)
        raise EngineFailed(f"vLLM could not be imported:\n{self._process.tail(60)}")

    def end(self) -> None:
        """Ends the process and all remaining engines."""
        self._orders.close()
        self._process.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


@functools.cache
def _forks() -> _Forks:
    forks = _Forks()
    atexit.register(forks.end)
    return forks


def _fork(log: Path, env: dict[str, str], fds: tuple[int, int]) -> Process:
    return _forks().fork(log, env, fds)


class Engine:
    """One engine. `folder` is the pod's volume (None: no connector at all), `python` an interpreter with another vLLM.
    `spawned`: all its processes import vLLM, as those of `vllm serve` do.

    An operation without an answer for `answer_seconds` ends the engine, with the stacks of its threads in the error.
    """

    def __init__(
        self,
        folder: Path | None,
        model: Path,
        log: Path,
        *,
        env: dict[str, str] | None = None,
        answer_seconds: float = 600,
        python: Path | None = None,
        spawned: bool = False,
        **arguments: Any,
    ) -> None:
        requests_read, requests_write = os.pipe()
        replies_read, replies_write = os.pipe()
        parallel = any(arguments.get(f"{kind}_parallel_size", 1) > 1 for kind in ("tensor", "pipeline"))
        variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1" if parallel else "0"}
        if not parallel:
            # All cores for the forward pass. With other tests running, the copy thread still gets its share.
            variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        variables = environment(folder, TMPDIR=str(log.parent), **variables, **(env or {}))
        try:
            fds = (requests_read, replies_write)
            if spawned or python:
                self.process = _spawn(python or Path(sys.executable), log, variables, fds)
            else:
                self.process = _fork(log, variables, fds)
        finally:
            os.close(requests_read)
            os.close(replies_write)
        self._requests = os.fdopen(requests_write, "w")
        self._replies = os.fdopen(replies_read)
        self._answer_seconds = _START_SECONDS
        settings = {
            "model": str(model),
            "dtype": "float32",
            "max_model_len": 8192,
            "max_num_batched_tokens": 2048,
            "enforce_eager": True,
            "disable_log_stats": False,
            "seed": 0,
        } | arguments
        self.connector: str | None = self._call("start", **settings)
        self._answer_seconds = answer_seconds

    def _call(self, operation: str, **arguments: Any) -> Any:
        try:
            self._requests.write(json.dumps([operation, arguments]) + "\n")
            self._requests.flush()
            if not readable(self._replies, self._answer_seconds):
                raise EngineFailed(f"{operation!r} got no answer in {self._answer_seconds:g} s\n{self.stacks()}")
            line = self._replies.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise EngineFailed(f"the engine's process ended at {operation!r}:\n{self.process.tail(60)}")
        answer, error = json.loads(line)
        if error:
            raise EngineFailed(f"{operation}: {error}\n{self.process.tail(60)}")
        return answer

    def add(
        self,
        name: str,
        tokens: list[int],
        *,
        max_tokens: int = 8,
        salt: str | None = None,
        params: dict[str, Any] | None = None,
        lora: Adapter | None = None,
        margins: bool = False,
    ) -> None:
        """Adds a request without running it. `params` are its kv_transfer_params. For `margins` see `take_margins`."""
        more = {"salt": salt, "params": params, "lora": lora, "margins": margins}
        self._call("add", name=name, tokens=tokens, max_tokens=max_tokens, **more)

    def step(self) -> dict[str, Output]:
        """Runs one engine step. Returns the requests with output."""
        return {name: Output(*fields) for name, fields in self._call("step").items()}

    def run(self, seconds: float = 120) -> dict[str, Output]:
        """Steps until no request is left. Returns the last output of each."""
        return {name: Output(*fields) for name, fields in self._call("run", seconds=seconds).items()}

    def drain(self, seconds: float = 30) -> None:
        """Steps until nothing is left to do, including stores."""
        self._call("drain", seconds=seconds)

    def generate(self, tokens: list[int], **arguments: Any) -> list[int]:
        """Runs one request and its stores to their end. Returns the generated tokens."""
        self.add("one", tokens, **arguments)
        output = self.run()["one"]
        if output.reason not in ("length", "stop"):
            raise EngineFailed(f"the request ended with {output.reason}\n{self.process.tail(60)}")
        self.drain()
        return output.tokens

    def abort(self, *names: str) -> None:
        """Aborts requests."""
        self._call("abort", names=list(names))

    def reset(self, *, external: bool = False, seconds: float = 20) -> None:
        """Empties vLLM's own prefix cache. With `external` it also calls the connector's `reset_cache`."""
        self._call("reset", external=external, seconds=seconds)

    def rpc(self, method: str, *, callable_: bool = False, **kwargs: Any) -> None:
        """Calls a method of all workers, by its name or by a function."""
        self._call("rpc", method=method, kwargs=kwargs, callable_=callable_)

    def sleep(self, level: int) -> None:
        """Sleep mode, which frees nothing on CPUs."""
        self._call("sleep", level=level)

    def wake_up(self) -> None:
        """The end of `sleep`."""
        self._call("wake_up")

    def try_reset(self, *, external: bool) -> bool:
        """Like `reset`, but only once. vLLM refuses while blocks are in use, and still resets the connector."""
        return bool(self._call("try_reset", external=external))

    def load_adapter(self, adapter: Adapter, *, in_place: bool) -> None:
        """Loads an adapter. With `in_place` even if its number already has weights."""
        self._call("load_adapter", lora=adapter, in_place=in_place)

    def take_sources(self) -> dict[str, tuple[int, int]]:
        """(local, external) cached prompt tokens of the requests with a first token since the last call."""
        return {name: (local, external) for name, (local, external) in self._call("take_sources").items()}

    def take_failed_loads(self) -> int:
        """Requests whose load failed since the last call. Only known with one rank."""
        return int(self._call("take_failed_loads"))

    def take_margins(self) -> dict[str, list[float]]:
        """For finished requests that were added with `margins`: the difference in log probability between each token
        and the next best, since the last call.
        """
        margins: dict[str, list[float]] = self._call("take_margins")
        return margins

    def delay_load(self, seconds: float) -> None:
        """Delays the next load's copy by this time; others wait behind it. Needs one rank."""
        self._call("delay_load", seconds=seconds)

    def raise_next(self, owner: str, name: str, times: int = 1) -> None:
        """The connector's method (`module.Class`, name) raises at its next calls. Needs one rank."""
        self._call("raise_next", owner=owner, name=name, times=times)

    def take_raised(self) -> list[str]:
        """Methods that raised since the last call."""
        return list(self._call("take_raised"))

    def stacks(self) -> str:
        """The end of the log, after all processes wrote the stacks of their threads and ended."""
        self.process.signal_all(signal.SIGCONT)
        self.process.signal_all(signal.SIGABRT)
        with contextlib.suppress(TimedOut):
            wait_for(lambda: not self.process.running(), 10, "the engine's end")
        return self.process.tail(300)

    def states(self) -> dict[str, str]:
        """State of every request of the scheduler, by name."""
        states: dict[str, str] = self._call("states")
        return states

    def counters(self) -> Samples:
        """vLLM's own metrics."""
        return Samples((name, labels, value) for name, labels, value in self._call("counters"))

    def log_text(self) -> str:
        """All output."""
        return self.process.log.read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self._close()

    def stop(self) -> None:
        """Stops it gracefully."""
        self._close()
        self.process.stop()

    def _close(self) -> None:
        for end in (self._requests, self._replies):
            with contextlib.suppress(BrokenPipeError):
                end.close()


def by_source(before: Samples, after: Samples) -> dict[str, int]:
    """Prompt tokens between two readings by the source of their KV: computed, local, external."""
    short = {"local_compute": "computed", "local_cache_hit": "local", "external_kv_transfer": "external"}
    first, second = (reading.by("vllm:prompt_tokens_by_source", "source") for reading in (before, after))
    return {name: int(second.get(source, 0) - first.get(source, 0)) for source, name in short.items()}

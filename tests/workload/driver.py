"""Sends a plan's requests to a server as streamed completions, and measures each of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import aiohttp

from demo.progress import Failed
from workload.plan import Answer, Part, Plan, Request, Text

_ANSWER_SECONDS = 600
_PROGRESS_SECONDS = 10.0
#: Words of the request that measures how many tokens a word has.
_SAMPLE_WORDS = 300


class Unusable(Failed):
    """The workload cannot run with this server. The text has the reason and the fix."""


class Reply(NamedTuple):
    """What became of one request. Times are in seconds."""

    #: Index in the plan.
    request: int
    #: When it was sent, after the start of the run.
    sent: float
    first_token: float = 0.0
    seconds: float = 0.0
    #: As the server counts them.
    prompt_tokens: int = 0
    answer_tokens: int = 0
    #: None if the server does not report them.
    cached_tokens: int | None = None
    text: str = ""
    #: The reason of a failure; empty after a success.
    error: str = ""

    @property
    def between_tokens(self) -> float | None:
        """Mean time between two tokens. None for an answer of one."""
        return (self.seconds - self.first_token) / (self.answer_tokens - 1) if self.answer_tokens > 1 else None


class Server:
    """A client of one model of an OpenAI-compatible server. OPENAI_API_KEY is sent if it is set."""

    def __init__(self, url: str, model: str = "") -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model
        #: Longest prompt with its answer, if the server reports it.
        self.context: int | None = None
        key = os.environ.get("OPENAI_API_KEY", "")
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=_ANSWER_SECONDS),
        )

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def choose_model(self) -> None:
        """Finds the model, or names what is missing."""
        try:
            async with self._session.get(f"{self.url}/v1/models") as answer:
                status, body = answer.status, await answer.text()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Unusable(f"no server at {self.url} ({error}); start it, or correct --url") from None
        if status in (401, 403):
            raise Unusable(f"{self.url} refuses access ({status}); set OPENAI_API_KEY to its key")
        try:
            models = {str(model["id"]): model.get("max_model_len") for model in json.loads(body)["data"]}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise Unusable(f"{self.url}/v1/models answered {status} and no list of models: {body[:200]}") from None
        names = ", ".join(models) or "none"
        if not self.model and len(models) == 1:
            self.model = next(iter(models))
        if not self.model:
            raise Unusable(f"{self.url} serves several models ({names}); choose one with --model")
        if self.model not in models:
            raise Unusable(f"{self.url} does not serve --model {self.model}; it serves {names}")
        self.context = models[self.model]

    async def tokens_per_word(self) -> float:
        """Tokens of a word of `Text` in this model, from one short request."""
        sample = Text(0).part(Part("sample", _SAMPLE_WORDS))
        reply = await self.complete(Reply(-1, 0.0), sample, 1)
        if reply.error:
            raise Unusable(f"{self.url} did not answer a short prompt: {reply.error}")
        return reply.prompt_tokens / _SAMPLE_WORDS if reply.prompt_tokens else 1.0

    async def complete(self, reply: Reply, prompt: str, max_tokens: int) -> Reply:
        """Streams one completion. Every failure except a cancellation is in the reply."""
        start = time.monotonic()
        try:
            return await self._stream(reply, prompt, max_tokens, start)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError, LookupError, TypeError) as error:
            reason = str(error) or type(error).__name__
            return reply._replace(seconds=time.monotonic() - start, error=reason)

    async def _stream(self, reply: Reply, prompt: str, max_tokens: int, start: float) -> Reply:
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            # Not OpenAI's, but vLLM's, SGLang's and llama.cpp's: answers of equal length in all runs.
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        first, events, text, usage = 0.0, 0, "", dict[str, Any]()
        async with self._session.post(f"{self.url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise ValueError(f"the server answered {answer.status}: {(await answer.text())[:300]}")
            async for raw in answer.content:
                line = raw.decode().strip()
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    break
                event = json.loads(data)
                if "error" in event:
                    raise ValueError(f"the server ended the stream with an error: {event['error']}")
                if event.get("choices"):
                    first = first or time.monotonic() - start
                    events += 1
                    text += event["choices"][0].get("text") or ""
                usage = event.get("usage") or usage
        if not events:
            raise ValueError("the answer has no token")
        return reply._replace(
            first_token=first,
            seconds=time.monotonic() - start,
            prompt_tokens=usage.get("prompt_tokens") or 0,
            answer_tokens=usage.get("completion_tokens") or events,
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            text=text,
        )


def check_context(plan: Plan, server: Server) -> None:
    """Names a prompt that the model does not accept, before anything is sent."""
    if server.context is not None and plan.longest > server.context:
        raise Unusable(
            f"the longest prompt has about {plan.longest} tokens with its answer, and {server.model} accepts "
            f"{server.context}; choose shorter prompts (--help lists the options)"
        )


class Run:
    """One run of a plan. `replies` has what there is at any time, also after a cancellation."""

    def __init__(
        self,
        plan: Plan,
        text: Text,
        server: Server,
        *,
        concurrency: int = 0,
        between: Callable[[], Awaitable[object]] | None = None,
        say: Callable[[str], object] = lambda text: None,
    ) -> None:
        self.replies: list[Reply] = []
        #: Length of the run so far.
        self.seconds = 0.0
        self._plan = plan
        self._text = text
        self._server = server
        #: Requests in flight at most.
        self._limit = asyncio.Semaphore(concurrency or len(plan.requests))
        #: Awaited between phases.
        self._between = between
        self._say = say
        self._start = 0.0

    async def go(self) -> None:
        """All phases, one after the other."""
        self._start = time.monotonic()
        progress = asyncio.create_task(self._report_progress())
        try:
            for phase in sorted({request.phase for request in self._plan.requests}):
                if phase and self._between:
                    await self._between()
                await self._run_phase(phase)
        finally:
            self.seconds = time.monotonic() - self._start
            progress.cancel()

    async def _report_progress(self) -> None:
        while True:
            await asyncio.sleep(_PROGRESS_SECONDS)
            failed = sum(1 for reply in self.replies if reply.error)
            self._say(
                f"{len(self.replies)} of {len(self._plan.requests)} requests" + (f", {failed} failed" if failed else "")
            )

    async def _run_phase(self, phase: int) -> None:
        start = time.monotonic()
        tasks: dict[int, asyncio.Task[Reply]] = {}
        for index, request in enumerate(self._plan.requests):
            if request.phase == phase:
                tasks[index] = asyncio.create_task(self._send(index, request, start, tasks))
        try:
            await asyncio.gather(*tasks.values())
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _send(self, index: int, request: Request, start: float, tasks: dict[int, asyncio.Task[Reply]]) -> Reply:
        earlier = {part.request: await tasks[part.request] for part in request.prompt if isinstance(part, Answer)}
        await asyncio.sleep(start + request.due - time.monotonic())
        failed = [reply for reply in earlier.values() if reply.error]
        if failed:
            reply = Reply(index, time.monotonic() - self._start, error="an earlier request of its conversation failed")
        else:
            async with self._limit:
                prompt = self._text.prompt(request, {number: reply.text for number, reply in earlier.items()})
                reply = Reply(index, time.monotonic() - self._start)
                reply = await self._server.complete(reply, prompt, request.answer_tokens)
        self.replies.append(reply)
        return reply


async def until_interrupted(run: Run) -> bool:
    """Runs it until its end, Ctrl-C or SIGTERM. Returns whether it ended by itself."""
    loop, task = asyncio.get_running_loop(), asyncio.create_task(run.go())
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in handlers:
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return False
    finally:
        for number, handler in handlers.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
    return True

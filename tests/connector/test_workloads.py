"""Workloads: what their plans promise, and the driver against a stand-in for an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from demo.progress import Failed
from servers.paths import ROOT
from workload import compare, report, workloads
from workload.__main__ import command
from workload.check import Check, Difference, Question, Scores
from workload.driver import Reply, Run, Server, Unusable, check_context, until_interrupted
from workload.plan import Answer, Part, Plan, Request, Text

T = TypeVar("T")
SMALL: list[workloads.Workload] = [
    workloads.LongDocument(documents=3, document_tokens=200, order="random"),
    workloads.MultiDocument(documents=4, document_tokens=50, together=2, questions=6),
    workloads.MultiRound(users=2, rounds=3, system_tokens=40, history_tokens=60),
    workloads.Agents(sessions=2, turns=4, system_tokens=50, task_tokens=30),
    workloads.Rag(passages=6, passage_tokens=30, retrieved=3, questions=10),
    workloads.Sweep(lengths="20,50,100"),
]


class StandIn:
    """Streams answers, and counts cached tokens like a prefix cache without an end."""

    def __init__(self) -> None:
        self.models: Any = {"data": [{"id": "model", "max_model_len": 1000}]}
        self.status = 200
        #: What a request gets instead of an answer, by its number.
        self.instead: dict[int, Callable[[web.StreamResponse], Awaitable[None]]] = {}
        self.pause = 0.0
        self.prompts: list[str] = []
        self.keys: list[str | None] = []
        self.in_flight = self.most_in_flight = self.disconnected = 0
        self._seen: set[tuple[str, ...]] = set()

    async def list_models(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("Authorization"))
        return web.json_response(self.models, status=self.status)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        number = len(self.prompts)
        self.prompts.append(body["prompt"])
        if self.status != 200:
            return web.json_response({"error": "out of order"}, status=self.status)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            if number in self.instead:
                await self.instead[number](answer)
            else:
                await self._stream(answer, number, body)
        except (ConnectionError, asyncio.CancelledError):
            self.disconnected += 1
            raise
        finally:
            self.in_flight -= 1
        return answer

    async def _stream(self, answer: web.StreamResponse, number: int, body: dict[str, Any]) -> None:
        words = body["prompt"].split()
        cached = 0
        while cached < len(words) and tuple(words[: cached + 1]) in self._seen:
            cached += 1
        generated = [f"answer{number}.{token}" for token in range(body["max_tokens"])]
        every = [*words, *generated]
        self._seen.update(tuple(every[: length + 1]) for length in range(len(every)))
        for word in generated:
            await asyncio.sleep(self.pause)
            await event(answer, {"choices": [{"text": f"{word} "}]})
        usage = {"prompt_tokens": len(words), "completion_tokens": len(generated)}
        await event(answer, {"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": cached}}})
        await answer.write(b"data: [DONE]\n\n")


async def event(answer: web.StreamResponse, content: dict[str, Any]) -> None:
    await answer.write(f"data: {json.dumps(content)}\n\n".encode())


def serving(stand_in: StandIn, act: Callable[[str], Awaitable[T]]) -> T:
    """Runs something with the address of the stand-in."""

    async def run() -> T:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_get("/v1/models", stand_in.list_models)
        app.router.add_post("/v1/completions", stand_in.complete)
        async with TestServer(app, handler_cancellation=True) as server:
            return await act(str(server.make_url("")))

    return asyncio.run(run())


def replies(stand_in: StandIn, plan: Plan, **options: Any) -> list[Reply]:
    async def act(url: str) -> list[Reply]:
        async with Server(url, "model") as server:
            run = Run(plan, Text(1), server, **options)
            await run.go()
            return sorted(run.replies)

    return serving(stand_in, act)


def same_prompt(count: int, answer_tokens: int = 1) -> Plan:
    return Plan(Request("all", (Part(f"prompt {number}", 5),), answer_tokens) for number in range(count))


# Plans


@pytest.mark.parametrize("kind", workloads.WORKLOADS.values())
def test_a_plan_and_its_texts_are_a_function_of_the_seed(kind: type[workloads.Workload], tmp_path: Path) -> None:
    options = {"file": str(trace(tmp_path))} if kind is workloads.Trace else {}
    plan = kind(**options).plan(1)
    assert plan.requests == kind(**options).plan(1).requests
    part = plan.requests[0].prompt[0]
    assert isinstance(part, Part)
    assert Text(1).part(part) == Text(1).part(part)
    assert Text(1).part(part) != Text(2).part(part)
    assert len(Text(1).part(part).split()) == part.tokens
    assert len(Text(1, tokens_per_word=2.0).part(part).split()) == round(part.tokens / 2)


def test_seeds_draw_other_documents() -> None:
    assert workloads.Rag().plan(1).requests != workloads.Rag().plan(2).requests
    assert workloads.MultiDocument().plan(1).requests != workloads.MultiDocument().plan(2).requests


@pytest.mark.parametrize("workload", SMALL, ids=lambda workload: type(workload).__name__)
def test_a_prefix_cache_reuses_what_the_plan_says(workload: workloads.Workload) -> None:
    plan = workload.plan(1)
    answers = replies(StandIn(), plan, concurrency=1)
    assert not [reply.error for reply in answers if reply.error]
    assert [reply.cached_tokens for reply in answers] == plan.reused
    assert [reply.prompt_tokens for reply in answers] == [request.prompt_tokens for request in plan.requests]


def test_shares_of_reuse_of_the_defaults() -> None:
    shares = {
        name: sum(plan.reused) / plan.prompt_tokens
        for name, kind in workloads.WORKLOADS.items()
        if name != "trace" and (plan := kind().plan(1))
    }
    assert shares["agents"] == pytest.approx(0.96, abs=0.005)
    assert shares["long-document"] == pytest.approx(2 / 3, abs=0.01)
    assert shares["sweep"] == 0.75
    # Answers are half of what a user's second round adds, and all of the history is reused.
    assert shares["multi-round"] > 0.8
    assert shares["rag"] < shares["multi-document"] < 0.4
    assert sum(workloads.Rag(sort=True).plan(1).reused) > sum(workloads.Rag().plan(1).reused)


def test_distinct_tokens_count_each_prefix_and_answer_once() -> None:
    shared, other = Part("shared", 10), Part("other", 5)
    plan = Plan(
        [
            Request("all", (shared, other), 2),
            Request("all", (shared, other, Answer(0, 2), other), 2),
            Request("all", (other, shared), 2),
        ]
    )
    assert plan.reused == [0, 17, 0]
    assert plan.distinct_tokens == 15 + 2 + 5 + 2 + 15 + 2
    assert plan.longest == 24


def test_arrivals_have_the_mean_rate_and_start_anew_in_each_phase() -> None:
    plan = workloads.LongDocument(documents=400, document_tokens=1, repeats=1).plan(1).with_rate(4.0, seed=1)
    for phase in (0, 1):
        due = [request.due for request in plan.requests if request.phase == phase]
        assert due == sorted(due)
        assert due[-1] / len(due) == pytest.approx(1 / 4, rel=0.15)


def trace(folder: Path, *more: str) -> Path:
    file = folder / "trace.jsonl"
    entries = [
        {"timestamp": 0, "input_length": 1124, "output_length": 3, "hash_ids": [1, 2, 3]},
        {"timestamp": 3000, "input_length": 1500, "output_length": 4, "hash_ids": [1, 2, 4]},
    ]
    file.write_text("\n".join([*map(json.dumps, entries), *more]))
    return file


def test_a_trace_keeps_times_lengths_and_shared_blocks(tmp_path: Path) -> None:
    plan = workloads.Trace(str(trace(tmp_path)), speed=2.0).plan(1)
    assert [(each.prompt_tokens, each.answer_tokens, each.due) for each in plan.requests] == [
        (1124, 3, 0.0),
        (1500, 4, 1.5),
    ]
    assert plan.reused == [0, 1024]
    shorter = workloads.Trace(str(trace(tmp_path)), block_tokens=128).plan(1)
    assert [each.prompt_tokens for each in shorter.requests] == [281, 375]


@pytest.mark.parametrize("line", ["{", "[]", '{"timestamp": 1}', '{"timestamp":0,"input_length":9,"hash_ids":[]}'])
def test_a_bad_line_of_a_trace_is_named(line: str, tmp_path: Path) -> None:
    with pytest.raises(workloads.BadOption, match=r"trace\.jsonl:3: not a line"):
        workloads.Trace(str(trace(tmp_path, line))).plan(1)


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (workloads.LongDocument(order="backwards"), "expected tile, interleave or random"),
        (workloads.MultiDocument(documents=2, together=3), "at most --documents"),
        (workloads.Rag(passages=2), "at most --passages"),
        (workloads.Sweep(lengths="1,x"), "expected numbers"),
        (workloads.Sweep(lengths="1,0"), "expected numbers"),
        (workloads.Trace(), "--file is missing"),
        (workloads.Trace("/nowhere"), "No such file"),
    ],
)
def test_a_bad_option_is_named(workload: workloads.Workload, message: str) -> None:
    with pytest.raises(workloads.BadOption, match=message):
        workload.plan(1)


# The driver


def test_first_token_and_the_time_between_tokens_are_measured() -> None:
    stand_in = StandIn()
    stand_in.pause = 0.03
    (reply,) = replies(stand_in, same_prompt(1, answer_tokens=5))
    assert 0.03 <= reply.first_token < reply.seconds
    assert reply.seconds >= 0.15
    assert reply.between_tokens == pytest.approx((reply.seconds - reply.first_token) / 4)
    assert reply.answer_tokens == 5


@pytest.mark.parametrize(("concurrency", "most"), [(1, 1), (3, 3), (0, 8)])
def test_no_more_requests_are_in_flight_than_allowed(concurrency: int, most: int) -> None:
    stand_in = StandIn()
    stand_in.pause = 0.02
    replies(stand_in, same_prompt(8), concurrency=concurrency)
    assert stand_in.most_in_flight == most


def test_requests_are_sent_when_they_are_due() -> None:
    plan = Plan(request._replace(due=0.05 * number) for number, request in enumerate(same_prompt(3).requests))
    sent = [reply.sent for reply in replies(StandIn(), plan)]
    assert [time >= 0.05 * number for number, time in enumerate(sent)] == [True] * 3


def test_a_phase_starts_after_the_one_before_and_what_is_between() -> None:
    order: list[str] = []
    stand_in = StandIn()

    async def between() -> None:
        order.append(f"after {len(stand_in.prompts)}, {stand_in.in_flight} in flight")

    plan = Plan(request._replace(phase=number // 2) for number, request in enumerate(same_prompt(4).requests))
    replies(stand_in, plan, between=between)
    assert order == ["after 2, 0 in flight"]


async def _says_error(answer: web.StreamResponse) -> None:
    await event(answer, {"error": {"message": "no memory"}})


async def _says_nothing(answer: web.StreamResponse) -> None:
    await answer.write(b"data: [DONE]\n\n")


async def _says_nonsense(answer: web.StreamResponse) -> None:
    await answer.write(b"data: {\n\n")


async def _ends(answer: web.StreamResponse) -> None:
    await event(answer, {"choices": [{"text": "half"}]})
    assert answer._req is not None
    assert answer._req.transport is not None
    answer._req.transport.abort()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (_says_error, "no memory"),
        (_says_nothing, "the answer has no token"),
        (_says_nonsense, "Expecting property name"),
        (_ends, ""),
    ],
)
def test_a_failed_answer_is_a_reason_and_not_a_time(
    fault: Callable[[web.StreamResponse], Awaitable[None]], reason: str
) -> None:
    stand_in = StandIn()
    stand_in.instead[1] = fault
    good, bad, last = replies(stand_in, same_prompt(3), concurrency=1)
    assert bad.error
    assert reason in bad.error
    assert bad.first_token == 0.0
    assert not good.error
    assert not last.error


def test_a_refused_request_has_the_servers_words() -> None:
    stand_in = StandIn()
    stand_in.status = 503
    (reply,) = replies(stand_in, same_prompt(1))
    assert reply.error == 'the server answered 503: {"error": "out of order"}'


def test_a_conversation_ends_with_its_first_failure() -> None:
    stand_in = StandIn()
    stand_in.instead[0] = _says_error
    plan = workloads.MultiRound(users=2, rounds=3, history_tokens=5).plan(1)
    errors = [reply.error for reply in replies(stand_in, plan, concurrency=1)]
    assert [bool(error) for error in errors] == [True, False] * 3
    assert errors[2] == errors[4] == "an earlier request of its conversation failed"
    assert len(stand_in.prompts) == 4


def test_an_interrupt_keeps_the_replies_and_ends_what_is_in_flight() -> None:
    stand_in = StandIn()

    async def hang(answer: web.StreamResponse) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)

    stand_in.instead[2] = hang

    async def act(url: str) -> tuple[bool, list[Reply]]:
        async with Server(url, "model") as server:
            run = Run(same_prompt(5), Text(1), server, concurrency=1)
            ended = await until_interrupted(run)
        for _ in range(500):
            if stand_in.in_flight:
                await asyncio.sleep(0.01)
        return ended, run.replies

    ended, kept = serving(stand_in, act)
    assert not ended
    assert [reply.request for reply in kept] == [0, 1]
    assert stand_in.disconnected == 1
    assert len(stand_in.prompts) == 3


def preflight(stand_in: StandIn, model: str = "", plan: Plan | None = None) -> Server:
    async def act(url: str) -> Server:
        async with Server(f"{url}/v1/", model) as server:
            await server.choose_model()
            check_context(plan or same_prompt(1), server)
            return server

    return serving(stand_in, act)


def test_the_only_model_is_chosen_and_the_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    stand_in = StandIn()
    server = preflight(stand_in)
    assert (server.model, server.context) == ("model", 1000)
    assert stand_in.keys == ["Bearer secret"]


@pytest.mark.parametrize(
    ("models", "status", "model", "message"),
    [
        ({"data": [{"id": "a"}, {"id": "b"}]}, 200, "", r"several models \(a, b\); choose one with --model"),
        ({"data": [{"id": "a"}]}, 200, "c", "does not serve --model c; it serves a"),
        ({"data": []}, 200, "", "several models \\(none\\)"),
        ({"detail": "Not Found"}, 404, "", "answered 404 and no list of models"),
        ([], 200, "", "no list of models"),
        ({}, 401, "", "refuses access.*OPENAI_API_KEY"),
    ],
)
def test_a_server_that_cannot_be_used_is_named(models: Any, status: int, model: str, message: str) -> None:
    stand_in = StandIn()
    stand_in.models, stand_in.status = models, status
    with pytest.raises(Unusable, match=message):
        preflight(stand_in, model)


def test_no_server_is_named() -> None:
    async def act() -> None:
        async with Server(f"http://127.0.0.1:{unused_port()}") as server:
            await server.choose_model()

    with pytest.raises(Unusable, match=r"no server at .*; start it, or correct --url"):
        asyncio.run(act())


def test_a_prompt_beyond_the_context_is_named_before_anything_is_sent() -> None:
    stand_in = StandIn()
    with pytest.raises(Unusable, match="about 1001 tokens with its answer, and model accepts 1000"):
        preflight(stand_in, plan=Plan([Request("all", (Part("long", 990),), 11)]))
    assert stand_in.prompts == []


def test_the_length_of_a_word_is_what_the_server_counts() -> None:
    async def act(url: str) -> float:
        async with Server(url, "model") as server:
            return await server.tokens_per_word()

    assert serving(StandIn(), act) == 1.0


# The command


async def start(*arguments: str) -> asyncio.subprocess.Process:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "workload", *arguments, env=env, stdout=pipe, stderr=pipe
    )


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    async def act(url: str) -> tuple[str, str, int | None]:
        process = await start("rag", "--url", url, "--rate", "0", "--json", str(tmp_path / "out"), "--questions", "3")
        out, err = await process.communicate()
        return out.decode(), err.decode(), process.returncode

    stand_in = StandIn()
    stand_in.models["data"][0]["max_model_len"] = 4000
    out, err, status = serving(stand_in, act)
    assert status == 0, err
    assert out.split("\n")[3].split()[:3] == ["questions", "3", "0"]
    written = json.loads((tmp_path / "out").read_text())
    assert written["groups"][0]["requests"] == len(written["requests"]) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rag"], "one of the arguments --compare --url is required"),
        (["rag", "--url", "x", "--questions", "0"], "--questions: 0 is not a positive number"),
        (["rag", "--url", "x", "--rate", "-1"], "--rate: -1 is less than 0"),
        (["rag", "--url", "x", "--json", "/nowhere/out"], "--json /nowhere/out: the folder is not there"),
        (["rag", "--compare", "off,on"], "--compare off,on: expected some of off, local, ours, lmcache"),
        (["rag", "--compare", "off", "--model", "huge"], "--model huge: expected tiny, mid"),
        (["rag", "--compare", "off", "--model", ".", "--kv-tokens", "5"], "--kv-tokens 5: the longest request needs"),
        (["sweep", "--compare", "off", "--model", ".", "--lengths", "5000"], "about 5001 tokens with its answer, and"),
        (["rag", "--compare", "off", "--model", "."], "tokenizer.json cannot be read"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 4096}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["workload", *arguments])
    with pytest.raises((SystemExit, Failed)) as raised:
        command()
    assert message in str(raised.value) + capsys.readouterr().err


def test_an_interrupted_command_prints_what_there_is() -> None:
    stand_in = StandIn()
    stand_in.pause = 0.002

    async def act(url: str) -> tuple[str, int | None]:
        process = await start("rag", "--url", url, "--passage-tokens", "20", "--rate", "0", "--concurrency", "1")
        while len(stand_in.prompts) < 4:
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, _ = await process.communicate()
        return out.decode(), process.returncode

    out, status = serving(stand_in, act)
    assert status == 130, out
    assert "\nquestions " in out
    assert "stopped after" in out


# Reports


def test_a_summary_counts_failures_apart() -> None:
    plan = same_prompt(4)
    given = [Reply(number, float(number), 0.1 * number, 1.0, 5, 1, 2) for number in (1, 2, 3)]
    (summary,) = report.summaries(plan, [*given, Reply(0, 0.0, error="no")])
    assert (summary.requests, summary.failed, summary.prompt_tokens, summary.cached_tokens) == (4, 1, 15, 6)
    assert (summary.first_token_mean, summary.first_token_p99) == (pytest.approx(0.2), pytest.approx(0.3))
    assert summary.seconds == 4.0
    assert "NaN" not in json.dumps(report.as_json(plan, [Reply(0, 0.0, error="no")]))


def test_percentiles_are_measured_values() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [report.percentile(values, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]
    assert report.percentile([7.0], 0.99) == 7.0


def test_rows_compare_each_arm_with_off_and_ours_with_lmcache() -> None:
    plan = same_prompt(1)
    times = {"off": 2.0, "local": 1.5, "ours": 0.5, "lmcache": 1.0}
    results = []
    for arm, time in times.items():
        given = [Reply(0, 0.0, time, time, 5, 1, 0)]
        results.append(compare.Result(arm, given, report.summaries(plan, given), {"computed": 5}))
    made = {row["name"]: row["ratio"] for row in compare.rows("long-document", results, "make")}
    assert made == {
        "workload_long_document_off_ttft": 1.0,
        "workload_long_document_local_ttft": 0.75,
        "workload_long_document_ours_ttft": 0.25,
        "workload_long_document_lmcache_ttft": 0.5,
        "workload_long_document_ours_over_lmcache": 0.5,
    }


# The check


def test_questions_of_a_subject_share_its_examples() -> None:
    prompts, labels = Check(subjects=2, questions=3, shots=2).prompts(1, 1.0)
    assert prompts == Check(subjects=2, questions=3, shots=2).prompts(1, 1.0)[0]
    assert len(prompts) == 6
    beginnings = {prompt[: prompt.rindex("\n\n")] for prompt, _ in prompts}
    assert [each.count("Answer:") for each in beginnings] == [2, 2]
    assert all(len(question.choices) == len(labels) for _, question in prompts)
    assert {question.answer for _, question in prompts} <= set(range(4))


def test_questions_of_a_file_have_letters(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    entry = {"subject": "law", "question": "Who?", "choices": ["I", "you", "he", "she"], "answer": 2}
    file.write_text(json.dumps(entry) + "\n" + json.dumps({**entry, "question": "What?"}))
    prompts, _ = Check(file=str(file), shots=1).prompts(1, 1.0)
    assert [prompt for prompt, _ in prompts] == [
        "Who?\nA I\nB you\nC he\nD she\nAnswer: C\n\nWhat?\nA I\nB you\nC he\nD she\nAnswer:"
    ]
    file.write_text(json.dumps({**entry, "choices": ["I"]}))
    with pytest.raises(workloads.BadOption, match=r"questions\.jsonl:1: not a question"):
        Check(file=str(file)).prompts(1, 1.0)


def test_more_examples_than_questions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(workloads.BadOption, match="more questions than --shots"):
        Check(questions=0).prompts(1, 1.0)


def test_a_changed_answer_is_a_difference() -> None:
    reference = [Scores([-1.0, -2.0, -3.0, -4.0], 0), Scores([-1.0, -1.1, -3.0, -4.0], 0)]
    assert Difference.between(reference, reference) == (0, 0.0)
    changed = [reference[0], Scores([-1.2, -1.1, -3.0, -4.0], 100)]
    assert Difference.between(reference, changed) == (1, pytest.approx(0.2))
    assert Question("", "", [], 0).subject == ""

"""Runs a plan in one arm after the other, and prints one table."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, NamedTuple

from bench.results import Row
from demo.progress import say
from servers.engine import by_source
from workload.arms import ARMS, Arm, Setup, started
from workload.driver import Reply, Run, Server, until_interrupted
from workload.plan import Plan, Text
from workload.report import Summary, as_json, seconds, summaries, table


class Result(NamedTuple):
    """What came out of one arm."""

    arm: str
    replies: list[Reply]
    #: One per group. The last one is what the workload measures.
    groups: list[Summary]
    #: Prompt tokens of all groups by the source of their KV, as vLLM counts them.
    sources: dict[str, int]

    @property
    def measured(self) -> Summary:
        """The last group."""
        return self.groups[-1]


def compare(arms: Iterable[str], plan: Plan, text: Text, setup: Setup, concurrency: int) -> tuple[list[Result], bool]:
    """One result per arm, and whether all arms ended by themselves."""
    results: list[Result] = []
    try:
        for name in arms:
            with started(name, setup) as arm:
                result, ended = asyncio.run(_run(arm, plan, text, concurrency))
            if result:
                results.append(result)
            if not ended:
                return results, False
    except KeyboardInterrupt:
        return results, False
    return results, True


async def _run(arm: Arm, plan: Plan, text: Text, concurrency: int) -> tuple[Result | None, bool]:
    before = arm.server.metrics()
    async with Server(arm.server.url, "model") as server:
        run = Run(
            plan,
            text,
            server,
            concurrency=concurrency,
            between=lambda: asyncio.to_thread(arm.settle),
            say=lambda state: say(f"{arm.name}: {state}"),
        )
        ended = await until_interrupted(run)
    every = summaries(plan, run.replies)
    if not every:
        return None, ended
    say(f"{arm.name}: " + "; ".join(f"{each.group}: mean TTFT {seconds(each.first_token_mean)}" for each in every))
    return Result(arm.name, run.replies, every, by_source(before, arm.server.metrics())), ended


HEAD = [
    *("arm", "sent", "failed", "TTFT mean", "p50", "p99", "to off", "per token"),
    *("computed", "from vLLM", "from cache", "seconds"),
]


def print_table(plan: Plan, setup: Setup, results: list[Result]) -> None:
    """One line per arm, and what they have in common."""
    off = _mean(results, "off")
    rows = []
    for result in results:
        mean = result.measured.first_token_mean
        rows.append(
            [
                result.arm,
                str(len(result.replies)),
                str(sum(1 for reply in result.replies if reply.error)),
                seconds(mean),
                seconds(result.measured.first_token_p50),
                seconds(result.measured.first_token_p99),
                f"{mean / off:.3f}" if mean and off else "-",
                seconds(result.measured.between_tokens_mean),
                *(str(result.sources[source]) for source in ("computed", "local", "external")),
                f"{max(reply.sent + reply.seconds for reply in result.replies):.0f}",
            ]
        )
    measured = ", ".join(sorted({result.measured.group for result in results}))
    print(f"\n{table(HEAD, rows)}\n")
    print(f"{table(['mean TTFT', *(result.arm for result in results)], _by_group(plan, results))}\n")
    for result in results:
        print(f"{result.arm}: {ARMS[result.arm]}")
    reused = 100 * sum(plan.reused) / plan.prompt_tokens
    print(f"\nTTFT and time per token: {measured}. Sources of tokens, and seconds: all {len(plan.requests)} requests,")
    print(f"with {plan.prompt_tokens} prompt tokens, {reused:.0f} % of them in an earlier prompt or answer.")
    print(f"vLLM's own cache holds {setup.kv_tokens} tokens; all prompts and answers have {plan.distinct_tokens}.")
    print(f"Model: {setup.model.name}, {setup.dtype}.", flush=True)


def _by_group(plan: Plan, results: list[Result]) -> list[list[str]]:
    means = [{each.group: each.first_token_mean for each in result.groups} for result in results]
    return [[group, *(seconds(arm.get(group)) for arm in means)] for group in plan.groups()]


def _mean(results: list[Result], arm: str) -> float | None:
    return next((result.measured.first_token_mean for result in results if result.arm == arm), None)


def rows(name: str, results: list[Result], command: str) -> list[Row]:
    """Rows for the benchmarks' results: each arm beside off, and ours beside LMCache."""
    made = [_row(name, result, _mean(results, "off"), "off", "ttft", command) for result in results]
    ours = [result for result in results if result.arm == "ours"]
    if ours and (other := _mean(results, "lmcache")):
        made.append(_row(name, ours[0], other, "lmcache", "over_lmcache", command))
    return made


def _row(name: str, result: Result, reference: float | None, against: str, what: str, command: str) -> Row:
    mean = result.measured.first_token_mean
    assert mean is not None, "rows are made of runs without failures"
    sources = ", ".join(f"{count} {source}" for source, count in result.sources.items())
    return Row(
        name=f"workload_{name.replace('-', '_')}_{result.arm}_{what}",
        value=round(mean, 4),
        unit="s",
        reference=f"mean TTFT of {against} in s; prompt tokens: {sources}",
        reference_value=round(reference, 4) if reference else None,
        ratio=round(mean / reference, 4) if reference else None,
        runs=result.measured.requests,
        command=command,
    )


def results_as_json(plan: Plan, results: list[Result]) -> dict[str, Any]:
    """Everything, by arm."""
    return {result.arm: {"sources": result.sources, **as_json(plan, result.replies)} for result in results}

"""What a run's replies say: one row per group as text, everything as JSON, and rows among the benchmarks' results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from workload.driver import Reply
from workload.plan import Plan


class Summary(NamedTuple):
    """The replies of one group. Times are in seconds."""

    group: str
    requests: int
    failed: int
    prompt_tokens: int
    answer_tokens: int
    #: None if the server does not report them.
    cached_tokens: int | None
    #: Of the plan's prompt tokens, those that a cache without eviction holds.
    reused_share: float
    #: None if every request failed.
    first_token_mean: float | None
    first_token_p50: float | None
    first_token_p99: float | None
    between_tokens_mean: float | None
    #: From the first request sent to the last answer.
    seconds: float

    @property
    def cached_share(self) -> float | None:
        """Cached tokens of all prompt tokens."""
        if self.cached_tokens is None or not self.prompt_tokens:
            return None
        return self.cached_tokens / self.prompt_tokens


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share of all does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def summaries(plan: Plan, replies: Iterable[Reply]) -> list[Summary]:
    """One per group that has a reply, in the plan's order."""
    every = list(replies)
    made = []
    for group in plan.groups():
        mine = [reply for reply in every if plan.requests[reply.request].group == group]
        if mine:
            made.append(_summary(group, plan, mine))
    return made


def _summary(group: str, plan: Plan, replies: list[Reply]) -> Summary:
    good = [reply for reply in replies if not reply.error]
    first = [reply.first_token for reply in good]
    between = [each for reply in good if (each := reply.between_tokens) is not None]
    cached = [reply.cached_tokens for reply in good if reply.cached_tokens is not None]
    planned = sum(plan.requests[reply.request].prompt_tokens for reply in replies)
    ends = [reply.sent + reply.seconds for reply in replies]
    return Summary(
        group=group,
        requests=len(replies),
        failed=len(replies) - len(good),
        prompt_tokens=sum(reply.prompt_tokens for reply in good),
        answer_tokens=sum(reply.answer_tokens for reply in good),
        cached_tokens=sum(cached) if cached else None,
        reused_share=sum(plan.reused[reply.request] for reply in replies) / planned,
        first_token_mean=statistics.mean(first) if first else None,
        first_token_p50=statistics.median(first) if first else None,
        first_token_p99=percentile(first, 0.99) if first else None,
        between_tokens_mean=statistics.mean(between) if between else None,
        seconds=max(ends) - min(reply.sent for reply in replies),
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with the first column to the left and all others to the right."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    texts = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    texts.insert(1, "-" * len(texts[0]))
    return "\n".join(text.rstrip() for text in texts)


def seconds(value: float | None) -> str:
    """A time for a table."""
    return "-" if value is None else f"{value:.3f} s"


def share(value: float | None) -> str:
    """A share for a table."""
    return "-" if value is None else f"{100 * value:.0f} %"


HEAD = [
    *("requests", "sent", "failed", "prompt tokens", "reusable", "cached", "TTFT mean", "p50", "p99", "per token"),
    *("prompt tokens/s", "answer tokens/s"),
]


def row(summary: Summary) -> list[str]:
    """A line of the table with HEAD."""
    return [
        summary.group,
        str(summary.requests),
        str(summary.failed),
        str(summary.prompt_tokens),
        share(summary.reused_share),
        share(summary.cached_share),
        seconds(summary.first_token_mean),
        seconds(summary.first_token_p50),
        seconds(summary.first_token_p99),
        seconds(summary.between_tokens_mean),
        f"{summary.prompt_tokens / summary.seconds:.0f}" if summary.seconds else "-",
        f"{summary.answer_tokens / summary.seconds:.1f}" if summary.seconds else "-",
    ]


def as_json(plan: Plan, replies: Iterable[Reply]) -> dict[str, Any]:
    """Summaries, and every reply without its text."""
    every = sorted(replies)
    return {
        "groups": [summary._asdict() for summary in summaries(plan, every)],
        "requests": [
            {"group": plan.requests[reply.request].group, **reply._asdict(), "text": len(reply.text)} for reply in every
        ],
    }

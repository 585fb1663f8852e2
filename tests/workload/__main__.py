"""Sends a workload to a server, or to the same vLLM with one cache after the other.

python -m workload long-document --url http://localhost:8000
python -m workload long-document --compare off,local,ours,lmcache
python -m workload check --compare off,ours
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

from bench.results import merge
from demo.progress import main, say
from workload.arms import ARMS, Setup, check_arms, chosen_model, tokens_per_word
from workload.check import Check
from workload.compare import compare, print_table, results_as_json, rows
from workload.driver import Run, Server, check_context, until_interrupted
from workload.plan import Plan, Text
from workload.report import HEAD, as_json, row, summaries, table
from workload.workloads import WORKLOADS, BadOption, Workload, positive

#: Seconds between two phases with a server whose stores cannot be observed.
_PAUSE_SECONDS = 2.0


def _count(text: str) -> int:
    try:
        return positive(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number") from None


def _at_least_0(text: str) -> float:
    if (number := float(text)) < 0:
        raise argparse.ArgumentTypeError(f"{text} is less than 0")
    return number


#: How options are read, by the types of their fields.
_TYPES: dict[type, Callable[[str], Any]] = {int: _count, float: _at_least_0, str: str}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="workload", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, kind in {**WORKLOADS, "check": Check}.items():
        help_text = (kind.__doc__ or "").splitlines()[0]
        command = names.add_parser(name, help=help_text, description=help_text)
        _add_common(command, name)
        types = get_type_hints(kind)
        for each in dataclasses.fields(kind):
            flag = f"--{each.name.replace('_', '-')}"
            if types[each.name] is bool:
                command.add_argument(flag, action="store_true", help=each.metadata["help"])
            else:
                help_text = f"{each.metadata['help']} (%(default)s)" if each.default else each.metadata["help"]
                command.add_argument(flag, type=_TYPES[types[each.name]], default=each.default, help=help_text)
    return parser


def _add_common(command: argparse.ArgumentParser, name: str) -> None:
    target = command.add_mutually_exclusive_group(required=True)
    arms = "; ".join(f"{arm}: {text}" for arm, text in ARMS.items()).replace("%", "%%")
    target.add_argument("--compare", metavar="ARMS", help=f"starts a vLLM for each of these arms. {arms}")
    if name != "check":
        target.add_argument("--url", help="an OpenAI-compatible server")
        kind = WORKLOADS[name]
        flight = f"requests in flight at most ({kind.CONCURRENCY or 'any number'}; any number with --rate)"
        command.add_argument("--concurrency", type=_count, help=flight)
        rate = f"requests per second; 0: when another ends ({kind.RATE:g})"
        command.add_argument("--rate", type=_at_least_0, help=rate)
        command.add_argument("--json", type=Path, metavar="FILE", help="writes everything there")
        command.add_argument("--dtype", default="bfloat16", help="with --compare: dtype of the model (%(default)s)")
    model = "(tiny)" if name == "check" else "(mid); with --url one that it serves (the only one)"
    command.add_argument("--model", help=f"tiny, mid or a folder {model}")
    command.add_argument("--kv-tokens", type=_count, default=0, help="with --compare: tokens in vLLM's own KV cache")
    command.add_argument(
        "--cache-gib", type=_count, default=4, help="with --compare: memory of the cache beside vLLM (%(default)s)"
    )
    command.add_argument("--seed", type=int, default=1, help="of everything that is random (%(default)s)")


def _options(kind: Any, chosen: argparse.Namespace) -> Any:
    return kind(**{each.name: getattr(chosen, each.name) for each in dataclasses.fields(kind)})


def _plan(kind: type[Workload], chosen: argparse.Namespace) -> tuple[Plan, int]:
    """The plan, and the number of requests in flight."""
    plan = _options(kind, chosen).plan(chosen.seed)
    rate = kind.RATE if chosen.rate is None else chosen.rate
    concurrency = kind.CONCURRENCY if chosen.concurrency is None else chosen.concurrency
    if rate > 0:
        plan = plan.with_rate(rate, chosen.seed)
        if chosen.concurrency is None:
            concurrency = 0
    return plan, concurrency


async def _measure(chosen: argparse.Namespace, plan: Plan, concurrency: int) -> int:
    async with Server(chosen.url, chosen.model or "") as server:
        await server.choose_model()
        check_context(plan, server)
        text = Text(chosen.seed, await server.tokens_per_word())
        say(f"{server.model} at {server.url}: {len(plan.requests)} requests, {plan.prompt_tokens} prompt tokens")
        run = Run(plan, text, server, concurrency=concurrency, between=lambda: asyncio.sleep(_PAUSE_SECONDS), say=say)
        ended = await until_interrupted(run)
    print(f"\n{table(HEAD, map(row, summaries(plan, run.replies)))}\n")
    errors = [reply.error for reply in run.replies if reply.error]
    if errors:
        print(f"{len(errors)} failed; the first: {errors[0]}")
    if not ended:
        print(f"stopped after {len(run.replies)} of {len(plan.requests)} requests")
    if chosen.json:
        chosen.json.write_text(json.dumps(as_json(plan, run.replies), indent=1) + "\n")
    return 130 if not ended else 1 if errors else 0


def _compare(chosen: argparse.Namespace, plan: Plan, concurrency: int, arms: list[str]) -> int:
    folder = chosen_model(chosen.model or "mid")
    setup = Setup.for_plan(plan, folder, chosen.dtype, concurrency, chosen.kv_tokens, chosen.cache_gib)
    text = Text(chosen.seed, tokens_per_word(folder))
    results, ended = compare(arms, plan, text, setup, concurrency)
    if not results:
        return 130
    print_table(plan, setup, results)
    if chosen.json:
        chosen.json.write_text(json.dumps(results_as_json(plan, results), indent=1) + "\n")
    errors = [f"{result.arm}: {reply.error}" for result in results for reply in result.replies if reply.error]
    if errors:
        print(f"{len(errors)} failed; the first: {errors[0]}")
    if not ended:
        print("stopped before the end")
        return 130
    if errors:
        return 1
    print()
    merge(rows(chosen.name, results, f"make workload NAME={chosen.name} ARGS='{' '.join(sys.argv[2:])}'"))
    return 0


def _check(chosen: argparse.Namespace, arms: list[str]) -> int:
    check: Check = _options(Check, chosen)
    folder = chosen_model(chosen.model or "tiny")
    ratio = tokens_per_word(folder)
    prompts, labels = check.prompts(chosen.seed, ratio)
    longest = max(len(prompt.split()) for prompt, _ in prompts)
    plan = check.plan(round(longest * max(1.0, ratio) * 1.5))
    setup = Setup.for_plan(plan, folder, "float32", 1, chosen.kv_tokens, chosen.cache_gib)
    return check.run(arms, prompts, labels, setup)


def command() -> int:
    """Returns the exit status: 1 after a failed request or a difference, 130 after Ctrl-C."""
    chosen = _parser().parse_args()
    arms = [arm for arm in (chosen.compare or "").split(",") if arm]
    if chosen.compare is not None:
        check_arms(arms)
    if chosen.name == "check":
        return _check(chosen, arms)
    if chosen.json and not chosen.json.absolute().parent.is_dir():
        raise BadOption(f"--json {chosen.json}: the folder is not there")
    plan, concurrency = _plan(WORKLOADS[chosen.name], chosen)
    if chosen.compare is None:
        return asyncio.run(_measure(chosen, plan, concurrency))
    return _compare(chosen, plan, concurrency, arms)


if __name__ == "__main__":
    main(command)

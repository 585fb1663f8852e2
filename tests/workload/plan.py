"""A workload as data: requests whose prompts consist of named parts, and how much of them a prefix cache could reuse.

A part has the same text wherever its name occurs. A plan therefore needs no text to know which prompts share a prefix.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, NamedTuple

#: w3 to w999 are tokens of the test models. Other tokenizers split them into several. With longer words vLLM would
#: refuse a prompt that just fits a test model, by its number of characters.
_WORDS = range(3, 1000)


class Part(NamedTuple):
    """A piece of a prompt."""

    name: str
    tokens: int


class Answer(NamedTuple):
    """The server's answer to an earlier request, as a piece of a prompt."""

    #: Index of that request in the plan.
    request: int
    tokens: int


class Request(NamedTuple):
    """One request."""

    #: Name of the table row that counts this request.
    group: str
    prompt: tuple[Part | Answer, ...]
    answer_tokens: int
    #: A phase starts when all requests of the one before have ended.
    phase: int = 0
    #: When the request is due, in seconds after the start of its phase. It also waits for answers in its prompt.
    due: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return sum(part.tokens for part in self.prompt)


class Plan:
    """All requests of a workload, in the order in which they are sent."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self.requests = list(requests)
        #: Prompt tokens of each request that an earlier request had as the same prefix, or generated.
        self.reused = self._reuse()
        self.prompt_tokens = sum(request.prompt_tokens for request in self.requests)
        #: Tokens whose KV a cache holds after the whole plan if it evicts nothing.
        self.distinct_tokens = (
            self.prompt_tokens - sum(self.reused) + sum(request.answer_tokens for request in self.requests)
        )
        #: Tokens of the longest prompt with its answer.
        self.longest = max(request.prompt_tokens + request.answer_tokens for request in self.requests)

    def _reuse(self) -> list[int]:
        seen: dict[Part | Answer, Any] = {}
        reused = []
        for index, request in enumerate(self.requests):
            node, tokens, known = seen, 0, True
            for part in (*request.prompt, Answer(index, request.answer_tokens)):
                known = known and part in node
                tokens += part.tokens * known
                node = node.setdefault(part, {})
            reused.append(tokens)
        return reused

    def groups(self) -> list[str]:
        """Names of the groups. The last one is what the workload measures."""
        return list(dict.fromkeys(request.group for request in self.requests))

    def with_rate(self, rate: float, seed: int) -> Plan:
        """The same requests, due at random times with this mean rate per second (a Poisson process) in each phase."""
        chosen = random.Random(f"{seed}/arrivals")
        due: dict[int, float] = {}
        requests = []
        for request in self.requests:
            due[request.phase] = due.get(request.phase, 0.0) + chosen.expovariate(rate)
            requests.append(request._replace(due=due[request.phase]))
        return Plan(requests)


class Text:
    """Texts of parts: random words, a function of the seed and the part alone."""

    def __init__(self, seed: int, tokens_per_word: float = 1.0) -> None:
        self._seed = seed
        self._tokens_per_word = tokens_per_word

    def part(self, part: Part) -> str:
        """A text with about this many tokens."""
        chosen = random.Random(f"{self._seed}/{part.name}")
        count = max(1, round(part.tokens / self._tokens_per_word))
        return " ".join(f"w{chosen.choice(_WORDS)}" for _ in range(count))

    def prompt(self, request: Request, answers: dict[int, str]) -> str:
        """The whole prompt."""
        parts = (answers[part.request] if isinstance(part, Answer) else self.part(part) for part in request.prompt)
        return " ".join(text for text in parts if text)

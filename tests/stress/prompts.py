"""Requests from a prefix tree, determined by the seed."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from servers.models import VOCABULARY

#: Longest answer. The oracle generates as many tokens.
MAX_TOKENS = 10
_LONGEST = 400
_SALTS = ("red", "blue")
_TAGS: tuple[Any, ...] = ("a", ["a", "b"], {"tenant": "a"}, {"tenant": "b"})
#: Options that change what is stored or loaded, but never an answer.
_WISHES: tuple[dict[str, Any], ...] = (
    {"kvcachepool.store": False},
    {"kvcachepool.skip_last_tokens": 50},
    {"kvcachepool.ttl": 1},
    {"max_load_tokens": 96},
    {"max_offload_tokens": 100},
    {"kvcachepool.store": "not a truth value"},
)


class Wanted(NamedTuple):
    """A request before it is sent."""

    prompt: tuple[int, ...]
    max_tokens: int
    salt: str | None
    params: dict[str, Any] | None
    #: Steps after which it is aborted.
    abort_after: int | None


class PrefixTree:
    """Prompts that share beginnings of any length. Some end inside of a block, some inside of a chunk."""

    def __init__(self, chance: random.Random, *, roots: int = 2, prompts: int = 10) -> None:
        self._chance = chance
        self._count = prompts
        self._roots = [self._branch() for _ in range(roots)]
        self._last: list[Wanted] = []
        self.prompts = [self._path() for _ in range(prompts)]

    def _tokens(self, least: int, most: int) -> tuple[int, ...]:
        return tuple(self._chance.randrange(3, VOCABULARY) for _ in range(self._chance.randint(least, most)))

    def _branch(self) -> list[tuple[int, ...]]:
        return [self._tokens(40, 160), *(self._tokens(30, 160) for _ in range(4))]

    def _path(self) -> tuple[int, ...]:
        chance = self._chance
        first, *rest = chance.choice(self._roots)
        # Segments of the same root in any order, so the same tokens also follow other prefixes.
        tokens = first + tuple(token for part in chance.sample(rest, chance.randint(1, 3)) for token in part)
        if chance.random() < 0.3:
            tokens = tokens[: chance.randint(20, len(tokens))]
        return tokens[:_LONGEST]

    def grow(self) -> None:
        """Replaces a third of the prompts, and occasionally a root."""
        chance = self._chance
        if chance.random() < 0.5:
            self._roots[chance.randrange(len(self._roots))] = self._branch()
        for _ in range(self._count // 3):
            self.prompts[chance.randrange(self._count)] = self._path()

    def draw(self) -> Wanted:
        """The next request, often a repetition of a recent one."""
        chance = self._chance
        max_tokens = chance.randint(1, MAX_TOKENS)
        abort_after = chance.randint(0, 8) if chance.random() < 0.12 else None
        if self._last and chance.random() < 0.4:
            return chance.choice(self._last)._replace(max_tokens=max_tokens, abort_after=abort_after)
        params: dict[str, Any] = {}
        if chance.random() < 0.15:
            params |= chance.choice(_WISHES)
        if chance.random() < 0.15:
            params["kvcachepool.tags"] = chance.choice(_TAGS)
        salt = chance.choice(_SALTS) if chance.random() < 0.15 else None
        wanted = Wanted(chance.choice(self.prompts), max_tokens, salt, params or None, abort_after)
        self._last = [*self._last[-5:], wanted]
        return wanted

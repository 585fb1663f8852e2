"""The workloads: each makes a plan from its options and a seed. All tokens and counts are options."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from demo.progress import Failed
from workload.plan import Answer, Part, Plan, Request


class Workload(Protocol):
    """Options of one workload, a frozen dataclass whose docstring is the help of its command."""

    #: Requests per second by default; 0 sends the next request when one ends.
    RATE: ClassVar[float]
    #: Requests in flight by default.
    CONCURRENCY: ClassVar[int]

    def plan(self, seed: int) -> Plan:
        """The requests."""


class BadOption(Failed):
    """An option's value is impossible. The text names the option and what it accepts."""


def positive(text: str) -> int:
    """A number of things of which there is at least one."""
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def option(default: Any, text: str) -> Any:
    """A field with its help."""
    return field(default=default, metadata={"help": text})


def lines_of(file: str) -> list[str]:
    """The lines of the file that --file names."""
    try:
        return Path(file).read_text().splitlines()
    except OSError as error:
        raise BadOption(f"--file {file}: {error.strerror}") from None


@dataclass(frozen=True)
class LongDocument:
    """Questions about long documents, each asked after all documents were read once."""

    RATE: ClassVar[float] = 0.0
    CONCURRENCY: ClassVar[int] = 1
    documents: int = option(8, "documents")
    document_tokens: int = option(4000, "tokens of a document")
    question_tokens: int = option(32, "tokens of a question, which follows the document")
    answer_tokens: int = option(16, "tokens of an answer")
    repeats: int = option(2, "questions about each document after the first")
    order: str = option("tile", "tile: all documents by turns; interleave: repeats in a row; random")

    def plan(self, seed: int) -> Plan:
        """A warm-up that reads every document, then the questions."""
        if self.order not in ("tile", "interleave", "random"):
            raise BadOption(f"--order {self.order}: expected tile, interleave or random")
        asked = [(document, repeat) for repeat in range(1, self.repeats + 1) for document in range(self.documents)]
        if self.order == "interleave":
            asked.sort()
        elif self.order == "random":
            random.Random(seed).shuffle(asked)
        return Plan(
            [self._ask("warm-up", document, 0, 0) for document in range(self.documents)]
            + [self._ask("questions", document, repeat, 1) for document, repeat in asked]
        )

    def _ask(self, group: str, document: int, repeat: int, phase: int) -> Request:
        question = Part(f"question {document}.{repeat}", self.question_tokens)
        return Request(group, (Part(f"document {document}", self.document_tokens), question), self.answer_tokens, phase)


@dataclass(frozen=True)
class MultiDocument:
    """Questions about several documents in one prompt, in any order, after each was read alone."""

    RATE: ClassVar[float] = 0.0
    CONCURRENCY: ClassVar[int] = 2
    documents: int = option(10, "documents")
    document_tokens: int = option(800, "tokens of a document")
    together: int = option(4, "documents in a prompt")
    questions: int = option(16, "questions after the documents were read")
    system_tokens: int = option(200, "tokens of the system prompt, the same in all")
    question_tokens: int = option(32, "tokens of a question")
    answer_tokens: int = option(16, "tokens of an answer")

    def plan(self, seed: int) -> Plan:
        """A warm-up that reads every document alone, then the questions."""
        if self.together > self.documents:
            raise BadOption(f"--together {self.together}: at most --documents ({self.documents})")
        chosen = random.Random(seed)
        asked = [chosen.sample(range(self.documents), self.together) for _ in range(self.questions)]
        return Plan(
            [self._ask("warm-up", [document], f"alone {document}", 0) for document in range(self.documents)]
            + [self._ask("questions", each, f"{number}", 1) for number, each in enumerate(asked)]
        )

    def _ask(self, group: str, documents: list[int], question: str, phase: int) -> Request:
        read = [Part(f"document {document}", self.document_tokens) for document in documents]
        prompt = (Part("system", self.system_tokens), *read, Part(f"question {question}", self.question_tokens))
        return Request(group, prompt, self.answer_tokens, phase)


@dataclass(frozen=True)
class MultiRound:
    """Users in conversations: each round adds the server's own answer and a question to the history."""

    RATE: ClassVar[float] = 0.0
    CONCURRENCY: ClassVar[int] = 2
    users: int = option(8, "users at the same time")
    rounds: int = option(5, "questions of each user")
    system_tokens: int = option(500, "tokens of the system prompt, the same for all users")
    history_tokens: int = option(1000, "tokens that each user's conversation starts with")
    question_tokens: int = option(48, "tokens of a question")
    answer_tokens: int = option(32, "tokens of an answer")

    def plan(self, seed: int) -> Plan:
        """All users by turns."""
        return _conversations(
            self.users,
            self.rounds,
            (Part("system", self.system_tokens),),
            Part("history", self.history_tokens),
            Part("question", self.question_tokens),
            self.answer_tokens,
            ("first rounds", "later rounds"),
        )


@dataclass(frozen=True)
class Agents:
    """Agents that append what their tools return to long prompts, of which some 96 percent is reused."""

    RATE: ClassVar[float] = 0.0
    CONCURRENCY: ClassVar[int] = 2
    sessions: int = option(4, "agents at the same time")
    turns: int = option(20, "turns of each agent")
    system_tokens: int = option(1500, "tokens of the system prompt and tools, the same for all agents")
    task_tokens: int = option(150, "tokens of a task")
    observation_tokens: int = option(75, "tokens that a tool returns in each turn")
    answer_tokens: int = option(12, "tokens of an answer")

    def plan(self, seed: int) -> Plan:
        """All agents by turns."""
        return _conversations(
            self.sessions,
            self.turns,
            (Part("system", self.system_tokens),),
            Part("task", self.task_tokens),
            Part("observation", self.observation_tokens),
            self.answer_tokens,
            ("first turns", "later turns"),
        )


def _conversations(
    users: int,
    rounds: int,
    shared: tuple[Part, ...],
    start: Part,
    addition: Part,
    answer_tokens: int,
    groups: tuple[str, str],
) -> Plan:
    """Conversations by turns: shared parts, one start per user, then an addition and its answer per round."""
    requests: list[Request] = []
    for number in range(rounds):
        for user in range(users):
            added = Part(f"{addition.name} {user}.{number}", addition.tokens)
            if number == 0:
                prompt: tuple[Part | Answer, ...] = (*shared, Part(f"{start.name} {user}", start.tokens), added)
            else:
                before = len(requests) - users
                prompt = (*requests[before].prompt, Answer(before, answer_tokens), added)
            requests.append(Request(groups[number > 0], prompt, answer_tokens))
    return Plan(requests)


@dataclass(frozen=True)
class Rag:
    """Questions with retrieved passages, of which few are popular (Zipf's law), at a fixed mean rate."""

    RATE: ClassVar[float] = 0.25
    CONCURRENCY: ClassVar[int] = 0
    passages: int = option(40, "passages in the collection")
    passage_tokens: int = option(300, "tokens of a passage")
    retrieved: int = option(5, "passages in a prompt")
    questions: int = option(40, "questions")
    system_tokens: int = option(200, "tokens of the system prompt, the same in all")
    question_tokens: int = option(32, "tokens of a question")
    answer_tokens: int = option(16, "tokens of an answer")
    sort: bool = option(False, "passages by popularity instead of by relevance: more prompts share a prefix")

    def plan(self, seed: int) -> Plan:
        """All questions."""
        if self.retrieved > self.passages:
            raise BadOption(f"--retrieved {self.retrieved}: at most --passages ({self.passages})")
        chosen = random.Random(seed)
        weights = [1 / (rank + 1) for rank in range(self.passages)]

        def retrieve() -> list[int]:
            found: dict[int, None] = {}
            while len(found) < self.retrieved:
                found[chosen.choices(range(self.passages), weights)[0]] = None
            return sorted(found) if self.sort else list(found)

        return Plan(
            Request(
                "questions",
                (
                    Part("system", self.system_tokens),
                    *(Part(f"passage {passage}", self.passage_tokens) for passage in retrieve()),
                    Part(f"question {number}", self.question_tokens),
                ),
                self.answer_tokens,
            )
            for number in range(self.questions)
        )


@dataclass(frozen=True)
class Sweep:
    """Time to first token by the length of the prompt: each length once cold, then again."""

    RATE: ClassVar[float] = 0.0
    CONCURRENCY: ClassVar[int] = 1
    lengths: str = option("500,1000,2000,4000,8000", "tokens of the prompts")
    repeats: int = option(3, "times that each prompt is sent again, after all others")

    def plan(self, seed: int) -> Plan:
        """One phase per pass over all lengths."""
        try:
            lengths = [positive(length) for length in self.lengths.split(",")]
        except ValueError:
            raise BadOption(f"--lengths {self.lengths}: expected numbers with commas between them") from None
        return Plan(
            Request(f"{length} tokens, {'again' if repeat else 'cold'}", (Part(f"prompt {length}", length),), 1, repeat)
            for repeat in range(self.repeats + 1)
            for length in lengths
        )


@dataclass(frozen=True)
class Trace:
    """A recorded trace in Mooncake's format: JSON lines with timestamp, input_length, output_length, hash_ids."""

    RATE: ClassVar[float] = 0.0
    CONCURRENCY: ClassVar[int] = 0
    file: str = option("", "the trace")
    requests: int = option(100, "requests from its start")
    block_tokens: int = option(512, "tokens of a hash id; a smaller number shortens all prompts")
    speed: float = option(1.0, "2 sends twice as fast as recorded")

    def plan(self, seed: int) -> Plan:
        """The trace's requests. Hash ids are the parts of the prompts."""
        if not self.file:
            raise BadOption("--file is missing: name a trace")
        return Plan(self._read())

    def _read(self) -> Iterator[Request]:
        lines = lines_of(self.file)[: self.requests]
        if not lines:
            raise BadOption(f"--file {self.file}: it has no requests")
        for number, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                length = entry["input_length"] * self.block_tokens // 512
                hashes, due = entry["hash_ids"], entry["timestamp"] / 1000 / self.speed
                parts = [Part(f"block {name}", self.block_tokens) for name in hashes]
                rest = length - self.block_tokens * (len(parts) - 1)
                yield Request(
                    "requests", (*parts[:-1], parts[-1]._replace(tokens=rest)), entry["output_length"], 0, due
                )
            except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
                raise BadOption(f"{self.file}:{number}: not a line of Mooncake's format ({error!r})") from None


WORKLOADS: dict[str, type[Workload]] = {
    "long-document": LongDocument,
    "multi-document": MultiDocument,
    "multi-round": MultiRound,
    "rag": Rag,
    "sweep": Sweep,
    "agents": Agents,
    "trace": Trace,
}

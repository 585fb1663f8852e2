"""Does a cache change what the model says? Log-probabilities of the answers to multiple-choice questions, as in MMLU.

Each prompt has solved examples of its subject, then a question, and the model's next token is one of four choices. The
first arm is the reference. Every other arm answers all questions twice: while it stores them, and from what it stored
after vLLM forgot its own prefix cache.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from demo.progress import at_work, say
from servers import web
from servers.vllm_server import VllmServer
from workload.arms import Setup, started
from workload.driver import Unusable
from workload.plan import Part, Plan, Request, Text
from workload.report import table
from workload.workloads import BadOption, lines_of, option

_CHOICES = 4
#: Names of choices that the test models' vocabulary has.
_WORDS = ("w11", "w12", "w13", "w14")
_LETTERS = ("A", "B", "C", "D")


class Question(NamedTuple):
    """A question with its right choice."""

    subject: str
    text: str
    choices: list[str]
    answer: int

    def prompt(self, labels: Iterable[str]) -> str:
        """Everything but the answer."""
        choices = "\n".join(f"{label} {choice}" for label, choice in zip(labels, self.choices, strict=True))
        return f"{self.text}\n{choices}\nAnswer:"


class Scores(NamedTuple):
    """The answer to one question."""

    #: Log-probability of each choice.
    choices: list[float]
    cached_tokens: int

    def ranking(self) -> list[int]:
        """Choices, the most probable first."""
        return sorted(range(len(self.choices)), key=lambda choice: -self.choices[choice])


class Difference(NamedTuple):
    """What differs between two passes over the same questions."""

    rankings: int
    largest: float

    @classmethod
    def between(cls, reference: list[Scores], scores: list[Scores]) -> Difference:
        """Rankings that differ, and the largest difference of a log-probability."""
        pairs = list(zip(reference, scores, strict=True))
        return cls(
            sum(one.ranking() != other.ranking() for one, other in pairs),
            max(abs(a - b) for one, other in pairs for a, b in zip(one.choices, other.choices, strict=True)),
        )


@dataclass(frozen=True)
class Check:
    """Compares log-probabilities of answers with and without a cache, in float32. Needs --compare."""

    subjects: int = option(4, "subjects")
    questions: int = option(8, "questions of each subject")
    shots: int = option(5, "solved examples before each question")
    question_tokens: int = option(60, "tokens of a question")
    choice_tokens: int = option(12, "tokens of a choice")
    tolerance: float = option(0.001, "largest difference of a log-probability")
    file: str = option("", "JSON lines with subject, question, choices (4) and answer (0 to 3) instead of made ones")

    def prompts(self, seed: int, tokens_per_word: float) -> tuple[list[tuple[str, Question]], tuple[str, ...]]:
        """Prompts with their questions, and the names of the choices."""
        every = list(self._read() if self.file else self._make(Text(seed, tokens_per_word), seed))
        labels = _LETTERS if self.file else _WORDS
        prompts = []
        for subject in dict.fromkeys(question.subject for question in every):
            mine = [question for question in every if question.subject == subject]
            shots = [f"{shot.prompt(labels)} {labels[shot.answer]}\n\n" for shot in mine[: self.shots]]
            prompts += [(f"{''.join(shots)}{question.prompt(labels)}", question) for question in mine[self.shots :]]
        if not prompts:
            raise BadOption(f"no subject has more questions than --shots ({self.shots})")
        return prompts, labels

    def _make(self, text: Text, seed: int) -> Iterator[Question]:
        chosen = random.Random(f"{seed}/answers")
        for subject in range(self.subjects):
            for number in range(self.shots + self.questions):
                name = f"{subject}.{number}"
                choices = [text.part(Part(f"choice {name}.{choice}", self.choice_tokens)) for choice in range(_CHOICES)]
                question = text.part(Part(f"question {name}", self.question_tokens))
                yield Question(str(subject), question, choices, chosen.randrange(_CHOICES))

    def _read(self) -> Iterator[Question]:
        for number, line in enumerate(lines_of(self.file), 1):
            try:
                entry = json.loads(line)
                question = Question(entry["subject"], entry["question"], entry["choices"], int(entry["answer"]))
                if len(question.choices) != _CHOICES or not 0 <= question.answer < _CHOICES:
                    raise ValueError("expected 4 choices, and an answer of 0 to 3")
            except (ValueError, KeyError, TypeError) as error:
                raise BadOption(f"{self.file}:{number}: not a question ({error!r})") from None
            yield question

    def plan(self, tokens: int) -> Plan:
        """The longest prompt, by which the arms are set up."""
        return Plan([Request("questions", (Part("prompt", tokens),), 1)])

    def run(self, arms: list[str], prompts: list[tuple[str, Question]], labels: tuple[str, ...], setup: Setup) -> int:
        """Runs all arms and prints a table. Returns the exit status."""
        reference: list[Scores] = []
        lines, status = [], 0
        for name in arms:
            with started(name, setup) as arm:
                tokens = _label_tokens(arm.server, prompts[0][0], labels)
                for again in (False, True) if reference else (False,):
                    what = f"{name}, {'from the cache' if again else 'first time'}"
                    with at_work(f"{what}: {len(prompts)} questions"):
                        scores = [_ask(arm.server, prompt, tokens) for prompt, _ in prompts]
                        arm.settle()
                        arm.server.reset_prefix_cache()
                    reference = reference or scores
                    difference = Difference.between(reference, scores)
                    cached = sum(each.cached_tokens for each in scores)
                    if again and not cached:
                        say(f"{name}: nothing was cached, so nothing was compared")
                        status = 1
                    if difference.rankings or difference.largest > self.tolerance:
                        status = 1
                    lines.append(_line(what, scores, [question for _, question in prompts], difference))
        head = ("pass", "questions", "right", "other ranking", "largest difference", "cached tokens")
        print(f"\n{table(head, lines)}\n")
        print(f"Log-probabilities of {_CHOICES} choices beside those of {arms[0]}; tolerance {self.tolerance:g}.")
        print("Equal." if status == 0 else "NOT EQUAL.", flush=True)
        return status


def _line(what: str, scores: list[Scores], questions: list[Question], difference: Difference) -> list[str]:
    right = sum(each.ranking()[0] == question.answer for each, question in zip(scores, questions, strict=True))
    counts = [len(scores), right, difference.rankings]
    cached = sum(each.cached_tokens for each in scores)
    return [what, *map(str, counts), f"{difference.largest:.1e}", str(cached)]


def _post(server: VllmServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, text = web.post(f"{server.url}{path}", {"model": "model", **body})
    if status != 200:
        raise Unusable(f"{path} answered {status}: {text[:300]}")
    answer: dict[str, Any] = json.loads(text)
    return answer


def _label_tokens(server: VllmServer, prompt: str, labels: tuple[str, ...]) -> list[int]:
    """The tokens by which the model names a choice."""
    tokens = [_post(server, "/tokenize", {"prompt": f"{prompt} {label}"})["tokens"][-1] for label in labels]
    if len(set(tokens)) != len(labels):
        raise Unusable(f"the model's tokenizer does not tell {', '.join(labels)} apart by their last token: {tokens}")
    return tokens


def _ask(server: VllmServer, prompt: str, tokens: list[int]) -> Scores:
    # The log-probabilities of a prompt's own tokens would do without a cache: vLLM computes such a prompt anew.
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 1, "logprob_token_ids": tokens}
    answer = _post(server, "/v1/completions", {**body, "return_tokens_as_token_ids": True})
    found = answer["choices"][0]["logprobs"]["top_logprobs"][0]
    details = answer["usage"].get("prompt_tokens_details") or {}
    return Scores([found[f"token_id:{token}"] for token in tokens], details.get("cached_tokens") or 0)

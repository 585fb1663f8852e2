"""The answers of an engine without a connector to the same requests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from servers.engine import Adapter, Engine, Output
from servers.models import model
from stress import adapters
from stress.configs import Config
from stress.prompts import MAX_TOKENS


class Question(NamedTuple):
    """The inputs of an answer: weights by the name of the model, an adapter's content, the prompt."""

    weights: str
    adapter: int | None
    prompt: tuple[int, ...]


class Oracle:
    """One engine per checkpoint. Each question is answered once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._engines: dict[str, Engine] = {}
        self._answers: dict[tuple[str, Question], list[int]] = {}

    def answers(self, config: Config, questions: Iterable[Question]) -> dict[Question, list[int]]:
        """The first tokens of each answer, up to one whose lead is less than the config's margin."""
        kind = config.oracle_name
        asked = set(questions)
        for weights in sorted({question.weights for question in asked}):
            missing = [q for q in asked if q.weights == weights and (kind, q) not in self._answers]
            if missing:
                self._ask(config, weights, missing)
        return {question: self._answers[kind, question] for question in asked}

    def _ask(self, config: Config, weights: str, questions: list[Question]) -> None:
        engine = self._engine(config, weights)
        outputs: dict[str, Output] = {}
        margins: dict[str, list[float]] = {}
        # Some backends give different results for several sequences in a step.
        for batch in [questions] if config.at_once > 1 else [[question] for question in questions]:
            for question in batch:
                number = str(questions.index(question))
                adapter = None
                if question.adapter is not None:
                    folder = self._folder / f"adapter-{question.adapter}"
                    adapters.write(folder, question.adapter)
                    adapter = Adapter(f"content{question.adapter}", question.adapter + 1, str(folder))
                engine.add(number, list(question.prompt), max_tokens=MAX_TOKENS, lora=adapter, margins=True)
            outputs |= engine.run(600)
            margins |= engine.take_margins()
        for index, question in enumerate(questions):
            output, leads = outputs[str(index)], margins[str(index)]
            assert len(output.tokens) == len(leads) == MAX_TOKENS, output
            undecided = (at for at, lead in enumerate(leads) if lead < config.margin)
            self._answers[config.oracle_name, question] = output.tokens[: next(undecided, MAX_TOKENS)]

    def _engine(self, config: Config, weights: str) -> Engine:
        name = f"{config.oracle_name}-{weights}"
        if name not in self._engines:
            log = self._folder / f"oracle-{name}.log"
            # The code for log probabilities would be compiled for half a minute.
            self._engines[name] = Engine(
                None,
                model(weights),
                log,
                env={"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"},
                **config.oracle_arguments,
            )
        return self._engines[name]

    def stop(self) -> None:
        """Ends all engines."""
        for engine in self._engines.values():
            engine.stop()

"""Measures the prefill speed of this engine. The sidecar compares it with loads from lower tiers."""

from __future__ import annotations

from collections.abc import Mapping

from .requests import RequestState

#: A step counts if at least this part of its tokens are prompt tokens, and at least this many. The time of a decode
#: step has other causes.
_PROMPT_SHARE = 0.75
_LEAST_TOKENS = 64
#: Minimum steps for an answer, and the weight of the past with each further step.
_LEAST_STEPS = 3
_FADES = 0.9
#: A step that takes this long was delayed by something else.
_LONGEST_S = 60.0
#: Maximum scheduled steps whose end is unknown. vLLM has two at most.
_MOST_OPEN = 8


class PrefillSpeed:
    """Prompt tokens per second of steps that are mostly prefill. For the engine's thread only.

    The time of a step starts when it was scheduled, or when the step before it ended, because asynchronous scheduling
    waits for that one.

    due: number of the last scheduled step until it is sent, 0 if its end need not be reported.
    """

    def __init__(self) -> None:
        self._open: dict[int, tuple[float, int]] = {}
        self._number = 0
        self.due = 0
        self._ended_s = 0.0
        self._steps = 0
        self._tokens = 0.0
        self._seconds = 0.0

    def step(
        self, now_s: float, scheduled: Mapping[str, int], all_tokens: int, requests: Mapping[str, RequestState]
    ) -> None:
        """A step with these numbers of tokens by request was scheduled. Sets `due` if it computes prompts."""
        tokens = 0
        if all_tokens <= 2 * len(scheduled):
            return  # decode
        for request_id, count in scheduled.items():
            state = requests.get(request_id)
            if state is not None and state.request.num_computed_tokens + count <= state.request.num_prompt_tokens:
                tokens += count
        self.due = self.began(now_s, tokens, all_tokens)

    def began(self, now_s: float, prompt_tokens: int, all_tokens: int) -> int:
        """A step was scheduled. Returns the number for `ended`, or 0 if its end need not be reported."""
        if prompt_tokens < _LEAST_TOKENS or prompt_tokens < _PROMPT_SHARE * all_tokens:
            return 0
        self._number += 1
        self._open[self._number] = (now_s, prompt_tokens)
        while len(self._open) > _MOST_OPEN:
            del self._open[next(iter(self._open))]
        return self._number

    def ended(self, now_s: float, number: int) -> None:
        """A step ended. `number` is the result of `began`."""
        begun = self._open.pop(number, None)
        if begun is not None:
            seconds = now_s - max(begun[0], self._ended_s)
            if 0 < seconds <= _LONGEST_S:
                self._steps += 1
                self._tokens = _FADES * self._tokens + begun[1]
                self._seconds = _FADES * self._seconds + seconds
        self._ended_s = now_s

    @property
    def tokens_per_s(self) -> int:
        """Tokens per second, 0 if there are too few measurements."""
        if self._steps < _LEAST_STEPS:
            return 0
        return max(1, round(self._tokens / self._seconds))

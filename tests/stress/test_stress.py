"""Two minutes of `make stress`: it sees every kind of event, not every order of them."""

from __future__ import annotations

from datetime import date

from stress.configs import short_run
from stress.run import stress


def test_every_answer_is_that_of_an_engine_without_a_cache_while_everything_fails() -> None:
    stress(120, 1, short_run(date.today().toordinal()))

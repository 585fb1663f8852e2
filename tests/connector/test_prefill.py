"""How fast an engine prefills, by the times of its steps."""

from __future__ import annotations

from kvcachepool.prefill import PrefillSpeed


def steps(speed: PrefillSpeed, count: int, *, tokens: int = 1000, seconds: float = 0.5, begin_s: float = 0.0) -> float:
    """This many steps, each scheduled at the end of the one before. Returns the end of the last one."""
    now_s = begin_s
    for _ in range(count):
        number = speed.began(now_s, tokens, tokens)
        now_s += seconds
        speed.ended(now_s, number)
    return now_s


def test_the_speed_is_known_after_three_steps() -> None:
    speed = PrefillSpeed()
    end_s = steps(speed, 2)
    assert speed.tokens_per_s == 0
    steps(speed, 1, begin_s=end_s)
    assert speed.tokens_per_s == 2000


def test_a_step_that_waits_for_the_one_before_starts_at_its_end() -> None:
    speed = PrefillSpeed()
    waiting = speed.began(0.0, 1000, 1000)
    for end_s in (1.0, 2.0, 3.0, 4.0):
        running, waiting = waiting, speed.began(end_s - 0.999, 1000, 1000)
        speed.ended(end_s, running)
    assert speed.tokens_per_s == 1000


def test_a_decode_step_is_not_timed_but_ends_the_time_of_the_step_before() -> None:
    speed = PrefillSpeed()
    assert speed.began(0.0, 0, 30) == 0
    assert speed.began(0.0, 40, 70) == 0
    assert speed.began(0.0, 100, 300) == 0
    numbers = [speed.began(0.0, 100, 100)]
    speed.ended(5.0, 0)
    speed.ended(6.0, numbers[0])
    steps(speed, 2, tokens=100, seconds=1.0, begin_s=6.0)
    assert speed.tokens_per_s == 100


def test_unmatched_steps_and_ends_are_ignored() -> None:
    speed = PrefillSpeed()
    for _ in range(100):
        speed.began(0.0, 1000, 1000)
    assert len(speed._open) == 8
    for number in range(200):
        speed.ended(0.0, number)
    assert speed.tokens_per_s == 0


def test_a_delayed_step_does_not_count() -> None:
    speed = PrefillSpeed()
    end_s = steps(speed, 3)
    steps(speed, 1, seconds=3600, begin_s=end_s)
    assert speed.tokens_per_s == 2000

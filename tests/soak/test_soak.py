"""Two minutes of `make soak`: a leak of bytes shows after half an hour, one of a slot or a buffer here."""

from __future__ import annotations

from bench.soak import MODELS, soak

#: Tolerance for fluctuations of the allocator in this time.
GROWTH_PERCENT_MAX = 15


def test_memory_is_stable_and_all_bytes_correct_while_tiers_work_and_fail() -> None:
    soaked = soak(120)
    assert soaked.growth_percent < GROWTH_PERCENT_MAX, soaked
    for model in MODELS:
        assert soaked.done[f"loaded_chunks_{model.chunk}"] > 0, soaked
        assert soaked.done[f"stored_chunks_{model.chunk}"] > 0, soaked
    for tier in ("disk", "redis", "s3"):
        assert soaked.done[f"{tier}_get"] > 0, soaked
        assert soaked.done[f"{tier}_put"] > 0, soaked

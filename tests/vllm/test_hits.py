"""A repeated prompt is loaded instead of computed, with the same tokens."""

from __future__ import annotations

from collections.abc import Callable

from servers.engine import by_source
from servers.models import token_ids
from servers.pod import BLOCK, Pod
from servers.waiting import wait_for

Truth = Callable[..., list[int]]


def test_cold_local_and_warm_give_the_same_tokens(pod: Pod, truth: Truth) -> None:
    prompt = token_ids(2000, 11)
    cold = pod.generate(prompt)
    local = pod.generate(prompt)
    warm = pod.generate_again(prompt)
    assert (cold.computed, cold.local, cold.external) == (2000, 0, 0)
    assert (local.computed, local.local, local.external) == (80, 1920, 0)
    assert (warm.computed, warm.local, warm.external) == (80, 0, 1920)
    assert cold.tokens == local.tokens == warm.tokens == truth(prompt)


def test_hit_counts_match_on_both_sides(pod: Pod) -> None:
    prompt = token_ids(1500, 12)
    pod.generate(prompt)
    before = pod.sidecar.metrics()
    warm = pod.generate_again(prompt)

    def grown(name: str, **labels: str) -> float:
        now = pod.sidecar.metrics()
        return now.total(f"kvcachepool_{name}", **labels) - before.total(f"kvcachepool_{name}", **labels)

    assert warm.external == 1408
    # The connector reports several times a second.
    wait_for(lambda: grown("hit_tokens_total", tier="memory") == warm.external, 10, "the hit in the sidecar's metrics")
    wait_for(
        lambda: grown("requested_tokens_total") == grown("hit_tokens_total") + grown("miss_tokens_total"),
        10,
        "requested = hit + miss",
    )
    assert grown("requested_tokens_total") >= 1500


def test_bits_that_flip_in_memory_are_never_served(pod: Pod, truth: Truth) -> None:
    prompt = token_ids(2000, 35)
    try:
        pod.generate(prompt)
        before = pod.sidecar.metrics().total("kvcachepool_corrupt_chunks_total")
        assert pod.sidecar.flip_memory()
        flipped = pod.generate_again(prompt)
        assert flipped.tokens == truth(prompt)
        assert (flipped.computed, flipped.external) == (2000, 0)
        assert pod.sidecar.metrics().total("kvcachepool_corrupt_chunks_total") == before + 8
        again = pod.generate_again(prompt)
        assert (again.external, again.tokens) == (1920, truth(prompt))
    finally:
        # After a start every chunk is verified, so other tests do not read the flipped bits.
        pod.sidecar.kill_engine()


def test_a_prompt_of_whole_chunks_computes_one_block_at_most(pod: Pod, truth: Truth) -> None:
    prompt = token_ids(2048, 13)
    pod.generate(prompt)
    warm = pod.generate_again(prompt)
    assert warm.computed <= BLOCK
    assert warm.tokens == truth(prompt)


def test_local_hits_are_not_loaded(pod: Pod, truth: Truth) -> None:
    prefix, rest = token_ids(1024, 14), token_ids(1976, 15)
    pod.generate(prefix + rest)
    pod.engine.reset()
    # Shorter than minLoadTokens beyond the boundary, so vLLM computes it, and then it is local.
    pod.generate(prefix + token_ids(64, 16))
    answer = pod.generate(prefix + rest)
    assert answer.local == 1024
    assert answer.external == 2944 - 1024
    assert answer.tokens == truth(prefix + rest)


def test_the_next_turn_of_a_conversation_hits_the_turn_before(pod: Pod, truth: Truth) -> None:
    turn = token_ids(1700, 17)
    first = pod.generate(turn, max_tokens=16)
    longer = turn + first.tokens + token_ids(300, 18)
    answer = pod.generate_again(longer)
    assert answer.external == 1536
    assert answer.tokens == truth(longer)


def test_prompt_longer_than_a_step_is_stored_step_by_step(pod: Pod, truth: Truth) -> None:
    prompt = token_ids(6000, 19)
    cold = pod.generate(prompt)
    warm = pod.generate_again(prompt)
    assert cold.computed == 6000
    assert warm.external == 5888
    assert cold.tokens == warm.tokens == truth(prompt)


def test_eight_prompts_at_once(pod: Pod, truth: Truth) -> None:
    prompts = {f"p{n}": token_ids(1000 + 130 * n, 20 + n) for n in range(8)}

    def round_of_all() -> tuple[dict[str, list[int]], dict[str, int]]:
        before = pod.engine.counters()
        for name, prompt in prompts.items():
            pod.engine.add(name, prompt)
        outputs = {name: output.tokens for name, output in pod.engine.run().items()}
        pod.engine.drain()
        pod.settle()
        return outputs, by_source(before, pod.engine.counters())

    cold, _ = round_of_all()
    pod.engine.reset()
    warm, sources = round_of_all()
    assert cold == warm == {name: truth(prompt) for name, prompt in prompts.items()}
    assert sources["external"] == sum(len(prompt) // BLOCK * BLOCK for prompt in prompts.values())


def test_two_equal_prompts_at_once_load_once(pod: Pod, truth: Truth) -> None:
    prompt = token_ids(2000, 31)
    pod.generate(prompt)
    pod.engine.reset()
    before = pod.engine.counters()
    pod.engine.add("first", prompt)
    pod.engine.add("second", prompt)
    outputs = pod.engine.run()
    pod.engine.drain()
    sources = by_source(before, pod.engine.counters())
    assert [outputs[name].tokens for name in ("first", "second")] == [truth(prompt)] * 2
    assert sources["external"] == sources["local"] == 1920


def test_salted_and_tagged_prompts_share_only_with_their_own(pod: Pod, truth: Truth) -> None:
    prompt = token_ids(1500, 32)
    pod.generate(prompt, salt="red")
    other = pod.generate_again(prompt, salt="blue")
    same = pod.generate_again(prompt, salt="red")
    assert (other.external, same.external) == (0, 1408)
    tags = {"kvcachepool.tags": {"tenant": "a"}}
    tagged = pod.generate_again(prompt, params=tags)
    again = pod.generate_again(prompt, params=tags)
    foreign = pod.generate_again(prompt, params={"kvcachepool.tags": {"tenant": "b"}})
    assert (tagged.external, again.external, foreign.external) == (0, 1408, 0)
    assert {tuple(a.tokens) for a in (other, same, tagged, again, foreign)} == {tuple(truth(prompt))}


def test_controls_of_a_request(pod: Pod, truth: Truth) -> None:
    prompt = token_ids(2000, 33)
    pod.generate(prompt, params={"kvcachepool.store": False})
    unstored = pod.generate_again(prompt, params={"kvcachepool.skip_last_tokens": 1000})
    shorter = pod.generate_again(prompt, params={"kvcachepool.store": "yes", "kvcachepool.ttl": []})
    capped = pod.generate_again(prompt, params={"max_load_tokens": 1024})
    assert unstored.external == 0
    assert shorter.external in (768, 896)
    assert capped.external == 1024
    assert unstored.tokens == shorter.tokens == capped.tokens == truth(prompt)


def test_external_reset_forgets_without_a_sidecar_restart(pod: Pod, truth: Truth) -> None:
    prompt = token_ids(1500, 34)
    pod.generate(prompt)
    pod.engine.reset(external=True)
    after = pod.generate(prompt)
    again = pod.generate_again(prompt)
    assert (after.external, again.external) == (0, 1408)
    assert after.tokens == again.tokens == truth(prompt)


def test_aborted_while_loading_then_sent_again(pod: Pod, truth: Truth) -> None:
    prompt = token_ids(3000, 35)
    pod.generate(prompt)
    pod.engine.reset()
    pod.engine.add("gone", prompt)
    while pod.engine.states().get("gone") == "WAITING":
        pod.engine.step()
    assert pod.engine.states()["gone"] == "WAITING_FOR_REMOTE_KVS"
    pod.engine.abort("gone")
    before = pod.engine.counters()
    pod.engine.add("again", prompt)
    output = pod.engine.run()["again"]
    pod.engine.drain()
    assert output.tokens == truth(prompt)
    assert by_source(before, pod.engine.counters())["external"] >= 2944 - BLOCK
    pod.settle()
    assert pod.sidecar.status()["memory"]["leased_bytes"] == 0


def test_aborted_at_every_step_leaves_nothing_behind(pod: Pod, truth: Truth) -> None:
    prompt = token_ids(5000, 36)
    for steps in range(4):
        pod.engine.add(f"gone{steps}", prompt)
        for _ in range(steps):
            pod.engine.step()
        pod.engine.abort(f"gone{steps}")
        pod.engine.drain()
        pod.engine.reset()
    pod.settle()
    assert pod.generate(prompt).tokens == truth(prompt)
    assert pod.generate_again(prompt).tokens == truth(prompt)
    assert pod.sidecar.status()["memory"]["leased_bytes"] == 0

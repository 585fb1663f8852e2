"""Transfer mode `Engine`: a worker's own copies between KV blocks and the arena, in vLLM's context."""

from __future__ import annotations

from typing import Any

from gpu import place

ROW_BYTES = 4096
ARENA_BYTES = 64 << 20


class EngineCopies(place.OnDevice):
    """One copier for a KV cache in each layout of the table."""

    def setUp(self) -> None:
        from bench.copies import new_mapping

        self.mapping = new_mapping(ARENA_BYTES)
        self.addCleanup(self.mapping.close)

    def arena(self) -> Any:
        import numpy as np

        return np.frombuffer(self.mapping.arena_buffer(), dtype=np.uint8)

    def copier(self, layout: Any) -> Any:
        made = place.copier(layout)
        made.attach(self.mapping)
        self.addCleanup(made.detach)
        made.begin_thread()
        return made

    def copied(self, made: Any, kind: str, numbers: list[int], offsets: list[int], event: Any = None) -> None:
        import torch

        from kvcachepool.pieces import Piece

        with torch.inference_mode():
            made.copy(kind, [Piece(0, numbers, offsets)], event)

    def there_and_back(self, layout: Any, made: Any) -> None:
        """Stores three blocks and loads them into others. Checks all bytes, including those that must not change."""
        offsets = [3 * ROW_BYTES, 1 << 20, (1 << 20) + place.BLOCK_BYTES]
        arena = self.arena()
        before = arena.copy()
        wanted = place.contents(layout)
        self.copied(made, "store", [7, 2, 23], offsets)
        for number, offset in zip((7, 2, 23), offsets, strict=True):
            before[offset : offset + place.BLOCK_BYTES] = list(wanted[number])
        assert (arena == before).all(), "a store writes its sections and nothing else"
        self.copied(made, "load", [4, 5, 9], offsets)
        for number, origin in ((4, 7), (5, 2), (9, 23)):
            wanted[number] = wanted[origin]
        assert place.contents(layout) == wanted, "a load writes its blocks and nothing else"
        assert (arena == before).all()

    def page_locked(self, made: Any) -> None:
        place.wait_for(lambda: made._locks._done.any() or made._locks._failed, 30, "a page lock")

    def test_bytes_are_the_same_in_every_layout_before_and_after_the_arena_is_page_locked(self) -> None:
        import torch

        for name in place.layouts():
            with self.subTest(layout=name):
                layout = place.kv_cache(name)
                made = self.copier(layout)
                self.there_and_back(layout, made)
                if place.device() == "cuda":
                    self.page_locked(made)
                    assert not made._locks._failed, "the driver refused to page-lock the arena"
                    with torch.inference_mode():
                        layout.storages[0].copy_(place.noise(layout.storages[0].numel(), 2))
                    self.there_and_back(layout, made)
                made.detach()

    def test_adjacent_runs_across_segments_are_copied_before_and_after_page_locking(self) -> None:
        import torch

        from bench.copies import new_mapping

        layout = place.kv_cache("BLHNC")
        numbers = list(range(place.BLOCKS))
        offsets = [number * place.BLOCK_BYTES for number in numbers]
        self.mapping = new_mapping(place.BLOCKS * place.BLOCK_BYTES, segments=3)
        self.addCleanup(self.mapping.close)
        made = self.copier(layout)
        wanted = place.contents(layout)
        for _ in range(2):
            self.arena()[:] = 0
            self.copied(made, "store", numbers, offsets)
            assert self.arena().tobytes() == b"".join(wanted)
            with torch.inference_mode():
                layout.storages[0].zero_()
            self.copied(made, "load", numbers, offsets)
            assert place.contents(layout) == wanted
            if place.device() == "cuda":
                place.wait_for(lambda: made._locks._done.all() or made._locks._failed, 30, "the page locks")
                assert not made._locks._failed, "the driver refused to page-lock the arena"

    def test_a_closed_copier_leaves_no_page_lock(self) -> None:
        layout = place.kv_cache("BLHNC")
        for _ in range(2):
            made = self.copier(layout)
            self.there_and_back(layout, made)
            made.detach()
        if place.device() == "cuda":
            import torch

            runtime = torch.cuda.cudart()
            assert int(runtime.cudaHostRegister(self.mapping.arena_address, ARENA_BYTES, 0)) == 0
            assert int(runtime.cudaHostUnregister(self.mapping.arena_address)) == 0

    def test_a_store_waits_for_the_event_after_the_models_work(self) -> None:
        if place.rehearsal():
            self.skipTest("Rehearsal: work in host memory is done when it is asked for")
        import torch

        layout = place.kv_cache("LBHNC")
        made = self.copier(layout)
        fresh = place.noise(layout.storages[0].numel(), 3).to("cuda")
        torch.cuda.synchronize()
        # A few tenths of a second of work, then the bytes that the store must see.
        torch.cuda._sleep(500_000_000)
        with torch.inference_mode():
            layout.storages[0].copy_(fresh)
        event = made.record()
        assert not event.query(), "the work is still to be done"
        self.copied(made, "store", [6], [0], event)
        assert event.query()
        assert self.arena()[: place.BLOCK_BYTES].tobytes() == place.content(layout, 6)

    def test_a_failed_copy_ends_and_the_next_one_succeeds(self) -> None:
        if place.rehearsal():
            self.skipTest("Rehearsal: host memory has no driver that refuses")
        layout = place.kv_cache("LHBNC")
        made = self.copier(layout)
        submit, calls = made._submit, []

        def refuses(*arguments: Any) -> None:
            calls.append(arguments)
            submit(*arguments)
            raise RuntimeError("no such luck")

        made._submit = refuses
        with self.assertRaisesRegex(RuntimeError, "no such luck"):  # noqa: PT027, there is no pytest here
            self.copied(made, "store", [3, 4], [0, place.BLOCK_BYTES])
        assert len(calls) == 1
        made._submit = submit
        made.synchronize()
        self.there_and_back(layout, made)

"""Transfer mode `CudaWindow`: copies through a window of the real sidecar, without vLLM."""

from __future__ import annotations

import hashlib
import shutil
from typing import Any, ClassVar

from gpu import place
from gpu.rank import CHUNK_BLOCKS, Rank


class Window(place.OnDevice):
    """A sidecar for all tests, and an engine per test."""

    needs = ("msgspec",)
    sidecar: ClassVar[Any]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        from servers import paths
        from servers.sidecar import Sidecar

        folder = paths.short_folder()
        cls.addClassCleanup(shutil.rmtree, folder, ignore_errors=True)
        transfer = {"mode": "CudaWindow", "windowSize": "32Mi"}
        memory = {"evictionPolicy": "FIFO"}
        cls.sidecar = Sidecar(folder / "pod", memory="128Mi", config={"memory": memory, "transfer": transfer})
        cls.addClassCleanup(cls.sidecar.stop)
        cls.sidecar.start()

    def rank(self, name: str) -> tuple[Any, Rank]:
        layout = place.kv_cache(name)
        rank = Rank(self.sidecar, layout)
        self.addCleanup(rank.close)
        assert rank.reasons == [], "there is no window"
        return layout, rank

    def there_and_back(self, name: str, seed: str) -> None:
        layout, rank = self.rank(name)
        hashes = [hashlib.sha256(f"{seed} {i}".encode()).digest() for i in range(3)]
        wanted = place.contents(layout)
        stored, others = [(7, 2), (23, 1), (5, 6)], [(4, 3), (9, 10), (22, 11)]
        rank.store(hashes, stored)
        rank.load(hashes, others, f"{seed} load")
        for into, origin in zip(others, stored, strict=True):
            for number, source in zip(into, origin, strict=True):
                wanted[number] = wanted[source]
        assert place.contents(layout) == wanted
        memory = rank.live.memory
        if not place.rehearsal():
            pieces = {plane.nbytes for plane in layout.groups[0].planes}
            assert (memory._kernels is not None) == (max(pieces) < 28 << 10), "small pieces are the kernels' business"
        assert memory.no_kernels == "", "and stayed it"
        rank.close()

    def test_bytes_copied_through_the_window_are_unchanged_in_every_layout(self) -> None:
        before = self.moved()
        for name in place.layouts():
            with self.subTest(layout=name):
                self.there_and_back(name, f"layout {name}")
        nbytes = 2 * 3 * CHUNK_BLOCKS * place.BLOCK_BYTES * len(place.layouts())
        assert self.moved() - before == nbytes, "all bytes went by the window"

    def moved(self) -> float:
        return float(self.sidecar.metrics().total("kvcachepool_window_copied_bytes_total"))

    def test_the_location_of_the_window_is_logged(self) -> None:
        _, rank = self.rank("BLHNC")

        def reported() -> Any:
            # Sessions of ended engines may still exist without a window.
            sessions = self.sidecar.status()["sessions"]
            return next((session for session in sessions if session.get("transfer") == "cuda_window"), None)

        worker = place.wait_for(reported, 20, "a session with a window")
        where = "host memory" if place.rehearsal() else "memory of "
        assert worker["transfer_reason"].startswith(where), worker["transfer_reason"]
        assert rank.live.memory.where == ("host memory" if place.rehearsal() else "device memory")

    def test_a_store_waits_for_the_event_after_the_models_work(self) -> None:
        if place.rehearsal():
            self.skipTest("Rehearsal: work in host memory is done when it is asked for")
        import torch

        layout, rank = self.rank("LBHNC")
        hashes = [hashlib.sha256(b"behind an event").digest()]
        fresh = place.noise(layout.storages[0].numel(), 5).to("cuda")
        torch.cuda.synchronize()
        torch.cuda._sleep(500_000_000)
        with torch.inference_mode():
            layout.storages[0].copy_(fresh)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream())
        assert not event.query(), "the work is still to be done"
        rank.store(hashes, [(3, 4)], event)
        rank.load(hashes, [(8, 9)], "behind an event")
        assert place.content(layout, 8) + place.content(layout, 9) == place.content(layout, 3) + place.content(
            layout, 4
        )

    def test_a_new_window_follows_the_death_of_the_engine_process(self) -> None:
        _, rank = self.rank("LBNHC")
        rank.close()
        self.sidecar.kill_engine()
        self.sidecar.wait_ready()
        self.there_and_back("LBNHC", "after a death")

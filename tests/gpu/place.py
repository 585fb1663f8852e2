"""Location of a test's KV blocks: the first GPU, or host memory in a rehearsal."""

from __future__ import annotations

import importlib
import itertools
import math
import os
import sys
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

    from kvcachepool.layout import Layout

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "sidecar" / "connector"))
# Fallbacks for modules that a Python with torch may lack.
sys.path += filter(None, [os.environ.get("KVCACHEPOOL_WHEELS")])

BLOCKS = 24
#: Sizes of a block in the layouts: layers, KV heads, states, bytes of a state.
LAYERS, HEADS, STATES, STATE_BYTES = 4, 2, 16, 512
BLOCK_BYTES = LAYERS * HEADS * STATES * STATE_BYTES


def rehearsal() -> bool:
    """Whether host memory replaces the device."""
    return os.environ.get("KVCACHEPOOL_GPU_REHEARSAL") == "1"


def missing(*more: str) -> str:
    """Why tests with torch, numpy and these modules cannot run here, by name. Empty if they can."""
    for module in ("torch", "numpy", *more):
        try:
            importlib.import_module(module)
        except ImportError as error:
            return f"No{module.capitalize()}: {error}"
    if rehearsal():
        return ""
    import torch

    if not torch.cuda.is_available():
        return "NoDevice: torch sees no CUDA device"
    from kvcachepool.copy_cuda import batch_submit
    from kvcachepool.layout import Unserved

    try:
        batch_submit()
    except Unserved as error:
        return str(error)
    return ""


class OnDevice(unittest.TestCase):
    """Skips by name where there is no device, or a module is missing."""

    #: Modules beside torch and numpy.
    needs: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def setUpClass(cls) -> None:
        if why := missing(*cls.needs):
            raise unittest.SkipTest(why)
        import torch

        # The first test reports an unusable device.
        torch.zeros(1, device=device())


def device() -> str:
    """torch's name of the device."""
    return "cpu" if rehearsal() else "cuda"


def device_uuid() -> str:
    """The UUID that a worker reports to the sidecar."""
    if rehearsal():
        return ""
    import torch

    return str(torch.cuda.get_device_properties(0).uuid)


def copier(layout: Layout) -> Any:
    """The copier between these KV blocks and an arena."""
    if rehearsal():
        from kvcachepool.copy_cpu import CpuCopier

        return CpuCopier(layout)
    from kvcachepool.copy_cuda import CudaCopier

    return CudaCopier(layout, lambda event: None)


def layouts() -> list[str]:
    """Names of all supported layouts of the table."""
    from kvcachepool.layout import table

    return [name for name, row in table()["layouts"].items() if row["served"] and name == row["name"]]


def kv_cache(name: str, blocks: int = BLOCKS, state_bytes: int = STATE_BYTES) -> Layout:
    """A KV cache that is densely filled in a layout of the table, with distinct bytes."""
    import torch

    from kvcachepool.layout import GroupLayout, GroupShape, Layout, Plane, ShardOf, table

    order = table()["layouts"][name]["order"]
    extents = {"L": LAYERS, "H": HEADS, "N": STATES, "C": state_bytes}
    block_bytes = math.prod(extents.values())
    # The dimensions left of B select a piece of a block, and those right of it are its bytes.
    pieces = math.prod(extents[dim] for dim in itertools.takewhile(lambda dim: dim != "B", order))
    nbytes = block_bytes // pieces
    planes = tuple(Plane(0, piece * nbytes * blocks, nbytes, nbytes) for piece in range(pieces))
    with torch.inference_mode():
        storage = noise(blocks * block_bytes, 1).to(device())
    group = GroupLayout(GroupShape("full", STATES, 1, 0), ShardOf(0, True), planes)
    return Layout((storage,), blocks, (group,), device(), {"layout": name, "order": order})


def noise(nbytes: int, seed: int) -> torch.Tensor:
    """Random bytes in host memory."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def content(layout: Layout, number: int) -> bytes:
    """The bytes of one block in section order."""
    if device() == "cuda":
        import torch

        torch.cuda.synchronize()
    raw = layout.storages[0].cpu().numpy().tobytes()
    planes = layout.groups[0].planes
    return b"".join(raw[plane.offset + number * plane.block_stride :][: plane.nbytes] for plane in planes)


def contents(layout: Layout) -> list[bytes]:
    """The bytes of all blocks."""
    return [content(layout, number) for number in range(layout.num_blocks)]


def wait_for(found: Callable[[], Any], seconds: float, what: str) -> Any:
    """Polls until `found` returns something true."""
    from servers.waiting import wait_for as wait

    return wait(found, seconds, what)

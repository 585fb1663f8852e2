"""Whether every rank of an engine over several nodes has this connector, in the same version.

Each node's vLLM decides by itself whether it has a connector. With one on some ranks only, vLLM hangs or fails:
creating it is a collective call, and its messages are of classes that other ranks cannot load. So before the ranks
create it, they agree by the key-value store of vLLM's process group. That needs nothing of ranks that do not take part.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import itertools
import logging
import sys
from collections.abc import Callable
from importlib import resources
from typing import Any

from .layout import nodes_of

logger = logging.getLogger("kvcachepool")

#: All ranks create their connectors in the same call of the engine, so they differ by less.
WAIT_S = 20.0
_MARK = "_kvcachepool_original"
_YES, _NO = "yes", "no"
_calls = itertools.count()


@functools.cache
def form() -> str:
    """Digest of the modules whose classes vLLM's steps carry between nodes. Other versions may not be able to load
    them.
    """
    files = resources.files(__package__)
    modules = ("connection.py", "jobs.py", "messages.py", "nodes.py", "wire.py")
    return hashlib.sha256(b"".join(files.joinpath(name).read_bytes() for name in modules)).hexdigest()


def agree(store: Any, engine: str, rank: int, ranks: int, version: str, wait_s: float = WAIT_S) -> bool:
    """Whether all ranks have called this with the same version, the same answer on all of them.

    Args:
        store: a `torch.distributed.Store` of all ranks.
        engine: tells apart the engines that share the store.
    """
    prefix = f"kvcachepool/{engine}"
    decision = f"{prefix}/decision"
    proposal = _NO
    try:
        store.set(f"{prefix}/{rank}", version)
        keys = [f"{prefix}/{other}" for other in range(ranks)]
        store.wait(keys, datetime.timedelta(seconds=wait_s))
        if {bytes(store.get(key)) for key in keys} == {version.encode()}:
            proposal = _YES
        else:
            logger.warning("the nodes have different versions of the KV cache pool's connector")
    except Exception as error:
        logger.debug("waiting for all ranks failed: %s", error)
    # The first proposal counts, so that a rank that comes late does not decide otherwise.
    return bool(store.compare_set(decision, "", proposal) == _YES.encode())


def guard(is_ours: Callable[[Any], bool], report: Callable[[str], None]) -> None:
    """Lets vLLM's workers create this connector only if all ranks of the engine do.

    Args:
        is_ours: whether this is the only connector of a KVTransferConfig.
        report: called with the reason if there is none.
    """
    from vllm.distributed.kv_transfer import kv_transfer_state

    form()  # of the files that this process has loaded
    original = kv_transfer_state.ensure_kv_transfer_initialized
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def ensure_kv_transfer_initialized(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        if nodes_of(vllm_config) > 1 and is_ours(vllm_config.kv_transfer_config) and not _all_have_it(vllm_config):
            report("NodeWithoutConnector")
            return None
        return original(vllm_config, *args, **kwargs)

    setattr(ensure_kv_transfer_initialized, _MARK, original)
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.") and vars(module).get("ensure_kv_transfer_initialized") is original:
            module.ensure_kv_transfer_initialized = ensure_kv_transfer_initialized  # type: ignore[attr-defined]


def _all_have_it(vllm_config: Any) -> bool:
    try:
        import torch.distributed
        from torch.distributed import distributed_c10d

        ranks = int(vllm_config.parallel_config.world_size)
        engine, rank = divmod(torch.distributed.get_rank(), ranks)
        # Ranks create their connectors equally often.
        name = f"{engine}/{next(_calls)}"
        return agree(distributed_c10d._get_default_store(), name, rank, ranks, form())
    except Exception:
        logger.exception("the ranks of several nodes cannot agree on the KV cache connector")
        return False

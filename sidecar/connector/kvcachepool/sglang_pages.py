"""Pages of SGLang's host pools: their names in the sidecar and their bytes.

An object is one page of one host pool, or one group of KV heads of it. Its key has a digest of everything that decides
how the bytes are arranged, so a reader with another page size, layout, data type or rank does not find it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
from collections.abc import Callable
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from kvcachepool.client import Header

logger = logging.getLogger("kvcachepool")

#: Changes whenever names or bytes change.
FORMAT = "sglang-page/1"


class Shard(NamedTuple):
    """A rank's part of the model. Tensor-parallel ranks are those of one attention group."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    dcp_rank: int = 0
    dcp_size: int = 1

    @classmethod
    def of(cls, config: Any) -> Shard:
        """The shard in a `HiCacheStorageConfig`."""
        return cls(
            config.tp_rank,
            config.tp_size,
            config.pp_rank,
            config.pp_size,
            config.attn_cp_rank,
            config.attn_cp_size,
            # New in SGLang 0.5.23.
            getattr(config, "dcp_rank", 0),
            getattr(config, "dcp_size", 1),
        )


class Form(Enum):
    """How a page's bytes are read and written."""

    ADDRESSES = "addresses"  # in place, in the order of `get_page_buffer_meta`
    FLAT = "flat"  # through a flat copy of the page, in the order of `get_data_page`
    LOGICAL = "logical"  # the pool has slots and no bytes
    UNSUPPORTED = "unsupported"


class Target(NamedTuple):
    """Where an object's bytes go. `finish` is called after they arrived."""

    buffers: list[Any]
    finish: Callable[[], None] | None = None


@lru_cache(maxsize=64)
def _array(nbytes: int) -> Any:
    return ctypes.c_uint8 * nbytes


def _at(addresses: list[int], sizes: list[int]) -> list[Any]:
    """Views of memory at these addresses. The caller keeps the memory alive."""
    return [_array(size).from_address(address) for address, size in zip(addresses, sizes, strict=True)]


def bytes_of(tensor: torch.Tensor) -> Any:
    """A contiguous host tensor's memory as bytes. Raises `ValueError` for a tensor that is not contiguous."""
    if not tensor.is_contiguous():
        raise ValueError("expected a contiguous tensor")
    return tensor.flatten().view(torch.uint8).numpy()


def _is_per_head(host_pool: Any) -> bool:
    """Whether the pool holds K and V per head, which tensor parallelism splits also where an MLA model's KV is not."""
    return getattr(host_pool, "head_num", None) is not None and getattr(host_pool, "kv_cache_dim", None) is None


class PagePool:
    """One host pool. For any thread; `rename` changes all names at once."""

    def __init__(
        self,
        name: str,
        host_pool: Any,
        shard: Shard,
        *,
        page_tokens: int,
        replicated: bool,
        flat: bool = False,
        heads_of: int | None = None,
    ) -> None:
        """`page_tokens`: tokens of a page of KV. `replicated`: all ranks of a TP group hold the same KV, as with MLA.
        `flat`: use flat copies also where addresses exist. `heads_of`: into how many groups all ranks' heads are split
        (`tp_lcm_size`), so that servers of other TP sizes find them.
        """
        self.name = name
        self.host_pool = host_pool
        #: Slots of a page in the host pool's indices: tokens, or 1 for a pool of states.
        self.slots = int(getattr(host_pool, "page_size", 1) or 1) * int(getattr(host_pool, "dcp_size", 1))
        self.objects = 1
        #: Of each buffer of one object.
        self._sizes: list[int] = []
        self._heads: tuple[int, int] | None = None
        splits = heads_of is not None and not replicated and getattr(host_pool, "layout", "") == "page_head"
        if splits and heads_of is not None and not flat:
            self.objects = heads_of // shard.tp_size
            self._heads = (shard.tp_rank * self.objects, heads_of)
        self.form = self._probe(flat)
        self.nbytes = sum(self._sizes)
        # States and heads belong to a TP rank even if the model's KV is the same on all.
        shared = replicated and name != "mamba" and not _is_per_head(host_pool)
        if shared or self._heads is not None:
            shard = shard._replace(tp_rank=0, tp_size=1)
        self._layout: dict[str, Any] = {
            "format": FORMAT,
            "form": self.form.value,
            "pool": name,
            "kind": type(host_pool).__name__,
            "layout": str(getattr(host_pool, "layout", "")),
            "dtype": str(getattr(host_pool, "dtype", "")),
            "layers": [
                getattr(host_pool, "start_layer", None),
                getattr(host_pool, "end_layer", None),
                getattr(host_pool, "layer_num", None),
            ],
            "page_tokens": page_tokens,
            "slots": self.slots,
            "sizes": self._sizes,
            "shard": list(shard),
            "heads_of": None if self._heads is None else self._heads[1],
        }
        self._prefix = ""
        self.header = Header(
            dtype=self._layout["dtype"],
            format=FORMAT,
            metadata={"pool": name, "layout": self._layout["layout"], "page_tokens": page_tokens},
        )

    def _probe(self, flat: bool) -> Form:
        """Finds the form and the size of a page. A pool without a usable form is logged and never stored."""
        if getattr(self.host_pool, "kv_buffer", self) is None and getattr(self.host_pool, "size_per_token", 1) == 0:
            return Form.LOGICAL
        problem: Exception | None = None
        if not flat:
            try:
                _, sizes = self._addresses(torch.arange(self.slots, dtype=torch.int64))
                self._sizes = [int(size) for size in sizes[: len(sizes) // self.objects]]
                return Form.ADDRESSES
            except (ValueError, NotImplementedError) as error:
                problem = error
        if self.objects == 1:
            try:
                page = self.host_pool.get_data_page(0, flat=True)
                self._sizes = [page.numel() * page.element_size()]
                return Form.FLAT
            except (ValueError, NotImplementedError) as error:
                problem = problem or error
        logger.error("SGLang's pool %s cannot be stored, all its pages are misses: %s", self.name, problem)
        return Form.UNSUPPORTED

    def rename(self, model: str, epoch: str) -> None:
        """Sets what comes before the page hash in all keys: of the model's identity, and of the last `clear`."""
        text = json.dumps([model, epoch, self._layout], sort_keys=True)
        self._prefix = f"sglang/{self.name}/{hashlib.sha256(text.encode()).hexdigest()[:32]}"

    def keys(self, page_hashes: list[str]) -> list[str]:
        """The keys of pages, `objects` for each, in order."""
        prefix = self._prefix
        if self._heads is None:
            return [f"{prefix}/{page}" for page in page_hashes]
        first = self._heads[0]
        return [f"{prefix}/{page}/{first + part}" for page in page_hashes for part in range(self.objects)]

    def pages(self, indices: Any, count: int) -> list[Any] | None:
        """The host indices of each of `count` pages. None if there are too few or too many."""
        if indices is None or indices.numel() != count * self.slots:
            return None
        return list(indices.cpu().reshape(count, self.slots))

    def source(self, page: Any, part: int) -> list[Any]:
        """The bytes of one object of a page with these host indices."""
        if self.form is Form.FLAT:
            return [bytes_of(self.host_pool.get_data_page(int(page[0]), flat=True).contiguous())]
        return self._views(page, part)

    def target(self, page: Any, part: int) -> Target:
        """Where the bytes of one object of a page go."""
        if self.form is not Form.FLAT:
            return Target(self._views(page, part))
        index, copy = int(page[0]), self.host_pool.get_dummy_flat_data_page()
        return Target([bytes_of(copy)], lambda: self.host_pool.set_from_flat_data_page(index, copy))

    def _views(self, page: Any, part: int) -> list[Any]:
        addresses, sizes = self._addresses(page)
        each = len(addresses) // self.objects
        mine = slice(part * each, (part + 1) * each)
        return _at(addresses[mine], sizes[mine])

    def _addresses(self, page: Any) -> tuple[list[int], list[int]]:
        if self.objects > 1:
            found = self.host_pool.get_split_heads_page_buffer_meta(page, self.objects)
        else:
            found = self.host_pool.get_page_buffer_meta(page)
        if not found or not found[0]:
            raise ValueError(f"the pool has no addresses of pages in layout {getattr(self.host_pool, 'layout', '')!r}")
        return found

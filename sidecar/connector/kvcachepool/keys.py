"""Splits prompts into chunks and computes their keys.

Keys come only from `request.block_hashes`: vLLM mixes LoRA, multimodal content, prompt embeddings and salts into them,
and truncates them if a streaming session edits its tokens.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .layout import STATE, Unserved, group_shapes
from .messages import Hashing

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

#: Engine hashes that the slot table keeps per chunk. Longer lists are not sent, and KV events do not have such chunks.
MAX_BLOCK_HASHES = 24
HASH_BYTES = 32


@dataclass(frozen=True)
class GroupSize:
    """One KV group as the scheduler sees it.

    block_tokens: tokens per block id.
    window_tokens: how far attention looks back, 0 = over the whole prefix (then a block is never freed while the
        request runs). 1 for states: a hit needs only the state at its end.
    shards: sections of a chunk.
    token_bytes: per token over all layers of one rank.
    aligned: attention looks back to the last multiple of `window_tokens` (chunked local attention).
    state: a block holds the state at its end, not KV of its tokens. vLLM keeps few of them, and not by position.
    """

    block_tokens: int
    window_tokens: int
    shards: int
    token_bytes: int
    aligned: bool = False
    state: bool = False

    def first_needed(self, end: int) -> int:
        """First token of the first block that a hit of `end` tokens needs."""
        if not self.window_tokens:
            return 0
        begin = end // self.window_tokens * self.window_tokens if self.aligned else max(0, end - self.window_tokens)
        return begin // self.block_tokens * self.block_tokens


@dataclass(frozen=True)
class Geometry:
    """Sizes in tokens that both sides and the sidecar must agree on."""

    scheduler_block: int
    hash_block: int
    chunk: int
    groups: tuple[GroupSize, ...]

    def chunk_of(self, least: int) -> int:
        """Tokens of a chunk of at least `least` tokens, see `effective_chunk_tokens`."""
        return effective_chunk_tokens(least, self.scheduler_block, self.has_states)

    @property
    def has_states(self) -> bool:
        return any(group.state for group in self.groups)

    @property
    def has_windows(self) -> bool:
        """Whether some group does not keep its whole prefix."""
        return any(group.window_tokens for group in self.groups)

    @property
    def token_bytes(self) -> int:
        """Bytes per token over all groups of one rank."""
        return sum(group.token_bytes for group in self.groups)


class Chunks:
    """The chunks of a prompt: full ones, then at most one tail in whole scheduler blocks."""

    __slots__ = ("full", "tail_tokens", "tokens")

    def __init__(self, geometry: Geometry, tokens: int) -> None:
        self.full = tokens // geometry.chunk
        rest = tokens - self.full * geometry.chunk
        self.tail_tokens = rest - rest % geometry.scheduler_block
        self.tokens = self.full * geometry.chunk + self.tail_tokens

    def __len__(self) -> int:
        return self.full + (1 if self.tail_tokens else 0)


def packed_hashes(geometry: Geometry, chunks: Chunks, block_hashes: Sequence[bytes]) -> bytes:
    """Hash of each chunk's last block, 32 bytes each without separators."""
    step = geometry.chunk // geometry.hash_block
    hashes = block_hashes[step - 1 : chunks.full * step : step]
    packed = b"".join(hashes)
    if chunks.tail_tokens:
        packed += block_hashes[chunks.tokens // geometry.hash_block - 1]
    return packed


def last_hash(geometry: Geometry, end: int, block_hashes: Sequence[bytes]) -> bytes:
    """Hash of the block that ends at token `end`; empty at the beginning of the prompt."""
    return bytes(block_hashes[end // geometry.hash_block - 1]) if end else b""


def packed_blocks(geometry: Geometry, block_hashes: Sequence[bytes], begin: int, end: int) -> bytes:
    """Hashes of all blocks of the chunk of tokens `begin..end`. Empty if they are too many or incomplete."""
    count = (end - begin) // geometry.hash_block
    if count > MAX_BLOCK_HASHES:
        return b""
    packed = b"".join(block_hashes[begin // geometry.hash_block : end // geometry.hash_block])
    return packed if len(packed) == count * HASH_BYTES else b""


def effective_chunk_tokens(least: int, scheduler_block: int, states: bool) -> int:
    """Smallest multiple of the scheduler's block that is at least `least` tokens.

    With state groups it is one block, because vLLM may have a state at the end of any of them.
    """
    if states:
        return scheduler_block
    return max(1, -(-least // scheduler_block)) * scheduler_block


def block_tokens(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[int, int]:
    """(tokens of a scheduler block, tokens of a hash block), as EngineCore resolves them."""
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    scheduler_block, hash_block = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return int(scheduler_block), int(hash_block)


def geometry(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, chunk_tokens: int) -> Geometry:
    """Sizes of this engine, with chunks of at least `chunk_tokens` tokens.

    Raises:
        layout.Unserved: blocks of a group are not addressed by prefix hashes.
    """
    scheduler_block, hash_block = block_tokens(vllm_config, kv_cache_config)
    groups = []
    for shape, group in zip(group_shapes(vllm_config, kv_cache_config), kv_cache_config.kv_cache_groups, strict=True):
        state = shape.kind == STATE
        if state and not shape.block_tokens == scheduler_block == hash_block:
            raise Unserved(
                "KvGroupUnsupported/StateBlock",
                f"states have blocks of {shape.block_tokens} tokens: expected blocks of the scheduler"
                f" ({scheduler_block}) and of hashes ({hash_block}) to be as long",
            )
        window = 1 if state else shape.window_tokens
        token_bytes = _bytes_per_token(group)
        groups.append(GroupSize(shape.block_tokens, window, shape.shards, token_bytes, shape.aligned, state))
    made = Geometry(scheduler_block, hash_block, 0, tuple(groups))
    return replace(made, chunk=made.chunk_of(chunk_tokens))


def _bytes_per_token(group: Any) -> int:
    """Over all layers of one rank. If layers were merged into one spec, its page holds all of them."""
    spec = group.kv_cache_spec
    layers = 1 if getattr(spec, "kv_cache_specs", None) else len(group.layer_names)
    return max(1, int(spec.page_size_bytes) * layers // int(spec.block_size))


def hashing(algorithm: str, hash_block: int) -> Hashing | None:
    """How this process hashes blocks. None until EngineCore has drawn the root.

    The pickle behind `sha256` differs between minor versions of Python, so the version is part of the name.
    """
    from vllm.v1.core import kv_cache_utils

    root = getattr(kv_cache_utils, "NONE_HASH", None)
    if not isinstance(root, bytes):
        return None
    name = algorithm
    if algorithm == "sha256":
        name = f"sha256/py{sys.version_info.major}.{sys.version_info.minor}"
    return Hashing(
        algorithm=name, root=root.hex(), block_tokens=hash_block, random_root=_root_is_random(kv_cache_utils)
    )


def _root_is_random(kv_cache_utils: Any) -> bool:
    return os.environ.get("PYTHONHASHSEED") is None and not hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED")

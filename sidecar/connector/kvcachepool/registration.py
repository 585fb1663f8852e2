"""REGISTER, once per connection. The sidecar answers PROBEs and GRANTs only after it."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from . import keys
from .connection import Reply
from .keys import Geometry
from .messages import Register
from .metrics import Counters
from .nodes import Client, Nodes
from .reporter import Reporter
from .wire import Op

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("kvcachepool")

#: REGISTER is repeated after this time if the sidecars of several nodes do not know all ranks yet, and after an error:
#: the ranks of some node may be about to register with the digest of their files.
_AGAIN_S = 0.2
_AGAIN_AFTER_ERROR_S = 2.0


class Registration:
    """Its methods are called with the scheduler side's lock held.

    geometry: sizes of this engine; a new object after a HELLO with another chunk size.
    world: ranks of the engine, on all nodes.
    speculates: the engine has speculative decoding.
    """

    def __init__(
        self, client: Client, counters: Counters, reporter: Reporter, vllm_config: VllmConfig, geometry: Geometry
    ) -> None:
        self.client = client
        self.counters = counters
        self.reporter = reporter
        self.geometry = geometry
        self.world = int(vllm_config.parallel_config.world_size)
        self.speculates = getattr(vllm_config, "speculative_config", None) is not None
        self._config = vllm_config
        self._algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
        self._connection = 0  # number of the connection on which REGISTER was sent
        self._again_s = math.inf
        self._refused = ""  # code of the last error, which is logged once

    def ensure(self) -> bool:
        """Sends REGISTER if it is due. Returns whether PROBEs and GRANTs follow a REGISTER on this connection."""
        client = self.client
        if not client.connected or self.geometry.chunk != self.geometry.chunk_of(client.settings.chunk_tokens):
            return False  # `take_chunk_tokens` has not been called yet for the HELLO of this connection
        if self._connection == client.connection and time.monotonic() < self._again_s:
            return not isinstance(client, Nodes) or client.agreed
        hashing = keys.hashing(self._algorithm, self.geometry.hash_block)
        if hashing is None:
            return False
        ranks = int(getattr(self._config.parallel_config, "local_world_size", 0) or self.world)
        body = Register(
            world=ranks,
            local_world=ranks,
            scheduler_block_tokens=self.geometry.scheduler_block,
            chunk_tokens=self.geometry.chunk,
            hashing=hashing,
        )
        if client.request(Op.REGISTER, body, self._on_reply) is None:
            return False
        first = self._connection != client.connection
        self._connection, self._again_s = client.connection, math.inf
        if first:
            self.reporter.start_events(client.connection)
        return not isinstance(client, Nodes)

    def _on_reply(self, reply: Reply) -> None:
        if reply.error is not None:
            self.counters.event(f"register_refused/{reply.error.code}")
            if reply.error.code != self._refused:
                message = "the sidecar refused to register this vLLM: %s: %s"
                logger.warning(message, reply.error.code, reply.error.message)
            self._refused = reply.error.code
            if isinstance(self.client, Nodes):
                self._again_s = time.monotonic() + _AGAIN_AFTER_ERROR_S
        elif isinstance(self.client, Nodes) and not self.client.agreed:
            self._again_s = time.monotonic() + _AGAIN_S  # some ranks of a node have not registered yet

    def take_chunk_tokens(self, chunk_tokens: int) -> bool:
        """Sets the chunk size of a HELLO. Returns whether it changed, so that lookups and stores must restart."""
        chunk = self.geometry.chunk_of(chunk_tokens)
        if chunk == self.geometry.chunk:
            return False
        self.geometry = replace(self.geometry, chunk=chunk)
        return True

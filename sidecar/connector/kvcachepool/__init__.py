"""kvcachepool: vLLM's side of the node-local KV cache.

`plugin` hooks into vLLM without a launch argument, `connector` is the class that vLLM loads, and `scheduler` and
`worker` are its two sides. Nothing of these may raise into vLLM: every failure turns the cache off with a named reason.

`client` is apart from them: the client of opaque objects, for other programs and adapters. It needs no vLLM.
"""

__version__ = "0.1.0"

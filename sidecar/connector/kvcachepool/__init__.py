"""kvcachepool: vLLM's side of the node-local KV cache.

`plugin` hooks into vLLM without a launch argument, `connector` is the class that vLLM loads, and `scheduler` and
`worker` are its two sides. Nothing in this package may raise into vLLM: every failure turns the cache off with a named
reason.
"""

__version__ = "0.1.0"

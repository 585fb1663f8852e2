"""kvcachepool: vLLM's side of the node-local KV cache.

`plugin` hooks into vLLM without a launch argument, `connector` is the class that vLLM loads, `scheduler` and `worker`
are its two sides. Nothing in this package may raise into vLLM: whatever goes wrong means "no cache", with a name.
"""

__version__ = "0.1.0"

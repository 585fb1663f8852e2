"""A stress test with an oracle: a real vLLM under pressure, with faults, answers like an engine without a cache."""

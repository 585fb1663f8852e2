"""A stress test with an oracle: a real vLLM under pressure, with faults, says what an engine without a cache says."""

"""Starts the real parts that tests, demo and benchmarks need: the sidecar, vLLM, models. Nothing here asserts."""

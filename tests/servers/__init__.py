"""Starts the real components of tests, demo and benchmarks: the sidecar, vLLM, models. Contains no assertions."""

"""Benchmarks. Each is a program of its own and replaces its rows in target/bench/results.json by name."""

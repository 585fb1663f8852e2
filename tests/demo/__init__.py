"""Documents are asked time and again, and a table shows what was computed and what was loaded.

`make demo` does it on a Kubernetes (kubernetes.py), `make demo-local` without one (local.py), `make demo-tiers` with
disk, Redis and S3 below memory (tiers.py). workload.py asks and prints for all: they differ only in what they start
and kill. KEEP=1 leaves all running; MODEL=folder takes a real model instead of one with random weights.
"""

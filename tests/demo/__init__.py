"""Documents are asked four times, and a table shows what was computed and what was loaded.

`make demo` does it on a Kubernetes (kubernetes.py), `make demo-local` without one (local.py). workload.py asks and
prints for both: they differ only in what they start and kill. KEEP=1 leaves all running; MODEL=folder takes a real
model instead of one with random weights.
"""

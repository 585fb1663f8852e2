"""The operator at scale, on a Kubernetes of its own: `python -m bench.operator --help`."""

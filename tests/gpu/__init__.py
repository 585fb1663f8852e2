"""What only a GPU can say, with Python 3 and torch alone: `make test-gpu`.

Written for `unittest`: a GPU host need not have pytest. `make test` does not collect this folder; it looks that each
test is skipped by name without a device, and runs all of them over host memory (KVCACHEPOOL_GPU_REHEARSAL=1), so that
they do not rot.
"""

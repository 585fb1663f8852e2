"""What is done to KV bytes on CPUs, against memcpy in the same run: `codec_bench` and `pages_bench` as rows; digests of
the arena, against those of a copy: `digest_bench`.

python -m bench.kernels [--rounds 15]

One thread. Of pages the row has the slowest layout, of RoPE the slower style; what each layout, style and
codec does is printed with it.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from bench.examples import measured
from bench.results import Row, merge

_CODECS = ("fp8", "int8", "int4", "cachegen", "lossless")
_WAYS = {"": "encode", "_decode": "decode"}
_PAGES = ("gather", "scatter", "to_canonical", "to_verbatim")
_TYPES = ("Bf16", "F16", "F32")


def _shown(example: str, *arguments: str) -> list[dict[str, Any]]:
    lines = measured(example, *arguments)
    for line in lines:
        print(json.dumps(line), flush=True)
    return lines


def _row(name: str, value: float, memcpy: float, runs: int) -> Row:
    return Row(
        name=name,
        value=value,
        unit="GB/s",
        reference="memcpy",
        reference_value=memcpy,
        ratio=round(value / memcpy, 3),
        runs=runs,
        command="make bench ONLY=kernels",
    )


def codecs(rounds: int) -> list[Row]:
    """Packing and unpacking by each codec, and the ratio of the lossless one."""
    memcpy, *packed = _shown("codec_bench", str(rounds))
    by_name = {line["row"].removeprefix("cpu_").removesuffix("_vs_memcpy"): line for line in packed}
    rows = [
        _row(f"cpu_{codec}{suffix}_vs_memcpy", by_name[codec][f"{way}_gbps"], memcpy["gbps"], rounds)
        for codec in _CODECS
        for suffix, way in _WAYS.items()
    ]
    gained = Row(
        name="lossless_raw_over_stored",
        value=by_name["lossless"]["ratio"],
        unit="x",
        reference="64 MiB of bf16 that are made to look like a KV cache",
        reference_value=None,
        ratio=None,
        runs=1,
        command="make bench ONLY=kernels",
    )
    return [*rows, gained]


def pages() -> list[Row]:
    """Gather, scatter and reordering in the slowest layout; RoPE in the slower style; digests."""
    moved = _shown("pages_bench")

    def slowest(name: str, lines: list[dict[str, Any]]) -> Row:
        line = min(lines, key=lambda line: line["ratio"])
        return _row(f"cpu_{name}_vs_memcpy", line["gb_s"], line["memcpy_gb_s"], 1)

    turned = [line for line in moved if line["kernel"] == "rope"]
    return [
        *(slowest(kernel, [line for line in moved if line["kernel"] == kernel]) for kernel in _PAGES),
        *(slowest(f"rope_{dtype.lower()}", [line for line in turned if line["dtype"] == dtype]) for dtype in _TYPES),
        slowest("digest", [line for line in moved if line["kernel"] == "digest"]),
    ]


def digests() -> list[Row]:
    """Digests of the arena, with its bytes in the processor's cache and not."""
    return [
        Row(
            name=f"arena_digest_{line['row']}_vs_copied",
            value=line["gb_s"],
            unit="GB/s",
            reference="copied out, then digested",
            reference_value=line["copied_gb_s"],
            ratio=line["ratio"],
            runs=1,
            command="make bench ONLY=kernels",
        )
        for line in _shown("digest_bench")
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    merge([*codecs(parser.parse_args().rounds), *pages(), *digests()])

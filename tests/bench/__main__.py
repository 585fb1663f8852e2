"""`make bench`: runs the benchmarks one after the other, then prints all rows with the bars they are held to.

python -m bench [copies,probe,...]

Four run only where they are named: `operator` (`make bench-operator`) needs root and a Kubernetes of its own,
`lmcache_l2` needs LMCache, `tiers` (`make bench-tiers`) and `soak` (`make soak`) take long.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

from bench.results import RESULTS

BENCHMARKS = ("copies", "probe", "scheduler", "ttft", "overhead", "idle", "simulation", "kernels", "objects")
APART = ("operator", "lmcache_l2", "tiers", "soak")
# Name of a row -> (minimum, maximum) of its ratio, or of its value if it has no ratio.
BARS: dict[str, tuple[float | None, float | None]] = {
    "probe_128k_first_p50_ms": (None, 1.0),
    "object_exists_512_p50_ms": (None, 1.0),
    **{f"object_{op}_{size}m_vs_memcpy": (0.6, None) for op in ("put", "get") for size in (1, 8)},
    "store_vs_memcpy": (0.75, None),
    "load_vs_memcpy": (0.75, None),
    "store_vs_memcpy_busy": (0.5, None),
    "load_vs_memcpy_busy": (0.5, None),
    "ttft_4k_warm_over_cold": (None, 0.05),
    "ttft_4k_warm_over_local": (None, 1.2),
    "ttft_4k_states_warm_over_local": (None, 1.3),
    "workload_long_document_ours_over_lmcache": (None, 1.0),
    **{
        f"lmcache_l2_{operation}_{size}_vs_{other}": (2.0, None)
        for operation in ("store", "load", "lookup")
        for size in ("256k", "4m")
        for other in ("resp", "fs", "fs_direct")
    },
    "overhead_no_hits_percent": (None, 1.0),
    "engine_thread_block_p99_us": (None, 500.0),
    "engine_thread_block_apart_p99_us": (None, 500.0),
    **{f"ttft_4k_{tier}_over_cold": (None, 0.25) for tier in ("disk", "redis", "s3")},
    "soak_rss_growth_percent": (-2.0, 2.0),
    "soak_rss_slope_percent": (-2.0, 2.0),
    **{f"cpu_{kernel}_vs_memcpy": (0.5, None) for kernel in ("gather", "scatter", "fp8", "int8", "int4")},
    "idle_cpu_percent": (None, 0.5),
    "rss_beyond_arena_mib": (None, 40.0),
    **{
        f"{tier}_{op}_{size}m_{depth}_gbps": (least, None)
        for tier, least, sizes in (
            ("disk", 0.9, (1, 4, 8, 16, 32)),
            ("redis", 0.9, (1,)),
            ("redis_tls", 0.9, (1,)),
            ("s3", 0.85, (8, 16, 32)),
        )
        for op in ("put", "get")
        for size in sizes
        for depth in (8, 64)
    },
}
# Maximum of the value, even if the row has a ratio.
VALUE_BARS = {
    "operator_rss_mib": 100.0,
    "api_writes_per_min_unchanged": 0.0,
    "api_writes_per_min_changed_pool": 1.0,
    "attached_age_s": 180.0,
    "webhook_p99_ms": 10.0,
    "label_to_running_added_s": 3.0,
    "takeover_s": 20.0,
    "disk_index_1m_s": 5.0,
}


def print_table() -> None:
    """Prints all rows of the results file."""
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    print(f"\n{'name':34} {'value':>10} {'unit':6} {'ratio':>8}  {'bar':>8}  met  reference")
    for row in sorted(rows, key=lambda row: row["name"]):
        least, most = BARS.get(row["name"], (None, VALUE_BARS.get(row["name"])))
        held = row["value"] if row["ratio"] is None or row["name"] in VALUE_BARS else row["ratio"]
        inside = (least is None or least <= held) and (most is None or held <= most)
        met = "" if least is most is None else "yes" if inside else "NO"
        bar = f">= {least:g}" if least is not None else f"<= {most:g}" if most is not None else "report"
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
        reference = row["reference"] + ("" if row["reference_value"] is None else f" {row['reference_value']:g}")
        print(f"{row['name']:34} {row['value']:>10g} {row['unit']:6} {ratio:>8}  {bar:>8}  {met:3}  {reference}")
    print(f"\n{RESULTS}")


def main(chosen: list[str]) -> int:
    """Runs the selected benchmarks, or all."""
    unknown = set(chosen) - {*BENCHMARKS, *APART}
    if unknown:
        print(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS + APART)}", file=sys.stderr)
        return 2
    failed = []
    for name in chosen or BENCHMARKS:
        print(f"\n=== {name}", flush=True)
        start = time.monotonic()
        if subprocess.run([sys.executable, "-m", f"bench.{name}"]).returncode:
            failed.append(name)
        print(f"({time.monotonic() - start:.0f} s)", flush=True)
    print_table()
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main([name for argument in sys.argv[1:] for name in argument.split(",") if name]))

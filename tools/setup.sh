#!/usr/bin/env bash
# Installs what the project needs, pinned, outside the checkout: apt packages, Rust, Python with vLLM for CPUs, check tools.
# Quick where all is there already; safe to run twice at once.
#
#   tools/setup.sh base              apt packages and Rust
#   tools/setup.sh vllm [VERSION]    a virtual environment with that vLLM (default: the newest one supported)
#   tools/setup.sh vllm-source VERSION   Python files of a vLLM without a wheel for CPUs
#   tools/setup.sh check             cargo-deny and cargo-fuzz, for `make check`
#   tools/setup.sh cluster [VERSION] Kubernetes, helm and containerd for clusters on this machine; promtool
#   tools/setup.sh dist              cargo-cyclonedx and a compiler for the other architecture, for `make dist`
#   tools/setup.sh servers           servers that tests of the tiers start
#   tools/setup.sh docs              mdbook, for `make docs`
#   tools/setup.sh lmcache           LMCache, for its tests and `make bench ONLY=ttft`
#   tools/setup.sh sglang            SGLang's code without its kernels, for tests of its storage backend
set -euo pipefail

TOOLS="$(cd "$(dirname "$0")" && pwd)"
CACHE="${KVCACHEPOOL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvcachepool}"
mkdir -p "$CACHE/logs" "$CACHE/ready" "$CACHE/venvs"

say() { printf '[setup] %s\n' "$*" >&2; }
die() { printf '[setup] %s\n' "$*" >&2; exit 1; }

# Runs a long command with its output in a log; a line every 20 s says that it is still at work.
quietly() { # quietly LOG WHAT COMMAND...
    local log="$CACHE/logs/$1" what="$2" start=$SECONDS job
    shift 2
    say "$what (log: $log)"
    "$@" >"$log" 2>&1 </dev/null &
    job=$!
    while kill -0 "$job" 2>/dev/null; do
        sleep 1
        if (( (SECONDS - start) % 20 == 19 )); then say "... $what: $((SECONDS - start)) s"; fi
    done
    wait "$job" || { tail -n 25 "$log" >&2; die "$what failed"; }
}

# Downloads fail for reasons that pass; a second and a third try are cheap.
retried() {
    "$@" || { sleep 5; "$@"; } || { sleep 20; "$@"; }
}

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; elif command -v sudo >/dev/null; then sudo "$@"; else die "needs root or sudo for: $*"; fi
}

. "$TOOLS/setup/base.sh"
. "$TOOLS/setup/vllm.sh"
. "$TOOLS/setup/check.sh"
. "$TOOLS/setup/cluster.sh"
. "$TOOLS/setup/dist.sh"
. "$TOOLS/setup/servers.sh"
. "$TOOLS/setup/docs.sh"
. "$TOOLS/setup/lmcache.sh"
. "$TOOLS/setup/sglang.sh"

part="${1:-}"
# One set-up at a time: a second one waits and then finds all done.
exec 9>"$CACHE/setup.lock"
flock -n 9 || { say "another set-up is running: waiting for it"; flock 9; }
case "$part" in
    base) setup_base ;;
    vllm) setup_vllm "${2:-$(newest_vllm)}" ;;
    vllm-source) setup_vllm_source "$2" ;;
    check) setup_check ;;
    cluster) setup_cluster "${2:-}" ;;
    dist) setup_dist ;;
    servers) setup_servers ;;
    docs) setup_docs ;;
    lmcache) setup_lmcache ;;
    sglang) setup_sglang ;;
    *) sed -n '2,14s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac

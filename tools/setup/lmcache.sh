# Sourced by setup.sh: LMCache beside vLLM for CPUs, for the tests of its adapters and the benchmark that measures both in one run.

LMCACHE=0.5.6

install_lmcache() { # install_lmcache VENV REQUIREMENTS BASE_VENV
    local own base
    own="$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    base="$("$3/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    printf '%s\n' "$base" >"$own/behind.pth"
    "$1/bin/python" -m pip uninstall -q -y setuptools
    retried "$1/bin/python" -m pip install --disable-pip-version-check --no-input --no-deps --ignore-installed -r "$2"
    # LMCache's older exporters do without the package that vLLM's share.
    ! { "$1/bin/python" -m pip check || true; } | grep -v -e 'requirement torch==.*+cpu' -e '^opentelemetry-exporter-otlp-common ' -e '^No broken'
}

setup_lmcache() {
    local requirements="$TOOLS/requirements/lmcache-$LMCACHE.txt" venv="$CACHE/venvs/lmcache-$LMCACHE" over marker
    over="$(sed -n '1s/^# over \([0-9.]*[0-9]\).*/\1/p' "$requirements")"
    setup_vllm "$over"
    marker="$CACHE/ready/lmcache-$LMCACHE-$(cat "$requirements" "$TOOLS/setup/lmcache.sh" | sha256sum | cut -c1-16)"
    if [ -f "$marker" ] && [ -x "$venv/bin/python" ]; then return; fi
    rm -rf "$venv"
    "$CACHE/venvs/vllm-$over/bin/python" -m venv "$venv"
    quietly lmcache.log "installing LMCache $LMCACHE (1 GB)" install_lmcache "$venv" "$requirements" "$CACHE/venvs/vllm-$over"
    rm -f "$CACHE/ready/lmcache-"*
    touch "$marker"
    say "LMCache $LMCACHE is ready: $venv"
}

# Sourced by setup.sh: SGLang's code beside vLLM for CPUs, for tests with its host pools and its cache controller.

SGLANG=0.5.23

install_sglang() { # install_sglang VENV REQUIREMENTS BASE_VENV
    local own base
    own="$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    base="$("$3/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    printf '%s\n' "$base" >"$own/behind.pth"
    # Without compiled files, which would double the size. No `pip check`: SGLang wants kernels for GPUs.
    retried "$1/bin/python" -m pip install --disable-pip-version-check --no-input --no-deps --no-compile --ignore-installed -r "$2"
}

setup_sglang() {
    local requirements="$TOOLS/requirements/sglang-$SGLANG.txt" venv="$CACHE/venvs/sglang-$SGLANG" over marker
    over="$(sed -n '1s/^# over \([0-9.]*[0-9]\).*/\1/p' "$requirements")"
    setup_vllm "$over"
    marker="$CACHE/ready/sglang-$SGLANG-$(cat "$requirements" "$TOOLS/setup/sglang.sh" | sha256sum | cut -c1-16)"
    if [ -f "$marker" ] && [ -x "$venv/bin/python" ]; then return; fi
    rm -rf "$venv"
    "$CACHE/venvs/vllm-$over/bin/python" -m venv --without-pip "$venv"
    quietly sglang.log "installing SGLang $SGLANG (150 MB)" install_sglang "$venv" "$requirements" "$CACHE/venvs/vllm-$over"
    rm -f "$CACHE/ready/sglang-"*
    touch "$marker"
    say "SGLang $SGLANG is ready: $venv"
}

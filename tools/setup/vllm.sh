# Sourced by setup.sh: virtual environments with vLLM for CPUs.
#
# requirements/vllm-<version>.txt either names all packages, or begins with "# over <version>" and names what differs: such an
# environment sees the packages of the other one behind its own, which saves 5 GB each.

newest_vllm() {
    grep -L '^# over ' "$TOOLS"/requirements/vllm-*.txt | sed 's/.*vllm-\(.*\)\.txt/\1/' | sort -V | tail -n 1
}

# The pinned packages have wheels for Python 3.11 to 3.13.
find_python() {
    local name
    for name in ${KVCACHEPOOL_PYTHON:-} python3 python3.11 python3.12 python3.13; do
        if "$name" -c 'import sys; raise SystemExit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    return 1
}

# vLLM asks for the version of a package named "vllm", which must name CPUs. The wheel for CPUs has another name.
write_vllm_version() { # write_vllm_version SITE VERSION
    local folder="$1/vllm-$2+cpu.dist-info"
    rm -rf "$1"/vllm-[0-9]*.dist-info
    mkdir -p "$folder"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\nSummary: names the version\n' "$2" >"$folder/METADATA"
    printf 'kvcachepool setup\n' >"$folder/INSTALLER"
    : >"$folder/RECORD"
}

write_vllm_metadata() { # write_vllm_metadata VENV VERSION
    write_vllm_version "$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" "$2"
    # The entry point of the command.
    printf '#!%s\nimport sys\nfrom vllm.entrypoints.cli.main import main\nsys.exit(main())\n' "$1/bin/python" >"$1/bin/vllm"
    chmod +x "$1/bin/vllm"
}

install_vllm() { # install_vllm VENV REQUIREMENTS BASE_VENV
    local pip=("$1/bin/python" -m pip install --disable-pip-version-check --no-input --no-deps)
    if [ -n "$3" ]; then
        local own base
        own="$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
        base="$("$3/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
        printf '%s\n' "$base" >"$own/behind.pth"
        # The setuptools that a new environment brings would hide the other's.
        "$1/bin/python" -m pip uninstall -q -y setuptools
        # Packages of the other environment count as installed: what differs must go into this one all the same.
        pip+=(--ignore-installed)
    else
        retried "${pip[@]}" -r "$TOOLS/requirements/dev.txt"
    fi
    retried "${pip[@]}" -r "$2"
    # With --no-deps only this finds a pin that does not fit. The wheel asks for torch's CPU build by its name elsewhere.
    ! { "$1/bin/python" -m pip check || true; } | grep -v -e 'requirement torch==.*+cpu' -e '^No broken'
}

setup_vllm() { # setup_vllm VERSION
    local version="$1" requirements="$TOOLS/requirements/vllm-$1.txt" venv="$CACHE/venvs/vllm-$1" over="" base="" python marker
    [ -f "$requirements" ] || die "no vLLM $version here; there are: $(ls "$TOOLS/requirements" | sed -n 's/^vllm-\(.*\)\.txt/\1/p' | sort -V | xargs)"
    over="$(sed -n '1s/^# over \([0-9.]*[0-9]\).*/\1/p' "$requirements")"
    if [ -n "$over" ]; then
        setup_vllm "$over"
        base="$CACHE/venvs/vllm-$over"
    fi
    marker="$CACHE/ready/vllm-$version-$(cat "$requirements" "$TOOLS/requirements/dev.txt" "$TOOLS/setup/vllm.sh" | sha256sum | cut -c1-16)"
    if [ -f "$marker" ] && [ -x "$venv/bin/python" ]; then return; fi
    if [ ! -x "$venv/bin/python" ]; then
        python="${base:+$base/bin/python}"
        [ -n "$python" ] || python="$(find_python)" || die "needs a Python from 3.11 to 3.13"
        "$python" -m venv "$venv"
    fi
    local size="about 6.5 GB, 4 to 8 minutes"
    [ -z "$base" ] || size="about 1 GB"
    quietly "vllm-$version.log" "installing vLLM $version for CPUs ($size)" \
        install_vllm "$venv" "$requirements" "$base"
    write_vllm_metadata "$venv" "$version"
    # The first import compiles thousands of files: better here than inside a test's deadline.
    quietly "vllm-$version-compile.log" "compiling its Python files" sh -c '"$1" -m compileall -q -j 0 "$2"/lib/python3*/site-packages || true' sh "$venv/bin/python" "$venv"
    rm -f "$CACHE/ready/vllm-$version-"*
    touch "$marker"
    say "vLLM $version is ready: $venv"
}

# The Python files of a vLLM without a wheel for CPUs: enough for imports beside another version's packages.
setup_vllm_source() { # setup_vllm_source VERSION
    local folder="$CACHE/vllm-source/$1" marker="$CACHE/ready/vllm-source-$1" python
    if [ -f "$marker" ] && [ -d "$folder/vllm" ]; then return; fi
    python="$CACHE/venvs/vllm-$(newest_vllm)/bin/python"
    rm -rf "$folder"
    mkdir -p "$folder"
    quietly "vllm-source-$1.log" "downloading vLLM $1 (about 340 MB)" \
        retried "$python" -m pip download --disable-pip-version-check --no-input --no-deps --only-binary :all: --dest "$folder" "vllm==$1"
    "$python" -c 'import sys, zipfile
for wheel in sys.argv[2:]:
    archive = zipfile.ZipFile(wheel)
    archive.extractall(sys.argv[1], [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith((".py", ".json"))])' "$folder" "$folder"/*.whl
    rm "$folder"/*.whl
    write_vllm_version "$folder" "$1"
    touch "$marker"
}

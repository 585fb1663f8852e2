"""The images that tests run: pause, CoreDNS, a base with a shell, this machine's vLLM, a stand-in for it, the product.
All names start with localhost/, so that no registry is used.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.archive import Archived, Image, Layer
from cluster.slot import binaries
from servers import paths

_ACCOUNTS = """root:x:0:0:root:/root:/bin/sh
nonroot:x:65532:65532:nonroot:/home/nonroot:/sbin/nologin
nobody:x:65534:65534:nobody:/:/sbin/nologin
"""
_GROUPS = "root:x:0:\nnonroot:x:65532:\nnogroup:x:65534:\n"
#: The programs of the product's image.
PROGRAMS = ("kvcachepool-operator", "kvcachepool-sidecar", "kubectl-kvcachepool")
#: The name of the stand-in for vLLM.
STAND_IN = "localhost/stand-in:1"
_ARCHIVE = paths.ROOT / "tools" / "image" / "archive.py"


def _base_layer() -> Layer:
    layer = Layer(folders={"tmp": 0o1777, "root": 0o700, "home/nonroot": 0o755})
    layer.add("etc/passwd", _ACCOUNTS)
    layer.add("etc/group", _GROUPS)
    return layer


def pause() -> Image:
    """Holds a pod's namespaces, and is the first process of every node."""
    layer = Layer()
    layer.add("pause", binaries() / "pause", 0o755)
    return Image("localhost/pause:1", [layer], entrypoint=["/pause"])


def coredns() -> Image:
    """The cluster's DNS."""
    layer = _base_layer()
    layer.add("coredns", binaries() / "coredns", 0o755)
    return Image("localhost/coredns:1", [layer], entrypoint=["/coredns"])


def base() -> Image:
    """busybox under all its names."""
    busybox = Path("/bin/busybox")
    layer = _base_layer()
    layer.add("bin/busybox", busybox, 0o755)
    for name in subprocess.run([str(busybox), "--list"], check=True, capture_output=True, text=True).stdout.split():
        if name != "busybox":
            layer.links[f"bin/{name}"] = "busybox"
    return Image("localhost/base:1", [layer], command=["sh"], env={"PATH": "/bin"})


def vllm_host() -> Image:
    """Only links into /usr, which `vllm_pod` mounts from this machine together with Python and vLLM."""
    layer = _base_layer()
    for name in ("bin", "sbin", "lib", "lib64"):
        layer.links[name] = f"usr/{name}"
    layer.folders["usr"] = 0o755
    return Image("localhost/vllm-host:1", [layer], env={"PATH": f"{_venv()}/bin:/usr/bin:/bin", "LANG": "C.UTF-8"})


def _venv() -> Path:
    return Path(sys.prefix)


def vllm_pod(model: Path, *arguments: str) -> dict[str, Any]:
    """A pod's spec that serves a model with the vLLM of the running Python, on port 8000, ready in about 40 s. The
    container is named `vllm`, and the caller may change the spec before applying it.
    """
    # The environment, the Python that it was made from, and an environment behind it (tools/setup/vllm.sh).
    folders = {"/usr", "/etc/alternatives", str(paths.cache() / "venvs"), str(model)}
    if not sys.base_prefix.startswith("/usr/"):
        folders.add(str(Path(sys.base_prefix).resolve()))
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts: list[dict[str, Any]] = [{"name": "shm", "mountPath": "/dev/shm"}]
    for number, folder in enumerate(sorted(folders)):
        volumes.append({"name": f"host{number}", "hostPath": {"path": folder, "type": "Directory"}})
        mounts.append({"name": f"host{number}", "mountPath": folder, "readOnly": True})
    # As a module, because spawned processes import it again, and the script `vllm` would start a second server.
    command = [str(_venv() / "bin" / "python"), "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    command += ["--served-model-name", "model", "--enforce-eager"]
    container = {
        "name": "vllm",
        "image": "localhost/vllm-host:1",
        "command": [*command, *arguments],
        "env": [
            {"name": "HOME", "value": "/tmp"},
            {"name": "VLLM_SERVER_DEV_MODE", "value": "1"},
            {"name": "VLLM_CPU_KVCACHE_SPACE", "value": "1"},
            {"name": "HF_HUB_OFFLINE", "value": "1"},
        ],
        "ports": [{"name": "http", "containerPort": 8000}],
        "volumeMounts": mounts,
        "readinessProbe": {"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 1, "failureThreshold": 3},
    }
    return {"containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": 5}


def redis() -> Image:
    """Debian's Redis with the shell of the base."""
    return _key_value_server("redis", Path("/usr/bin/redis-check-rdb"), Path("/usr/bin/redis-cli"))


def valkey() -> Image:
    """Valkey in the same way (tools/setup/servers.sh), its programs named as in its own image."""
    tools = paths.cache() / "tools" / "bin"
    return _key_value_server("valkey", tools / "valkey-server", tools / "valkey-cli")


def _key_value_server(name: str, server: Path, client: Path) -> Image:
    layer = Layer()
    _add_program(layer, server, f"usr/bin/{name}-server")
    _add_program(layer, client, f"usr/bin/{name}-cli")
    layers = [*base().layers, layer]
    return Image(f"localhost/{name}:1", layers, command=[f"{name}-server"], env={"PATH": "/usr/bin:/bin"})


def redis_exporter() -> Image:
    """Debian's exporter with the shell of the base. It is older than the option that newer ones are given."""
    layer = Layer()
    _add_program(layer, paths.cache() / "tools" / "bin" / "redis_exporter", "usr/bin/redis_exporter")
    drop = 'for one; do shift; test "$one" = --disable-scrape-endpoint || set -- "$@" "$one"; done'
    start = ["sh", "-c", f'{drop}; exec redis_exporter "$@"', "sh"]
    return Image("localhost/redis_exporter:1", [*base().layers, layer], entrypoint=start, env={"PATH": "/usr/bin:/bin"})


def stand_in() -> Image:
    """The sidecar's example that stands in for vLLM, with the shell of the base."""
    program = paths.target() / "debug" / "examples" / "stand_in_engine"
    if not program.exists():
        raise FileNotFoundError(f"{program} is missing: cargo build --example stand_in_engine")
    layer = Layer()
    _add_libraries(layer, program)
    with tempfile.TemporaryDirectory() as folder:
        layer.add("usr/bin/stand_in_engine", _stripped(program, Path(folder)).read_bytes(), 0o755)
    return Image(STAND_IN, [*base().layers, layer], command=["/usr/bin/stand_in_engine"])


@dataclass(frozen=True)
class Product:
    """Operator, sidecar and kubectl plugin as built by cargo, in the image of the Dockerfile."""

    name: str = "localhost/kvcachepool:dev"

    def write(self, path: Path) -> Path:
        """Writes the archive."""
        built = paths.target() / "debug"
        with tempfile.TemporaryDirectory() as folder:
            for program in PROGRAMS:
                if not (built / program).exists():
                    raise FileNotFoundError(f"{built / program} is missing: cargo build --bins")
                _stripped(built / program, Path(folder))
            subprocess.run([sys.executable, str(_ARCHIVE), self.name, folder, str(path)], check=True)
        return path


def _stripped(program: Path, folder: Path) -> Path:
    """A copy without debug information, which is most of the size and slows down every import."""
    subprocess.run(["strip", "--strip-debug", "-o", str(folder / program.name), str(program)], check=True)
    return folder / program.name


def _add_program(layer: Layer, program: Path, path: str) -> None:
    layer.add(path, program, 0o755)
    _add_libraries(layer, program)


def _add_libraries(layer: Layer, program: Path) -> None:
    """The shared libraries and the loader of a program."""
    listed = subprocess.run(["ldd", str(program)], capture_output=True, text=True).stdout
    for library in re.findall(r"(/\S+) \(0x", listed):
        layer.add(library, Path(library), 0o755)


#: Images by name.
ALL: dict[str, Callable[[], Archived]] = {
    "pause": pause,
    "coredns": coredns,
    "base": base,
    "vllm-host": vllm_host,
    "redis": redis,
    "valkey": valkey,
    "redis-exporter": redis_exporter,
    "stand-in": stand_in,
    "product": Product,
}

"""`vllm serve` without arguments for the connector: killed, restarted from a wheel, and the prompt is still cached."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

from servers.models import model, token_ids
from servers.pod import Pod
from servers.vllm_server import VllmServer
from servers.waiting import wait_for

NewPod = Callable[..., Pod]
ARGUMENTS = ("--dtype", "float32", "--max-model-len", "8192")
ROOT = Path(__file__).parents[2]


def venv_with_wheel(folder: Path) -> str:
    """The Python of a fresh virtual environment, into which the wheel was installed beside this one's vLLM."""
    subprocess.run([ROOT / "tools/wheel.sh", sys.executable, folder], check=True)
    (wheel,) = folder.glob("kvcachepool-*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv/bin/python"
    (packages,) = (folder / "venv/lib").glob("python3*/site-packages")
    (packages / "vllm.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", f"--python={python}"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", wheel], check=True)
    return str(python)


def documented_arguments() -> list[str]:
    """Arguments after the model in the tutorial's command line for an installed wheel."""
    page = (ROOT / "docs/tutorials/local.md").read_text()
    (command,) = re.findall(
        r"^KVCACHEPOOL_SOCKET=\S+ vllm serve <model> (--kv-transfer.*?)^```", page, re.DOTALL | re.M
    )
    return shlex.split(command.replace("\\\n", ""))


def test_vllm_serve_hits_after_a_kill_and_a_restart_from_a_wheel(
    new_pod: NewPod, truth: Callable[..., list[int]], tmp_path: Path
) -> None:
    pod = new_pod()
    pod.sidecar.start()
    prompt = token_ids(4000, 401)
    expected = " ".join(f"w{token}" if token > 2 else "?" for token in truth(prompt, max_tokens=16))
    first = VllmServer(pod.folder, model("tiny"), pod.folder / "serve-1.log", *ARGUMENTS).wait_ready()
    try:
        cold = first.complete(prompt, 4000)
        pod.settle()
        first.reset_prefix_cache()
        warm = first.complete(prompt, 4000)
    finally:
        first.kill()
    wait_for(lambda: not pod.attached(), 20, "the sidecar sees the death")
    second = VllmServer(
        None,
        model("tiny"),
        pod.folder / "serve-2.log",
        *ARGUMENTS,
        *documented_arguments(),
        env={"KVCACHEPOOL_SOCKET": str(pod.folder / "sidecar.sock")},
        python=venv_with_wheel(tmp_path),
    ).wait_ready()
    try:
        # The scheduler side registers at its first request. Before that a probe has no domain.
        second.complete(token_ids(300, 402), 300, max_tokens=1)
        wait_for(pod.attached, 20, "all sessions of the second vLLM ready")
        again = second.complete(prompt, 4000)
    finally:
        second.stop()
    assert (cold.sources["computed"], warm.sources["external"], again.sources["external"]) == (4000, 3968, 3968)
    assert warm.text == again.text == cold.text
    assert cold.text.split() == expected.split()

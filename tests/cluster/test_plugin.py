"""The kubectl plugin: what it shows of pods at every step to the cache, and how it operates an installation."""

from __future__ import annotations

import json
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cluster.kubernetes import Kubernetes, Object
from cluster.product import (
    Operator,
    conditions,
    injected,
    plugin,
    plugin_process,
    pod,
    pool,
    sidecar,
    status,
)
from servers.paths import target

#: A value that no report may contain.
_PLANTED = "planted-s3cr3t"


@pytest.fixture(scope="module")
def ways(kubernetes: Kubernetes, operator: Operator, base_image: str) -> Iterator[str]:
    """A namespace with a pod for every case, named in the tests."""
    namespace = "plugin"
    kubernetes.create_namespace(namespace)
    two = pod(base_image, "refused", "demo")
    two["spec"]["containers"].append(two["spec"]["containers"][0] | {"name": "engine"})
    plain = pod(base_image, "plain", "demo")
    del plain["metadata"]["labels"]
    waits = pod(base_image, "waits", "demo")
    waits["spec"]["containers"][0]["env"] = [{"name": "HF_TOKEN", "value": _PLANTED}]
    waits["metadata"]["annotations"] = {"vault.example/token": _PLANTED}
    kubernetes.apply(
        [pool("demo"), waits, two, plain, pod(base_image, "lost", "nowhere")],
        namespace=namespace,
    )
    kubernetes.kubectl("label", "namespace", namespace, "kvcachepool.io/injection=disabled")
    kubernetes.apply(pod(base_image, "missed", "demo"), namespace=namespace)
    kubernetes.kubectl("label", "namespace", namespace, "kvcachepool.io/injection-")
    kubernetes.wait("pod", "--all", "condition=Ready", namespace=namespace)

    def counted() -> bool:
        now = status(kubernetes, namespace, "demo")
        pods = now.get("pods", {})
        counts = [pods.get(key) for key in ("matched", "injected", "skipped", "missed")]
        return counts == [3, 1, 1, 1] and conditions(now)["Ready"] == ("True", "Ready")

    # A count is written once a minute.
    kubernetes.wait_for(counted, 90, "all pods are counted", namespace=namespace)
    yield namespace
    kubernetes.delete_namespace(namespace)


def _explained(kubernetes: Kubernetes, namespace: str, name: str) -> Object:
    done = plugin(kubernetes, "explain", f"pod/{name}", "-n", namespace, "-o", "json")
    assert done.returncode == 0, done.stderr
    explained: Object = json.loads(done.stdout)
    return explained


@pytest.mark.parametrize(
    ("name", "step", "reason", "expected"),
    [
        ("plain", "label", "", "has no label kvcachepool.io/pool"),
        ("lost", "pool", "PoolNotFound", "there is no KVCachePool nowhere"),
        ("refused", "injection", "ContainerAmbiguous", "kvcachepool.io/container"),
        ("missed", "injection", "Missed", "the webhook was not called"),
        ("waits", "attached", "", "no vLLM has contacted the sidecar"),
    ],
)
def test_explain_ends_at_the_failing_step(
    kubernetes: Kubernetes, ways: str, name: str, step: str, reason: str, expected: str
) -> None:
    explained = _explained(kubernetes, ways, name)
    last = explained["steps"][-1]
    assert not explained["attached"]
    assert (last["step"], last.get("reason", "")) == (step, reason), explained
    assert expected in last["message"]
    text = plugin(kubernetes, "explain", name, "-n", ways).stdout
    assert text.startswith(f"pod/{name} in namespace {ways}: not attached\n")
    assert expected in text.splitlines()[-1]


def test_status_lists_pools_and_details_of_one(kubernetes: Kubernetes, ways: str) -> None:
    head, row = (line.split() for line in plugin(kubernetes, "status", "-n", ways).stdout.splitlines())
    counted = dict(zip(head, row, strict=True))
    assert (counted["NAME"], counted["READY"]) == ("demo", "True")
    assert [counted[name] for name in ("PODS", "ATTACHED", "SKIPPED", "MISSED")] == ["1", "0", "1", "1"]
    detail = plugin(kubernetes, "status", "demo", "-n", ways, "-o", "json")
    pods = {each["name"]: (each["sidecar"], each["reason"]) for each in json.loads(detail.stdout)["pods"]}
    assert pods == {"waits": ("running", ""), "refused": ("none", "ContainerAmbiguous"), "missed": ("none", "")}
    text = plugin(kubernetes, "status", "demo", "-n", ways).stdout
    assert "InjectionReady" in text
    assert "WebhookAnswers" in text


def test_missing_objects_are_reported_in_a_sentence_with_an_error(kubernetes: Kubernetes, ways: str) -> None:
    for arguments, expected in (
        (("explain", "pod/none"), f"there is no pod none in namespace {ways}"),
        (("status", "none"), f"there is no KVCachePool none in namespace {ways}"),
        (("explain", "deployment/web"), "deployment/web is not a pod; write pod/NAME"),
    ):
        done = plugin(kubernetes, *arguments, "-n", ways)
        assert done.returncode != 0
        assert expected in done.stderr
        assert "panicked" not in done.stderr


def _levels(done: subprocess.CompletedProcess[str]) -> dict[str, set[str]]:
    """The levels of a doctor's findings by check."""
    levels: dict[str, set[str]] = {}
    for each in json.loads(done.stdout)["findings"]:
        levels.setdefault(each["check"], set()).add(each["level"])
    return levels


def test_doctor_accepts_a_sound_installation_and_fails_without_an_operator(kubernetes: Kubernetes, ways: str) -> None:
    done = plugin(kubernetes, "doctor", "-n", ways, "-o", "json")
    sound = ("kubernetes", "crd", "operator", "leader", "webhook", "certificate", "injection", "rights", "versions")
    # A pod of the pool was skipped, and one was missed.
    assert _levels(done) == {check: {"ok"} for check in sound} | {"pools": {"ok", "warn"}}, done.stdout
    assert done.returncode == 0
    done = plugin(kubernetes, "doctor", "-n", ways, "--operator-namespace", ways, "-o", "json")
    levels = _levels(done)
    assert (levels["operator"], levels["leader"], levels["crd"]) == ({"fail"}, {"fail"}, {"ok"}), done.stdout
    assert done.returncode == 1
    text = plugin(kubernetes, "doctor", "-n", ways, "--operator-namespace", ways).stdout
    assert "there is no pod of the operator in namespace" in text


def _viewer(kubernetes: Kubernetes, namespace: str) -> str:
    """The flag for a user with the role `view` in the namespace."""
    account = f"{namespace}:default"
    binding = ("create", "rolebinding", "viewer", "--clusterrole=view", f"--serviceaccount={account}")
    kubernetes.kubectl(*binding, namespace=namespace)
    return f"--as=system:serviceaccount:{account}"


def test_a_user_with_few_rights_is_told_which_and_gets_a_report_of_the_rest(
    kubernetes: Kubernetes, ways: str, tmp_path: Path
) -> None:
    viewer = _viewer(kubernetes, ways)
    done = plugin(kubernetes, "doctor", "-n", ways, viewer, "-o", "yaml")
    findings = yaml.safe_load(done.stdout)["findings"]
    assert all(each["level"] != "fail" for each in findings), done.stdout
    assert done.returncode == 0
    rights = [each["message"] for each in findings if each["check"] == "rights"]
    assert any(message.startswith("you may not patch kvcachepools.kvcachepool.io") for message in rights), rights
    refused = plugin(kubernetes, "pause", "demo", "-n", ways, viewer)
    assert refused.returncode == 1
    assert "forbidden" in refused.stderr
    file = tmp_path / "report.tar.gz"
    done = plugin(kubernetes, "report", "-n", ways, viewer, "--file", str(file))
    assert done.returncode == 0, done.stderr
    found = _archive(file)
    assert "`get` on `pods/proxy`" in found["errors.txt"], found["errors.txt"]
    assert "pods of the operator" in found["errors.txt"]
    assert f"namespaces/{ways}/pods/waits/pod.yaml" in found


def _archive(file: Path) -> dict[str, str]:
    """Texts of a report's files, by path without the first folder."""
    found = {}
    with tarfile.open(file) as archive:
        for member in archive.getmembers():
            content = archive.extractfile(member)
            assert content is not None
            found[member.name.split("/", 1)[1]] = content.read().decode()
    return found


def test_a_report_has_what_an_investigation_needs_and_no_secret(
    kubernetes: Kubernetes, ways: str, tmp_path: Path
) -> None:
    file = tmp_path / "report.tar.gz"
    done = plugin(kubernetes, "report", "-n", ways, "--file", str(file))
    assert done.returncode == 0, done.stderr
    assert file.stat().st_mode & 0o077 == 0, "only the user reads it"
    found = _archive(file)
    within = f"namespaces/{ways}"
    expected = [
        "doctor.txt",
        "versions.yaml",
        "cluster/kvcachepools.kvcachepool.io.yaml",
        "cluster/kvcachepool-injector.yaml",
        "operator/lease.yaml",
        f"{within}/pools/demo.yaml",
        f"{within}/events.yaml",
        f"{within}/configmaps.yaml",
        *(f"{within}/pods/waits/{name}" for name in ("pod.yaml", "status.json", "metrics.txt", "explain.txt")),
        *(f"{within}/pods/waits/{name}.log" for name in ("kvcachepool", "kvcachepool-init")),
        f"{within}/pods/refused/pod.yaml",
    ]
    assert [path for path in expected if path not in found] == []
    (replica, *_) = [path.split("/")[1] for path in found if path.endswith("/operator.log")]
    assert "kvcachepool_leader" in found[f"operator/{replica}/metrics.txt"]
    assert found[f"operator/{replica}/readyz.txt"] == "ready\n"
    assert "ContainerAmbiguous" in found[f"{within}/events.yaml"]
    assert json.loads(found[f"{within}/pods/waits/status.json"])["pool"]["name"] == "demo"
    assert found["errors.txt"] == "everything could be read\n"
    everything = "".join(found.values())
    assert _PLANTED not in everything
    manifest = yaml.safe_load(found[f"{within}/pods/waits/pod.yaml"])
    env = manifest["spec"]["containers"][0]["env"]
    assert {"name": "HF_TOKEN", "value": "<redacted>"} in env
    assert "last-applied" not in everything
    again = plugin(kubernetes, "report", "-n", ways, "--file", str(file))
    assert again.returncode == 1
    assert "cannot create" in again.stderr


def test_logs_of_a_pool_a_pod_and_the_operator(kubernetes: Kubernetes, operator: Operator, ways: str) -> None:
    alone = plugin(kubernetes, "logs", "demo", "-n", ways)
    assert alone.returncode == 0, alone.stderr
    lines = alone.stdout.splitlines()
    assert lines
    assert not lines[0].startswith("[pod/")
    assert plugin(kubernetes, "logs", "pod/waits", "--tail", "1", "-n", ways).stdout.splitlines() == lines[-1:]
    several = plugin(kubernetes, "logs", "--operator", "-n", ways).stdout.splitlines()
    names = {each["metadata"]["name"] for each in operator.pods()}
    assert {line.split(" ")[0] for line in several} == {f"[pod/{name}]" for name in names}
    following = plugin_process(kubernetes, "logs", "pod/waits", "--follow", "-n", ways)
    with following:
        assert following.stdout is not None
        assert following.stdout.readline() == f"{lines[0]}\n"
        assert following.poll() is None, "it waits for more"
        following.terminate()
    for arguments, expected in (
        (("pod/missed",), "there is no pod with such a container"),
        (("pod/plain",), "has no label or annotation kvcachepool.io/pool"),
        (("none",), "there is no KVCachePool none"),
    ):
        done = plugin(kubernetes, "logs", *arguments, "-n", ways)
        assert done.returncode == 1
        assert expected in done.stderr


def test_reload_waits_until_sidecars_use_the_changed_pool(
    kubernetes: Kubernetes, operator: Operator, namespace: str, base_image: str
) -> None:
    kubernetes.apply([pool("demo"), pod(base_image, "one", "demo")], namespace=namespace)
    kubernetes.wait("pod", "one", "condition=Ready", namespace=namespace)
    kubernetes.apply(pool("demo", cache={"minLoadTokens": 64}), namespace=namespace)
    path = f"/apis/kvcachepool.io/v1alpha1/namespaces/{namespace}/kvcachepools/demo"
    generation = kubernetes.request("GET", path)["metadata"]["generation"]
    assert generation > sidecar(kubernetes, namespace, "one")["config_generation"], "the kubelet is not that fast"
    done = plugin(kubernetes, "reload", "demo", "--timeout", "30s", "-n", namespace, "-o", "json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["pods"] == [{"pod": "one", "outcome": "Reloaded"}]
    assert sidecar(kubernetes, namespace, "one")["config_generation"] == generation
    (sidecar_status,) = [
        each
        for each in kubernetes.pod(namespace, "one")["status"]["initContainerStatuses"]
        if each["name"] == "kvcachepool"
    ]
    assert sidecar_status["restartCount"] == 0


def test_pause_and_resume_decide_about_new_pods(
    kubernetes: Kubernetes, operator: Operator, namespace: str, base_image: str
) -> None:
    kubernetes.apply(pool("demo"), namespace=namespace)

    def gets_a_sidecar() -> bool:
        path = f"/api/v1/namespaces/{namespace}/pods?dryRun=All"
        return injected(kubernetes.request("POST", path, pod(base_image, "asked", "demo")))

    kubernetes.wait_for(gets_a_sidecar, 30, "pods get a sidecar", namespace=namespace)
    for command, mode, changed in (
        ("pause", "Disabled", True),
        ("pause", "Disabled", False),
        ("resume", "Enabled", True),
        ("resume", "Enabled", False),
    ):
        done = plugin(kubernetes, command, "demo", "-n", namespace, "-o", "json")
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert (answer["mode"], answer["changed"]) == (mode, changed)

        def follows(mode: str = mode) -> bool:
            return gets_a_sidecar() == (mode == "Enabled")

        kubernetes.wait_for(follows, 30, f"new pods follow {mode}", namespace=namespace)


def test_the_connection_is_chosen_by_kubectls_flags(kubernetes: Kubernetes, ways: str) -> None:
    named = plugin(kubernetes, "status", "-n", ways, "--kubeconfig", str(kubernetes.kubeconfig), "-o", "yaml")
    assert yaml.safe_load(named.stdout)["pools"][0]["metadata"]["name"] == "demo"
    timed = plugin(kubernetes, "status", "-n", ways, "--request-timeout", "20s")
    assert timed.returncode == 0, timed.stderr
    for flags, expected in (
        (("--kubeconfig", "/nowhere"), "cannot connect to a cluster"),
        (("--context", "nowhere"), "cannot connect to a cluster"),
        (("--cluster", "nowhere"), "cannot connect to a cluster"),
        (("--as", "nobody"), 'User "nobody" cannot list'),
    ):
        done = plugin(kubernetes, "status", "-n", ways, *flags)
        assert done.returncode == 1, flags
        assert expected in done.stderr, done.stderr


def test_kubectl_completes_commands_options_and_pools(kubernetes: Kubernetes, ways: str, tmp_path: Path) -> None:
    (tmp_path / "kubectl-kvcachepool").symlink_to(target() / "debug" / "kubectl-kvcachepool")
    (tmp_path / "kubectl_complete-kvcachepool").symlink_to("kubectl-kvcachepool")
    env = kubernetes.env()
    env["PATH"] = f"{tmp_path}:{env['PATH']}"

    def offered(*words: str) -> list[str]:
        command = ["kubectl", "__complete", "kvcachepool", *words]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=30)
        return [line.split("\t")[0] for line in done.stdout.splitlines()]

    assert offered("sta") == ["status", ":4"]
    assert "demo" in offered("status", "-n", ways, "")
    assert offered("logs", "-n", ways, "de") == ["demo", ":4"]
    assert offered("size", "config.json", "-n", ways, "--pool", "") == ["demo", ":4"]
    assert offered("doctor", "--all") == ["--all-namespaces", ":4"]
    assert "demo" not in offered("status", "-n", "kube-system", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_command(kubernetes: Kubernetes, shell: str) -> None:
    script = plugin(kubernetes, "completion", shell).stdout
    for command in ("status", "explain", "doctor", "logs", "report", "reload", "pause", "resume", "purge"):
        assert command in script
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=10)

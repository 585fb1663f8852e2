"""A release's files, from stand-ins for the programs: the same inputs give the same bytes, and the files install."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from chart import CHART, ROOT

TOOLS = ROOT / "tools" / "dist"
IMAGE, DIGEST = "registry.example/kvcachepool", "sha256:" + "a" * 64
URL = "https://example.com/kvcachepool/releases/download/v0"
RUNBOOK = "https://example.com/kvcachepool/alerts.html"
ARCHES = ("amd64", "arm64")
VERSION = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]


def _inputs(folder: Path) -> list[str]:
    """Programs, wheel and SBOMs as the builds leave them."""
    arguments = []
    for arch in ARCHES:
        programs = folder / arch
        programs.mkdir(parents=True)
        for name in ("kubectl-kvcachepool", "kvcachepool-sidecar"):
            (programs / name).write_text(f"#!/bin/sh\necho {name} {arch}\n")
            (programs / name).chmod(0o755)
        arguments += ["--programs", f"{arch}={programs}"]
    sbom = folder / "sbom"
    sbom.mkdir()
    for name in ("kvcachepool-operator", "kvcachepool-sidecar"):
        (sbom / f"{name}_{VERSION}_linux_amd64.cdx.json").write_text("{}")
    wheel = folder / f"kvcachepool-{VERSION}-py3-none-any.whl"
    wheel.write_text("wheel")
    return [*arguments, "--sbom", str(sbom), "--wheel", str(wheel)]


def _bundle(out: Path, *more: str, inputs: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / "bundle.py"), "--out", str(out)]
    command += ["--image", IMAGE, "--digest", DIGEST, "--url", URL, "--runbook", RUNBOOK, *inputs, *more]
    environ = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000", "KVCACHEPOOL_BUILDER": "test"}
    return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=60)


@pytest.fixture(scope="module")
def release(helm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `make dist` leaves it."""
    folder = tmp_path_factory.mktemp("dist")
    done = _bundle(folder / "out", inputs=_inputs(folder))
    assert done.returncode == 0, done.stderr
    return folder / "out"


def test_a_release_has_all_files_and_their_sums(release):
    sums = dict(reversed(line.split("  ")) for line in (release / "SHA256SUMS").read_text().splitlines())
    assert set(sums) | {"SHA256SUMS", "provenance.json", "notes.md"} == {file.name for file in release.iterdir()}
    assert set(sums) == {
        f"kvcachepool-{VERSION}.tgz",
        "install.yaml",
        "crds.yaml",
        f"kvcachepool-docs-{VERSION}.tar.gz",
        f"kvcachepool-{VERSION}-py3-none-any.whl",
        f"kvcachepool-{VERSION}-py3-none-any.cdx.json",
        "kvcachepool.krew.yaml",
        *(f"{name}_{VERSION}_linux_amd64.cdx.json" for name in ("kvcachepool-operator", "kvcachepool-sidecar")),
        *(
            f"{name}_{VERSION}_linux_{arch}.tar.gz"
            for name in ("kubectl-kvcachepool", "kvcachepool-sidecar")
            for arch in ARCHES
        ),
    }
    for name, digest in sums.items():
        assert hashlib.sha256((release / name).read_bytes()).hexdigest() == digest


def test_the_same_inputs_in_another_folder_give_the_same_bytes(release, tmp_path):
    inputs = _inputs(tmp_path)
    for file in tmp_path.rglob("*"):
        os.utime(file, (1, 1))
    assert _bundle(tmp_path / "again", inputs=inputs).returncode == 0
    for name in ("SHA256SUMS", "provenance.json", "notes.md"):
        assert (tmp_path / "again" / name).read_text() == (release / name).read_text()


def test_the_chart_and_the_manifest_name_the_image_by_its_digest(release, helm):
    archive = str(release / f"kvcachepool-{VERSION}.tgz")
    rendered = helm("template", "pools", archive, "-n", "kv", "--kube-version", "1.33.0")
    assert rendered.returncode == 0, rendered.stderr
    assert helm("lint", archive, "--strict").returncode == 0
    for text in (rendered.stdout, (release / "install.yaml").read_text()):
        objects = [o for o in yaml.safe_load_all(text) if o]
        (deployment,) = (o for o in objects if o["kind"] == "Deployment")
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        environ = {e["name"]: e.get("value") for e in container["env"]}
        assert container["image"] == environ["KVCACHEPOOL_IMAGE"] == f"{IMAGE}@{DIGEST}"
        assert any(o["kind"] == "CustomResourceDefinition" for o in objects)
    crds = list(yaml.safe_load_all((release / "crds.yaml").read_text()))
    assert [o["kind"] for o in crds if o] == ["CustomResourceDefinition"] * len(list((ROOT / "crds").glob("*.yaml")))


def test_alerts_of_the_chart_lead_to_the_published_runbook(release, helm):
    archive = str(release / f"kvcachepool-{VERSION}.tgz")
    alerts = ("--set", "monitoring.alerts.enabled=true", "--show-only", "templates/alerts.yaml")
    rendered = helm("template", "pools", archive, "-n", "kv", "--kube-version", "1.33.0", *alerts)
    assert rendered.returncode == 0, rendered.stderr
    for group in yaml.safe_load(rendered.stdout)["spec"]["groups"]:
        for rule in group["rules"]:
            assert rule["annotations"]["runbook_url"] == f"{RUNBOOK}#{rule['alert'].lower()}"


def test_the_documentation_has_the_pages_and_the_released_manifest(release):
    with tarfile.open(release / f"kvcachepool-docs-{VERSION}.tar.gz") as archive:
        names = archive.getnames()
        manifest = archive.extractfile("manifests/install.yaml")
        assert manifest is not None
        assert manifest.read() == (release / "install.yaml").read_bytes()
    assert {"README.md", "docs/guides/alerts.md", "manifests/kvcachepool.yaml"} <= set(names)


def test_krew_installs_the_archives_of_the_release(release):
    manifest: dict[str, Any] = yaml.safe_load((release / "kvcachepool.krew.yaml").read_text())
    assert manifest["spec"]["version"] == f"v{VERSION}"
    platforms = manifest["spec"]["platforms"]
    assert [p["selector"]["matchLabels"] for p in platforms] == [{"os": "linux", "arch": arch} for arch in ARCHES]
    for platform in platforms:
        base, name = platform["uri"].rsplit("/", 1)
        assert base == URL
        assert hashlib.sha256((release / name).read_bytes()).hexdigest() == platform["sha256"]
        with tarfile.open(release / name) as archive:
            members = {m.name: m for m in archive}
        assert set(members) == {platform["bin"], "LICENSE"}
        assert members[platform["bin"]].mode == 0o755
        assert {(m.mtime, m.uid, m.uname) for m in members.values()} == {(1700000000, 0, "")}


def test_notes_and_provenance_say_what_was_released_from_what(release):
    notes = (release / "notes.md").read_text()
    assert notes in (ROOT / "CHANGELOG.md").read_text()
    assert not re.search("^## ", notes, re.M)
    predicate = json.loads((release / "provenance.json").read_text())
    assert predicate["buildDefinition"]["externalParameters"]["image"] == f"{IMAGE}@{DIGEST}"
    commit = predicate["buildDefinition"]["resolvedDependencies"][0]["digest"]["gitCommit"]
    assert re.fullmatch("[0-9a-f]{40}", commit)
    assert predicate["runDetails"]["builder"]["id"] == "test"
    sbom = json.loads((release / f"kvcachepool-{VERSION}-py3-none-any.cdx.json").read_text())
    assert sbom["metadata"]["component"]["purl"] == f"pkg:pypi/kvcachepool@{VERSION}"


@pytest.mark.parametrize(
    ("more", "word"),
    [
        (["--release", "v9.9.9"], "cannot release v9.9.9"),
        (["--digest", "sha256:1"], "64 hexadecimal digits"),
        (["--programs", "riscv64=/"], "amd64=FOLDER or arm64=FOLDER"),
    ],
)
def test_a_wrong_parameter_is_refused_before_anything_is_written(tmp_path, more, word):
    done = _bundle(tmp_path / "out", *more, inputs=_inputs(tmp_path))
    assert done.returncode != 0
    assert word in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_dry_run_of_pushing_and_signing_prints_the_commands(release):
    command = [TOOLS / "push.sh", release, "oci://registry.example/charts", "--dry-run", "--plain-http"]
    pushed = subprocess.run(command, capture_output=True, text=True, check=True)
    archive = release / f"kvcachepool-{VERSION}.tgz"
    assert pushed.stdout.strip().endswith(f"helm push {archive} oci://registry.example/charts --plain-http")
    signed = subprocess.run(
        [TOOLS / "sign.sh", release, f"{IMAGE}@{DIGEST}", "--dry-run"], capture_output=True, text=True, check=True
    )
    commands = [line.split()[:2] for line in signed.stdout.splitlines()]
    assert commands[:3] == [["cosign", "sign-blob"], ["cosign", "attest-blob"], ["cosign", "sign"]]
    assert signed.stdout.count(f"{IMAGE}@{DIGEST}") == 4, "signature, provenance and two SBOMs"


@pytest.mark.parametrize("script", ["push.sh", "sign.sh"])
def test_a_changed_file_is_neither_pushed_nor_signed(release, tmp_path, script):
    copy = tmp_path / "copy"
    shutil.copytree(release, copy)
    (copy / "install.yaml").write_text("changed")
    to = "oci://registry.example/charts" if script == "push.sh" else f"{IMAGE}@{DIGEST}"
    done = subprocess.run([TOOLS / script, copy, to, "--dry-run"], capture_output=True, text=True)
    assert done.returncode != 0
    assert "install.yaml: FAILED" in done.stdout + done.stderr


@pytest.fixture
def with_cyclonedx(tmp_path: Path) -> dict[str, str]:
    """An environment with a stand-in for cargo-cyclonedx. Like the real one, it writes beside the manifest."""
    tool = tmp_path / "bin" / "cargo-cyclonedx"
    tool.parent.mkdir()
    tool.write_text(
        '#!/bin/sh\nfolder="$(dirname "$4")"\nfor target; do :; done\n'
        'echo "{\\"ref\\": \\"path+file://$folder/operator#$target\\"}" >"$folder/operator/tool_bin.cdx.json"\n'
    )
    tool.chmod(0o755)
    return {**os.environ, "PATH": f"{tool.parent}:{os.environ['PATH']}"}


def test_sboms_are_made_in_a_copy_and_name_no_folder_of_this_machine(tmp_path, with_cyclonedx):
    before = subprocess.run(["git", "status", "--short"], cwd=ROOT, capture_output=True).stdout
    subprocess.run([TOOLS / "sbom.sh", "arm64", tmp_path / "out"], check=True, env=with_cyclonedx)
    (written,) = (tmp_path / "out").iterdir()
    assert written.name == f"tool_{VERSION}_linux_arm64.cdx.json"
    assert json.loads(written.read_text()) == {"ref": "path+file:///kvcachepool/operator#aarch64-unknown-linux-gnu"}
    assert subprocess.run(["git", "status", "--short"], cwd=ROOT, capture_output=True).stdout == before


def test_one_command_makes_all_of_it_from_programs_that_are_there(tmp_path, with_cyclonedx):
    _inputs(tmp_path)
    environ = {**with_cyclonedx, "IMAGE": IMAGE, "DIGEST": DIGEST, "URL": URL, "PYTHON": sys.executable}
    command = [TOOLS / "dist.sh", tmp_path / "out", *(f"{arch}={tmp_path / arch}" for arch in ARCHES)]
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    wheel = tmp_path / "out" / f"kvcachepool-{VERSION}-py3-none-any.whl"
    assert wheel.stat().st_size > 100_000, "the real one"
    assert wheel.name in (tmp_path / "out" / "SHA256SUMS").read_text()
    assert len(list((tmp_path / "out").glob("*_linux_*.tar.gz"))) == 4


def test_a_release_needs_a_pushed_image(tmp_path):
    environ = {key: value for key, value in os.environ.items() if key not in ("IMAGE", "DIGEST")}
    done = subprocess.run([TOOLS / "dist.sh", tmp_path], capture_output=True, text=True, env=environ)
    assert done.returncode != 0
    assert "make dist IMAGE=" in done.stderr


def test_another_architecture_without_its_compiler_is_named(tmp_path):
    other = "arm64" if os.uname().machine == "x86_64" else "amd64"
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "uname", "dirname"):
        (tools / name).symlink_to(shutil.which(name) or name)
    done = subprocess.run([TOOLS / "programs.sh", other], capture_output=True, text=True, env={"PATH": str(tools)})
    assert done.returncode == 3
    assert "run tools/setup.sh dist" in done.stderr


def test_the_release_workflow_calls_scripts_that_exist_and_pinned_actions():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    called = {name for step in steps for name in re.findall(r"tools/[\w/]+\.sh", step.get("run", ""))}
    assert called >= {f"tools/dist/{name}.sh" for name in ("dist", "push", "sign")}
    assert [name for name in called if not os.access(ROOT / name, os.X_OK)] == []
    for action in (step["uses"] for step in steps if "uses" in step):
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), "a tag can be moved to other code"
    assert workflow["permissions"] == {}, "each job has only the rights that it needs"

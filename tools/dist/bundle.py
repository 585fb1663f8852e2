"""Writes the files of a release into a folder, from programs, a wheel and SBOMs that are there already.

The same inputs give the same bytes, so that two builders can compare SHA256SUMS.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from archive import tar_gz

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "kvcachepool"
#: The programs that have an archive of their own.
PROGRAMS = ("kubectl-kvcachepool", "kvcachepool-sidecar")


def version() -> str:
    """The one version of crates, chart and connector."""
    found = re.search(r'^\[workspace\.package\]\nversion = "(.*)"$', (ROOT / "Cargo.toml").read_text(), re.M)
    assert found, "Cargo.toml has no version"
    return found[1]


def notes(changelog: str, release: str) -> tuple[str, bool]:
    """The section of a version in the changelog, and whether it says `(unreleased)`."""
    heading = re.search(rf"^## {re.escape(release)} \((.*)\)\n", changelog, re.M)
    if heading is None:
        sys.exit(f"CHANGELOG.md has no section `## {release} (DATE)`: add one")
    return changelog[heading.end() :].split("\n## ")[0].strip() + "\n", heading[1] == "unreleased"


def _set(text: str, before: str, after: str) -> str:
    assert text.count(before) == 1, f"values.yaml has {before!r} {text.count(before)} times, not once"
    return text.replace(before, after)


def chart(folder: Path, image: str, digest: str, runbook: str | None) -> Path:
    """A copy of the chart whose default image is the released one."""
    staged = folder / "kvcachepool"
    shutil.copytree(CHART, staged)
    values = (staged / "values.yaml").read_text()
    values = _set(values, "\n  repository: kvcachepool\n", f"\n  repository: {image}\n")
    values = _set(values, '\n  digest: ""\n', f"\n  digest: {digest}\n")
    if runbook:
        values = _set(values, '\n    runbookUrl: ""\n', f"\n    runbookUrl: {runbook}\n")
    (staged / "values.yaml").write_text(values)
    return staged


_KREW = """\
apiVersion: krew.googlecontainertools.github.com/v1alpha2
kind: Plugin
metadata:
  name: kvcachepool
spec:
  version: v{release}
  homepage: {home}
  shortDescription: Explain and check KV caches of vLLM pods
  description: |
    Shows pools of KV cache (KVCachePool), says for each pod why it is cached or not, checks the
    shared tiers of a pool and the whole installation, collects a report without secrets, and
    computes sizes.
  platforms:
"""
_KREW_PLATFORM = """\
    - selector:
        matchLabels: {{os: linux, arch: {arch}}}
      uri: {url}/{file}
      sha256: {digest}
      bin: kubectl-kvcachepool
"""


def krew(release: str, url: str, archives: dict[str, Path]) -> str:
    """The manifest of the kubectl plugin, from its archives by their architecture."""
    platforms = [
        _KREW_PLATFORM.format(arch=arch, url=url, file=file.name, digest=_sha256(file))
        for arch, file in sorted(archives.items())
    ]
    return _KREW.format(release=release, home=url.split("/releases/")[0]) + "".join(platforms)


def wheel_sbom(release: str) -> str:
    """CycloneDX of the wheel. It has no requirements: vLLM brings what the connector imports."""
    project = (ROOT / "sidecar" / "connector" / "pyproject.toml").read_text()
    assert "\ndependencies" not in project, "the wheel has requirements now: list them as components"
    component = {"type": "library", "name": "kvcachepool", "version": release, "purl": f"pkg:pypi/kvcachepool@{release}"}
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {**component, "licenses": [{"expression": "Apache-2.0"}]}},
        "components": [],
    }
    return json.dumps(document, indent=2) + "\n"


def documentation(manifest: bytes) -> dict[str, bytes | Path]:
    """The pages with what they link to, and the released manifest instead of the one for a checkout."""
    parts = ("docs", "manifests", "charts/kvcachepool", "*.md", "LICENSE", "crds")
    listed = subprocess.run(["git", "ls-files", *parts], cwd=ROOT, check=True, capture_output=True, text=True)
    files: dict[str, bytes | Path] = {name: ROOT / name for name in listed.stdout.splitlines()}
    return {**files, "manifests/install.yaml": manifest}


def provenance(options: argparse.Namespace) -> str:
    """The SLSA provenance predicate, which sign.sh attests for SHA256SUMS and for the image."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True)
    source = os.environ.get("KVCACHEPOOL_SOURCE", options.url.split("/releases/")[0])
    predicate = {
        "buildDefinition": {
            "buildType": "https://slsa-framework.github.io/github-actions-buildtypes/workflow/v1",
            "externalParameters": {
                "workflow": {"repository": source, "path": ".github/workflows/release.yml"},
                "image": f"{options.image}@{options.digest}",
            },
            "resolvedDependencies": [{"uri": f"git+{source}", "digest": {"gitCommit": commit.stdout.strip()}}],
        },
        "runDetails": {
            "builder": {"id": os.environ.get("KVCACHEPOOL_BUILDER", "local")},
            "metadata": {"invocationId": os.environ.get("KVCACHEPOOL_INVOCATION", "local")},
        },
    }
    return json.dumps(predicate, indent=2) + "\n"


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def write(options: argparse.Namespace, epoch: int) -> None:
    out, release = options.out, version()
    text, unreleased = notes((ROOT / "CHANGELOG.md").read_text(), release)
    if options.release and (options.release != f"v{release}" or unreleased):
        sys.exit(f"cannot release {options.release}: the version is {release}, and CHANGELOG.md must have its date")
    shutil.rmtree(out, ignore_errors=True)
    (out / "work").mkdir(parents=True)
    staged = chart(out / "work", options.image, options.digest, options.runbook)
    tar_gz(
        out / f"kvcachepool-{release}.tgz",
        {f"kvcachepool/{f.relative_to(staged)}": f for f in staged.rglob("*") if f.is_file()},
        epoch,
    )
    rendered = subprocess.run(
        [ROOT / "tools" / "render_manifests.sh", "--print", staged], check=True, stdout=subprocess.PIPE
    )
    (out / "install.yaml").write_bytes(rendered.stdout)
    tar_gz(out / f"kvcachepool-docs-{release}.tar.gz", documentation(rendered.stdout), epoch)
    shutil.rmtree(out / "work")
    (out / "crds.yaml").write_text("".join(f"---\n{file.read_text()}" for file in sorted((ROOT / "crds").glob("*.yaml"))))
    shutil.copyfile(options.wheel, out / options.wheel.name)
    plugins = {}
    for arch, folder in options.programs:
        for name in PROGRAMS:
            target = out / f"{name}_{release}_linux_{arch}.tar.gz"
            tar_gz(target, {name: folder / name, "LICENSE": ROOT / "LICENSE"}, epoch)
            if name == "kubectl-kvcachepool":
                plugins[arch] = target
    (out / "kvcachepool.krew.yaml").write_text(krew(release, options.url, plugins))
    for sbom in sorted(options.sbom.glob("*.cdx.json")):
        shutil.copyfile(sbom, out / sbom.name)
    (out / f"kvcachepool-{release}-py3-none-any.cdx.json").write_text(wheel_sbom(release))
    (out / "provenance.json").write_text(provenance(options))
    (out / "notes.md").write_text(text)
    listed = sorted(file for file in out.iterdir() if file.name not in ("provenance.json", "notes.md"))
    (out / "SHA256SUMS").write_text("".join(f"{_sha256(file)}  {file.name}\n" for file in listed))


def _programs(text: str) -> tuple[str, Path]:
    arch, _, folder = text.partition("=")
    if arch not in ("amd64", "arm64") or not folder:
        raise argparse.ArgumentTypeError(f"expected amd64=FOLDER or arm64=FOLDER, found {text!r}")
    return arch, Path(folder)


def _digest(text: str) -> str:
    if not re.fullmatch("sha256:[0-9a-f]{64}", text):
        raise argparse.ArgumentTypeError(f"expected sha256: and 64 hexadecimal digits, found {text!r}")
    return text


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder, which is emptied first")
    parser.add_argument("--image", required=True, help="registry and name of the image, without a tag")
    parser.add_argument("--digest", type=_digest, required=True, help="digest that the registry has for the image")
    parser.add_argument("--url", required=True, help="address below which the files will be published")
    parser.add_argument("--runbook", help="address of the published page Alerts")
    parser.add_argument("--release", help="tag; refused unless version and changelog agree")
    parser.add_argument("--programs", type=_programs, action="append", required=True, help="amd64=FOLDER, arm64=FOLDER")
    parser.add_argument("--wheel", type=Path, required=True)
    parser.add_argument("--sbom", type=Path, required=True, help="folder of *.cdx.json")
    return parser


if __name__ == "__main__":
    write(parser().parse_args(), int(os.environ["SOURCE_DATE_EPOCH"]))

"""What is installed is what was tested: no index, mirror or image can put another package in its place."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.each import each

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
WORKFLOWS = sorted((ROOT / ".github/workflows").iterdir())
OF_ANOTHER_BUILD = re.compile(r"torch|triton|cuda-.*|nvidia-(?!ml-py).*")
"""Packages that differ between the builds of torch: they have a version, and no hash."""


def pins(file: str) -> list[Requirement]:
    """Return the requirements in a file, without hashes."""
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    return [Requirement(line.split(" #")[0].rstrip("\\ ")) for line in lines if re.match(r"\w", line)]


def versions(file: str) -> dict[str, str]:
    """Return the version of each package that a file pins for this Python and this machine."""
    here = [pin for pin in pins(file) if pin.marker is None or pin.marker.evaluate()]
    names = [canonicalize_name(pin.name) for pin in here]
    assert len(set(names)) == len(names) and all(str(pin.specifier).startswith("==") for pin in here)
    return {name: str(pin.specifier).removeprefix("==") for name, pin in zip(names, here, strict=True)}


@pytest.mark.skipif(Path(sys.prefix).name in ("latest", "oldest"), reason="`make test-latest` and `-oldest` try others")
def test_each_tested_version_is_pinned_with_all_that_it_brings() -> None:
    pinned = versions("constraints.txt")

    assert "\n-c constraints.txt\n" in (ROOT / "requirements.txt").read_text(encoding="utf-8")
    assert versions("requirements.txt").items() <= pinned.items()
    waiting, reached = list(versions("requirements.txt")), set[str]()
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        reached.add(name)
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # a tool that only CI needs
            continue
        assert package.version.partition("+")[0] == pinned[name], name
        needed = map(Requirement, package.requires or ())
        waiting += [
            canonicalize_name(requirement.name)
            for requirement in needed
            if not requirement.marker or requirement.marker.evaluate({"extra": ""})
        ]
    assert {"huggingface-hub", "starlette", "numpy", "tokenizers"} <= reached


def test_each_pinned_package_has_hashes_if_it_is_the_same_with_every_build_of_torch() -> None:
    hashed = re.findall(
        r"^(\S+)==(\S+).*?((?:\s*\\?\n    --hash=sha256:[0-9a-f]{64})+)$",
        (ROOT / "hashes.txt").read_text(),
        re.MULTILINE,
    )

    wanted = [(pin.name, str(pin.specifier)[2:]) for pin in pins("constraints.txt")]
    assert [(name, version) for name, version, _ in hashed] == [
        line for line in wanted if not OF_ANOTHER_BUILD.fullmatch(line[0])
    ]
    assert len(hashed) == len(pins("hashes.txt"))


def test_make_install_takes_no_package_that_has_another_hash(tmp_path: Path) -> None:
    """An index offers a pip of its own, both with the pinned version and newer."""
    for version in ("26.3", "99.0"):
        with zipfile.ZipFile(tmp_path / f"pip-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr("pip/__init__.py", "")
            wheel.writestr(
                f"pip-{version}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: pip\nVersion: {version}\n"
            )
            wheel.writestr(
                f"pip-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"pip-{version}.dist-info/RECORD", "")
    assert f"\npip=={versions('constraints.txt')['pip']} \\\n" in (ROOT / "hashes.txt").read_text()
    pip = tmp_path / "venv" / "bin" / "pip"
    pip.parent.mkdir(parents=True)
    pip.write_text(f'#!/bin/sh\nexec {sys.executable} -m pip "$@"\n')
    pip.chmod(0o755)
    offers = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    target = tmp_path / "installed"

    done = subprocess.run(
        ["make", "install", f"VENV={tmp_path / 'venv'}", "PYTHON=true"],
        cwd=ROOT,
        env=os.environ | offers | {"PIP_TARGET": str(target)},
        capture_output=True,
        text=True,
    )

    assert done.returncode != 0 and "THESE PACKAGES DO NOT MATCH THE HASHES" in done.stderr
    assert not target.exists()


@each(DOCKERFILES)
def test_an_image_is_built_from_digests_and_hashes(dockerfile: Path) -> None:
    text = dockerfile.read_text(encoding="utf-8").replace("\\\n", "")
    installs = [part for part in re.split(r"&&|\n", text) if "pip install" in part]

    assert all("@sha256:" in base for base in re.findall(r"^FROM (\S+)", text, re.MULTILINE))
    assert len(installs) >= 3
    assert all("--require-hashes" in part or "constraints hashes.txt" in part for part in installs)


@each([ROOT / "Makefile", ROOT / "requirements.txt", *DOCKERFILES])
def test_no_package_can_come_from_a_second_index(file: Path) -> None:
    """With --extra-index-url pip takes the highest version of all indexes, whoever uploaded it."""
    assert not re.search(r"extra-index|find-links|trusted-host", file.read_text(encoding="utf-8"))


@each(WORKFLOWS)
def test_a_workflow_pins_its_actions_and_may_only_read(workflow: Path) -> None:
    text = workflow.read_text(encoding="utf-8")
    content = yaml.safe_load(text)
    used = re.findall(r"uses: *(.*)", text)

    assert used and all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action) for action in used)
    assert content["permissions"] == {"contents": "read"}
    assert "pull_request_target" not in content[True] and "secrets." not in text  # True: YAML's `on`
    for job in content["jobs"].values():
        assert "permissions" not in job and int(job["timeout-minutes"]) <= 150
        checkouts = [step for step in job["steps"] if step.get("uses", "").startswith("actions/checkout@")]
        assert [step["with"]["persist-credentials"] for step in checkouts] == [False]


def test_ci_runs_all_checks_and_looks_for_known_holes() -> None:
    steps = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]["ci"]["steps"]

    assert [step["run"] for step in steps if "run" in step] == ["make audit", ".ci/run"]
    assert "pip-audit --strict" in (ROOT / "Makefile").read_text(encoding="utf-8")

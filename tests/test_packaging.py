"""What is shipped beside the code: the wheel, the images, the citation, the issue forms, the pictures."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.images import make
from tests.each import each
from tuner import __version__

ROOT = Path(__file__).parents[1]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
FORMS = [path for path in sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")) if path.name != "config.yml"]


def run(*command: object, cwd: Path, **env: str) -> str:
    """Run a command outside of the checkout, and return what it printed."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=clean | env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.long
def test_the_wheel_holds_every_file_of_the_package_and_trains_outside_of_the_checkout(tmp_path: Path) -> None:
    pip, away, source = (sys.executable, "-m", "pip", "--quiet"), tmp_path / "away", tmp_path / "source"
    away.mkdir()
    # A copy: setuptools builds beside setup.py, and what an older build left there would go into the wheel.
    shutil.copytree(ROOT / "tuner", source / "tuner", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("LICENSE", "README.md", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, source)
    written = {str(path.relative_to(source)) for path in source.glob("tuner/**/*") if path.is_file()}
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source, cwd=away)
    (wheel,) = tmp_path.glob("*.whl")

    assert {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name} == written

    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=away)
    bin_dir = tmp_path / "venv" / "bin"
    run(*pip, "--python", bin_dir / "python", "install", "--no-deps", wheel, cwd=away)
    # The libraries are those of this environment: no gigabytes are installed. A .pth file in a folder that is reached
    # through another is not read, so an editable tuner of this environment is not found.
    where = run(bin_dir / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=away).strip()
    Path(where, "libraries.pth").write_text(sysconfig.get_path("purelib"))

    tuner = bin_dir / "tuner"
    found = run(bin_dir / "python", "-c", "import tuner; print(tuner.__file__)", cwd=away)
    assert found.startswith(str(tmp_path / "venv"))
    assert f"tuner, version {__version__}" in run(tuner, "--version", cwd=away)
    (away / "sft.yaml").write_text("model_name_or_path: Qwen/Qwen3-8B\nstage: sft\nfinetuning_type: lora\ndataset: x\n")
    run(tuner, "import", "sft.yaml", "-o", "mine.py", cwd=away)
    run(tuner, "explain", "bad-recipe", cwd=away)
    flags = ("--set", "max_steps=2", "--deepspeed", "deepspeed_zero2", "--work-dir", "run")
    run(tuner, "train", "tiny_lora_sample_e1", *flags, cwd=away, CUDA_VISIBLE_DEVICES="")
    run(tuner, "export", "run", "out", "--merge", cwd=away)
    assert "max_steps" in (away / "run" / "recipe.py").read_text()
    assert (away / "run" / "report.html").is_file() and (away / "out" / "model.safetensors").is_file()


def test_setup_py_holds_no_fact_and_pyproject_has_the_packages_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

    setup = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    assert [ast.unparse(line) for line in setup.body[1:]] == ["from setuptools import setup", "setup()"]
    assert project["tool"]["setuptools"]["dynamic"] == {"version": {"attr": "tuner.__version__"}}
    assert project["project"]["scripts"] == {"tuner": "tuner.cli:main"}


def test_pre_commit_runs_what_make_check_runs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    target = (ROOT / "Makefile").read_text(encoding="utf-8").split("\ncheck: install\n")[1].split("\n\n")[0]
    files = " ".join(str(path.relative_to(ROOT)) for path in DOCKERFILES)

    run_by_make = [line.strip().removeprefix("$(BIN)/") for line in target.splitlines()]
    assert [hook["entry"] for hook in hooks] == [line.replace("docker/*.Dockerfile", files) for line in run_by_make]


@each(DOCKERFILES)
def test_an_image_has_a_pinned_base_an_ordinary_user_and_no_secret(dockerfile: Path) -> None:
    lines = dockerfile.read_text(encoding="utf-8").splitlines()
    words = {word: [line.split(maxsplit=1)[1] for line in lines if line.startswith(f"{word} ")] for word in _WORDS}

    assert all(re.fullmatch(r"\S+:\d+\.\d+\.\d+-\S+@sha256:[0-9a-f]{64}", base) for base in words["FROM"])
    assert words["USER"] == ["$UID"] and words["ARG"] == ["UID=1000"]
    assert not re.search(r"(?i)token|secret|password|_key", "\n".join(words["ENV"] + words["ARG"] + words["RUN"]))
    assert words["ENTRYPOINT"] == ['["tuner"]']
    copied = {name for line in words["COPY"] for name in line.split()[:-1]}
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert (
        allowed - copied <= {"requirements-gpu.txt"}
        and copied <= allowed
        and all(map(Path.exists, map(ROOT.joinpath, copied)))
    )


_WORDS = ("FROM", "USER", "ARG", "ENV", "RUN", "ENTRYPOINT", "COPY")


@each(DOCKERFILES)
def test_an_image_installs_the_tested_libraries_and_none_of_the_tests(dockerfile: Path) -> None:
    (script,) = re.findall(r"sed '([^']+)' requirements.txt", dockerfile.read_text(encoding="utf-8"))

    installed = run("sed", script, "requirements.txt", cwd=ROOT)

    assert "torch==" in installed and "jinja2==" in installed and "pytest" not in installed


@each([("a driver", "/proc/driver/nvidia/version"), ("no driver", "")])
def test_the_kernels_for_gpus_are_installed_where_there_is_a_driver(case: str, driver: str) -> None:
    commands = run("make", "-n", "install", f"NVIDIA_DRIVER={driver}", "VENV=build/none", cwd=ROOT)

    assert ("pip install --quiet --no-deps --require-hashes -r requirements-gpu.txt" in commands) is (
        case == "a driver"
    )


def test_the_citation_has_what_the_schema_requires_and_the_packages_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))

    # Citation File Format 1.2.0: these keys are required, and an author who is no person has a name alone.
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert cited["cff-version"] == "1.2.0" and cited["type"] == "software"
    assert all(author["name"] for author in cited["authors"])
    assert cited["version"] == __version__


@each(FORMS)
def test_an_issue_form_is_one_that_github_takes_and_asks_for_the_doctors_report(form: Path) -> None:
    content: dict[str, Any] = yaml.safe_load(form.read_text(encoding="utf-8"))
    asked = [part for part in content["body"] if part["type"] != "markdown"]
    ids = [part["id"] for part in asked]

    assert content["name"] and content["description"]
    assert len(ids) == len(set(ids)) and all(part["attributes"]["label"] for part in asked)
    (doctor,) = (part for part in asked if "tuner doctor --json" in part["attributes"].get("description", ""))
    assert doctor.get("validations", {}).get("required", False) is (form.name == "bug.yml")


def test_the_pictures_are_small_and_load_nothing() -> None:
    terminal = (ROOT / "docs/images/terminal.svg").read_text(encoding="utf-8")

    assert "tuner" in terminal and "train" in terminal
    assert "@font-face" not in terminal and not re.search(r"(?:href|src|url)[=(]\W?https?:", terminal)
    assert all(path.stat().st_size < 300_000 for path in (ROOT / "docs/images").glob("*.[sp][vn]g"))


def test_no_picture_is_made_of_a_run_that_announced_another_number_of_steps() -> None:
    assert make.steps_agree("steps: 60 (exact)\nstep 1/60  loss 4\nstep 60/60  loss 3")
    assert not make.steps_agree("steps: 6627\nstep 1/1188\nstep 1188/1188")
    assert not make.steps_agree("steps: 60\nstep 1/60")
    assert not make.steps_agree("Trained 60 steps.")


def test_the_guide_for_contributors_names_what_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    marks = re.findall(r'^    "(\w+): ', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)

    assert all(f"`{mark}`" in text for mark in marks)
    assert all(
        f"\n{target}:" in makefile or f" {target}" in makefile for target in re.findall(r"make (\S+?)[`\s]", text)
    )
    assert all((ROOT / link).exists() for link in re.findall(r"\]\(([^)#]+)\)", text))

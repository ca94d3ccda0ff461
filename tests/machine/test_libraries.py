from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest

from tuner.errors import MachineError
from tuner.machine import libraries
from tuner.machine.libraries import MINIMUM, QUANTIZED, TESTED, cuda_problem, problems, torch_cuda_version, versions


def _install(site: Path, name: str, version: str, *, needs: str | None = None) -> None:
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir()
    more = f"Requires-Dist: {needs}\n" if needs else ""
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{more}")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder whose distributions come before the installed ones."""
    monkeypatch.syspath_prepend(tmp_path)
    libraries.version_of.cache_clear()
    yield tmp_path
    libraries.version_of.cache_clear()


def _refusal(*, quantized: bool = False, needs_cuda: bool = False) -> MachineError:
    first = next(problems(quantized=quantized, needs_cuda=needs_cuda))
    assert first.exit_code == 3
    return first


def test_a_library_of_which_one_folder_has_two_versions_is_refused(site: Path) -> None:
    for version in ("99.9", "99.10"):
        _install(site, "accelerate", version)

    error = _refusal()

    assert str(error.where) == str(site)
    assert "99.9 and as 99.10" in error.what and "accelerate==99.10" in str(error.fix)


def test_of_two_folders_with_a_library_the_first_one_counts(site: Path) -> None:
    _install(site, "accelerate", versions()["accelerate"] or "")

    assert list(problems(quantized=False, needs_cuda=False)) == []


def test_versions_are_those_of_the_installed_libraries() -> None:
    found = versions()

    assert found.keys() == MINIMUM.keys() | QUANTIZED.keys()
    assert found["torch"] == metadata.version("torch")


@pytest.mark.parametrize("name", MINIMUM)
def test_an_old_library_is_named_with_both_versions_and_the_command(site: Path, name: str) -> None:
    _install(site, name, "0.0.9")

    text = str(_refusal())

    assert f"{name} 0.0.9 is older than {MINIMUM[name]}" in text
    assert f"pip install '{name}>={MINIMUM[name]}'" in text


def test_a_missing_library_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(libraries.MINIMUM, "no-such-library-here", "1.0")

    text = str(_refusal())

    assert "no-such-library-here is not installed" in text
    assert "pip install 'no-such-library-here>=1.0'" in text
    assert versions()["no-such-library-here"] is None


def test_bitsandbytes_is_asked_for_only_by_a_quantized_recipe(site: Path) -> None:
    _install(site, "bitsandbytes", "0.1")

    assert list(problems(quantized=False, needs_cuda=False)) == []
    assert "bitsandbytes 0.1 is older" in str(_refusal(quantized=True))


@pytest.mark.parametrize(
    ("version", "is_new"),
    [
        *((version, True) for version in ("2.9", "2.9.0", "2.9.0+cu124", "2.9.0a0+git12", "2.10", "3")),
        *((version, False) for version in ("2.8.1+cu124", "2.8.9", "2", "1.99")),
    ],
)
def test_a_version_is_new_enough_or_not_whatever_its_suffix(
    site: Path, monkeypatch: pytest.MonkeyPatch, version: str, is_new: bool
) -> None:
    monkeypatch.setitem(libraries.MINIMUM, "torch", "2.9")
    _install(site, "torch", version)

    told = [problem.what for problem in problems(quantized=False, needs_cuda=False)]
    assert told[:1] == [f"torch {version} is older than 2.9"] * (not is_new)


@pytest.fixture
def fake_torch(site: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    # Once torch is imported, Python tells its real place whatever sys.path says.
    spec = spec_from_file_location("torch", site / "torch" / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    return partial(_fake_torch, site)


def _fake_torch(site: Path, cuda: str) -> None:
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (site / "torch" / "version.py").write_text(f"__version__ = '2.13.0'\ndebug = False\n{cuda}\nhip = None\n")
    _install(site, "torch", "2.13.0")


@pytest.mark.parametrize("line", ["cuda: Optional[str] = None", "cuda = None"])
def test_a_cpu_build_of_torch_beside_gpus_is_refused(fake_torch: Callable[[str], None], line: str) -> None:
    fake_torch(line)

    text = str(_refusal(needs_cuda=True))

    assert "torch 2.13.0 is a CPU build" in text
    assert "CUDA_VISIBLE_DEVICES=''" in text
    assert list(problems(quantized=False, needs_cuda=False)) == []


@pytest.mark.parametrize("line", ["cuda: Optional[str] = '12.8'", 'cuda = "12.8"'])
def test_a_cuda_build_is_recognised_without_importing_it(fake_torch: Callable[[str], None], line: str) -> None:
    fake_torch(line)

    assert torch_cuda_version() == "12.8"
    assert list(problems(quantized=False, needs_cuda=True)) == []


def test_a_torch_without_a_version_file_is_a_build_for_nothing_known(
    fake_torch: Callable[[str], None], tmp_path: Path
) -> None:
    fake_torch('cuda = "12.8"')
    (version,) = tmp_path.rglob("version.py")
    version.unlink()

    assert torch_cuda_version() is None


def test_the_installed_torch_is_read_as_it_calls_itself() -> None:
    import torch

    assert torch_cuda_version() == torch.version.cuda


def test_the_minimums_are_those_that_pip_is_told() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")

    stated = dict(re.findall(r'"([a-z]+)>=([0-9.]+)', project))

    assert {name: stated.get(name) for name in MINIMUM | QUANTIZED} == MINIMUM | QUANTIZED


def test_the_tested_versions_are_those_that_requirements_pin() -> None:
    text = (Path(__file__).parents[2] / "requirements.txt").read_text(encoding="utf-8")

    pinned = dict(line.split("==") for line in text.splitlines() if "==" in line)

    assert {name: pinned.get(name) for name in versions()} == TESTED


def test_libraries_at_odds_are_named_with_the_version_that_one_asks_of_the_other(site: Path) -> None:
    _install(site, "torchvision", "0.20.0", needs="torch==2.5.0")

    text = str(_refusal())

    assert f"torchvision 0.20.0 needs torch==2.5.0, and torch is {metadata.version('torch')}" in text
    assert "transformers imports it" in text
    assert "pip install --upgrade torchvision" in text


def test_what_a_library_asks_for_an_extra_is_not_asked_here(site: Path) -> None:
    _install(site, "torchvision", "0.20.0", needs='torch==2.5.0; extra == "scipy"')

    assert list(problems(quantized=False, needs_cuda=False)) == []


def test_several_problems_are_all_told(site: Path) -> None:
    _install(site, "peft", "0.0.9")
    _install(site, "trl", "0.0.9")

    told = [problem.what.partition(" is older")[0] for problem in problems(quantized=False, needs_cuda=False)]

    assert told == ["trl 0.0.9", "peft 0.0.9"]


@pytest.mark.parametrize(
    ("cuda", "capability", "refused"),
    [
        ("13.0", (7, 0), True),
        ("13.0", (7, 5), False),
        ("12.6", (7, 0), False),
        ("12.6", (10, 0), True),
        ("12.6", (12, 0), True),
        ("12.8", (12, 0), False),
        ("12.6", (9, 0), False),
    ],
)
def test_a_gpu_too_old_or_too_new_for_torchs_cuda_is_told(
    fake_torch: Callable[[str], None], cuda: str, capability: tuple[int, int], refused: bool
) -> None:
    fake_torch(f"cuda = '{cuda}'")

    assert (cuda_problem(capability) is not None) is refused


@pytest.mark.parametrize("kind", sorted(libraries.KERNELS_OF))
def test_the_packages_of_kernels_are_those_that_transformers_tries(kind: str) -> None:
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    folder = kind.removesuffix("_text")
    source = (Path(spec.origin).parent / f"models/{folder}/modeling_{folder}.py").read_text(encoding="utf-8")

    tried = set(re.findall(r'use_kernel_func_from_hub_with_fallback\("\w+", "(\w+)"', source))

    with_convolution = {*libraries.KERNELS_OF[kind], "causal_conv1d"}  # fla's stands in for that of the package
    assert tried in ({*with_convolution}, with_convolution - {"fla"})


def test_kernels_that_are_not_installed_are_named_as_pip_knows_them(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site / "fla").mkdir()
    for name in libraries.KERNELS:  # a model that was loaded in this process has put them out of reach
        monkeypatch.delitem(sys.modules, name, raising=False)

    assert libraries.missing_kernels(libraries.STATE_SPACE) == "causal-conv1d mamba-ssm"
    assert libraries.missing_kernels(libraries.LINEAR_ATTENTION) == ""
    assert libraries.missing_kernels(()) == ""

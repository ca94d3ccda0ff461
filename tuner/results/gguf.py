"""A whole model as GGUF, for llama.cpp and Ollama: llama.cpp's own converter is run on it.

It knows nothing of the format: the converter does.
"""

from __future__ import annotations

import json
import shutil
import subprocess  # effect: llama.cpp's converter is a program
import sys
from collections.abc import Mapping
from pathlib import Path

import transformers

from tuner.errors import MachineError, TunerError
from tuner.files import write_json, write_text
from tuner.results.modelfile import modelfile, writes_bos

SCRIPT = "convert_hf_to_gguf.py"
MODELFILE = "Modelfile"
_OUTTYPES = {None: "auto", "bf16": "bf16", "fp16": "f16", "fp32": "f32"}


def converter(environ: Mapping[str, str]) -> Path:
    """Return llama.cpp's converter: in the folder LLAMA_CPP, or on PATH.

    Raises:
        MachineError: it is not there.
    """
    folder = environ.get("LLAMA_CPP")
    named = Path(folder) / SCRIPT if folder else shutil.which(SCRIPT, path=environ.get("PATH"))
    if named and Path(named).is_file():
        return Path(named).resolve()
    what = f"writing GGUF needs llama.cpp's {SCRIPT}, which is not {f'in {folder}' if folder else 'on PATH'}"
    fix = "Get it: git clone --depth 1 https://github.com/ggml-org/llama.cpp, then export LLAMA_CPP=./llama.cpp."
    raise MachineError(what, where="LLAMA_CPP" if folder else "--as gguf", fix=fix)


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
    done = subprocess.run(argv, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0 or not weights.is_file():
        said = done.stderr.strip().splitlines()
        what = f"llama.cpp's converter ended with code {done.returncode}: {said[-1] if said else 'no output'}"
        fix = f"It may be too old for the model's architecture or tokenizer: update {script.parent}."
        raise TunerError(what, where=script, fix=fix)

"""GGUF in fewer bits: by llama.cpp's `llama-quantize` where it is, else by the converter or llama.cpp's Python package.

It converts no model: `gguf` does.
"""

from __future__ import annotations

import importlib.util
import math
import shutil
import subprocess  # effect: llama.cpp's llama-quantize is a program
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.errors import MachineError, Option, TunerError
from tuner.progress import shown

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, ReaderTensor

PROGRAM = "llama-quantize"
BY_CONVERTER = "q8_0"
"""What llama.cpp's converter writes itself."""
_BY_PACKAGE = ("q5_1", "q5_0", "q4_1", "q4_0")
"""What gguf 0.19 packs in numpy; of the others it only reads."""
NAMES = (
    *(BY_CONVERTER, "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s", "q4_1", "q4_0"),
    *("iq4_nl", "iq4_xs", "q3_k_l", "q3_k_m", "q3_k_s", "q2_k"),
)
"""llama.cpp's names, in lower case, from the most bits to the fewest; those that need no other file."""
_KEPT = ("ffn_gate_inp", "norm", "position_embd", "token_types")
"""Parts of the names of matrices that llama.cpp does not quantize."""
_INSTALL = "pip install 'tuner-deepspeed[gguf]'"
_PLACES = ("", "build/bin", "bin")
"""Where a clone of llama.cpp may have its programs."""


def program(name: str, environ: Mapping[str, str]) -> Path | None:
    """Return the program that quantizes to `name`: from the folder LLAMA_CPP, else from PATH.

    None: the converter or the Python package does it.

    Raises:
        MachineError: what it needs is not installed.
    """
    if name == BY_CONVERTER:
        return None
    folders = [Path(environ["LLAMA_CPP"]) / place for place in _PLACES] if environ.get("LLAMA_CPP") else []
    from_folder = next((folder / PROGRAM for folder in folders if (folder / PROGRAM).is_file()), None)
    if place := from_folder or shutil.which(PROGRAM, path=environ.get("PATH")):
        return Path(place).resolve()
    where = Option("quant", name)
    if name in _BY_PACKAGE:
        if importlib.util.find_spec("gguf") is None:
            problem = f"{name} needs llama.cpp's Python package, which is not installed"
            raise MachineError(problem, where=where, fix=f"Install it: {_INSTALL}.")
        return None
    without = ", ".join((BY_CONVERTER, *_BY_PACKAGE))
    problem = f"{name} needs llama.cpp's {PROGRAM}, which is not installed"
    fix = (
        f"Install llama.cpp (brew install llama.cpp), or set LLAMA_CPP to a clone in which it is built: cmake -B build "
        f"&& cmake --build build --target {PROGRAM}. Without it: {without}."
    )
    raise MachineError(problem, where=where, fix=fix)


def quantize(source: Path, dest: Path, name: str, program: Path | None) -> None:
    """Write the GGUF `source`, in 16 or 32 bits, as `dest` with weights of the kind `name`.

    Raises:
        TunerError: llama.cpp does not quantize this model.
    """
    with shown(f"quantizing to {name}"):
        if program is None:
            _in_numpy(source, dest, name)
            return
        argv = [str(program), str(source), str(dest), name.upper()]
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0 or not dest.is_file():
        output = (done.stderr.strip() or done.stdout.strip()).splitlines()
        problem = f"{PROGRAM} ended with code {done.returncode}: {output[-1] if output else 'no output'}"
        raise TunerError(problem, where=program, fix="Choose another kind, or a newer llama.cpp.")


def _in_numpy(source: Path, dest: Path, name: str) -> None:
    """Write one tensor at a time."""
    import gguf  # only an export to GGUF needs it
    import numpy as np

    kind = gguf.GGMLQuantizationType[name.upper()]
    reader = gguf.GGUFReader(source)
    general, version = gguf.Keys.General, gguf.GGML_QUANT_VERSION
    architecture = reader.fields[general.ARCHITECTURE].contents()
    writer = gguf.GGUFWriter(dest, architecture)
    for key, field in reader.fields.items():
        # What the writer sets itself.
        if key.startswith("GGUF.") or key in (general.ARCHITECTURE, general.FILE_TYPE, general.QUANTIZATION_VERSION):
            continue
        holds = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), field.types[0], sub_type=holds)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{name.upper()}"])
    writer.add_quantization_version(version)
    kinds = {tensor.name: _kind_of(tensor, kind) for tensor in reader.tensors}
    for tensor in reader.tensors:
        tensor_kind, data = kinds[tensor.name], tensor.data
        if tensor_kind is None:
            writer.add_tensor_info(tensor.name, data.shape, data.dtype, data.nbytes, tensor.tensor_type)
        else:
            shape = gguf.quant_shape_to_byte_shape([*map(int, tensor.shape[::-1])], tensor_kind)
            writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), math.prod(shape), tensor_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        tensor_kind, data = kinds[tensor.name], tensor.data
        if tensor_kind is not None:
            data = gguf.quantize(gguf.dequantize(data, tensor.tensor_type), tensor_kind)
        writer.write_tensor_data(data)
    writer.close()


def _kind_of(tensor: ReaderTensor, kind: GGMLQuantizationType) -> GGMLQuantizationType | None:
    """Return what a tensor becomes; None: it stays as it is.

    Matrices alone are quantized, as in llama.cpp, and not the router of experts or the embedding of positions. The
    embedding and the head get 8 bits: llama.cpp gives them 6, a kind that the package does not write.
    """
    import gguf  # as above

    block, _ = gguf.GGML_QUANT_SIZES[kind]
    is_matrix = sum(int(size) > 1 for size in tensor.shape) > 1 and tensor.name.endswith(".weight")
    is_kept = any(part in tensor.name for part in _KEPT)
    if not is_matrix or int(tensor.shape[0]) % block or is_kept:
        return None
    is_vocabulary = tensor.name in ("token_embd.weight", "output.weight")
    return gguf.GGMLQuantizationType.Q8_0 if is_vocabulary else kind

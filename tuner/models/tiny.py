"""Makes the weights of the `tiny` model from the shipped files: once, and with the same bytes on every machine."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.files import disk_errors, make_folder

if TYPE_CHECKING:
    from torch import Tensor

FORMAT_VERSION = 1
SEED = 0
_FIX = "Set TUNER_CACHE to a writable folder with free space."
WEIGHTS = "model.safetensors"


def materialize(assets: Path, cache: Path) -> Path:
    """Return the complete model folder below `cache`, made from `assets` unless it is there already.

    The folder's name holds the hash of the assets, so changed assets get new weights. Several processes may call this
    at once: each makes its own copy, and the first copy under the final name is kept.

    Raises:
        DiskError: `cache` cannot be written.
    """
    folder = cache / f"tiny-v{FORMAT_VERSION}-{_content_hash(assets)}"
    with disk_errors(folder, _FIX):
        if folder.is_dir():
            return folder
        make_folder(cache)
        with tempfile.TemporaryDirectory(dir=cache, prefix=f".{folder.name}.") as temporary:
            draft = Path(temporary) / folder.name
            shutil.copytree(assets, draft, copy_function=shutil.copyfile)
            _write_weights(draft)
            _publish(draft, folder)
    return folder


def _content_hash(assets: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(assets.iterdir()):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _publish(draft: Path, folder: Path) -> None:
    try:
        draft.rename(folder)
    except OSError:
        # A rename cannot replace a folder with files: another process was first.
        if not folder.is_dir():
            raise


def _write_weights(folder: Path) -> None:
    # Heavy, and not needed when the folder exists.
    from safetensors.torch import save_file

    save_file(_weights(folder), folder / WEIGHTS, metadata={"format": "pt"})


def _weights(folder: Path) -> dict[str, Tensor]:
    """Return fp32 tensors by name for the config in `folder`: norms 1, biases 0, else uniform noise around 0.

    Uniform noise needs only exact arithmetic; the logarithms for normal noise depend on the vector width. The library's
    own initialization is not used, because its order of draws changes between versions.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from tuner.models import compat

    config = AutoConfig.from_pretrained(folder)
    auto = AutoModelForImageTextToText if compat.reads_images(config) else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config)
    generator = torch.Generator().manual_seed(SEED)
    width = config.get_text_config().initializer_range * 12**0.5

    def values(name: str, weight: Tensor) -> Tensor:
        if name.endswith("bias"):
            return torch.zeros(weight.shape)
        if weight.ndim == 1:
            return torch.ones(weight.shape)
        return (torch.rand(weight.shape, generator=generator, dtype=torch.float32, device="cpu") - 0.5) * width

    return {name: values(name, weight) for name, weight in sorted(model.named_parameters())}

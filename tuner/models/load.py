"""Load what a recipe names: tokenizer, weights in the run's compute type or in 4 bits, adapter.

It does not train, and it never runs a model's own code unless the recipe pins a commit.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    StrictDataclassError,
)
from huggingface_hub.utils import httpx  # type: ignore[attr-defined]
from safetensors import SafetensorError
from transformers.integrations import apply_liger_kernel

from tuner import assets, paths
from tuner.errors import DiskError, MachineError, ModelError
from tuner.machine.libraries import FLASH
from tuner.models import compat, integrity
from tuner.models.adapters import with_adapter
from tuner.models.tiny import materialize
from tuner.progress import shown, tqdm_class, tqdm_hook
from tuner.recipes.schema import Model, Quantization, RecipeConfig
from tuner.vocabulary import Vocabulary

CACHE = paths.cache(os.environ)  # effect: where made models are kept

_UNPACKED = {"mxfp4": transformers.Mxfp4Config, "fp8": transformers.FineGrainedFP8Config}
"""How checkpoints are stored that transformers turns into 16-bit weights while it loads them."""

_OF_ITS_FILES = (
    *(ValueError, KeyError, TypeError, AttributeError, RecursionError),
    *(SafetensorError, StrictDataclassError),
)
"""What transformers raises over files that are damaged; tokenizers raises a bare Exception.

Of RuntimeErrors only that of shapes: a GPU that is out of memory is one too.
"""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Of weights and arithmetic, by the names that recipes and flags have for them."""


def source(model: Model) -> str:
    """Return what `from_pretrained` takes: a folder, or an id on the hub. The package's tiny model is made first."""
    assert model.path is not None, "checked before the ranks start"
    if model.path.startswith(assets.ASSET):
        return str(materialize(Path(assets.asset(model.path)), CACHE))
    folder = paths.local(model.path)
    return str(folder) if folder else model.path


def tokenizer_of(config: RecipeConfig, path: str) -> Any:
    """Load the tokenizer to train with: that of the model, or what an adapter to go on with was trained with.

    Args:
        config: The recipe.
        path: What `source` returned for its model.

    Raises:
        ModelError, MachineError: as `load_tokenizer`.
    """
    adapter = config.adapter.path if config.adapter else None
    if adapter and (paths.expanded(adapter) / "tokenizer_config.json").is_file():
        return load_tokenizer(config.model.model_copy(update={"revision": None}), str(paths.expanded(adapter)))
    return load_tokenizer(config.model, path)


def load_tokenizer(model: Model, path: str) -> Any:
    """Load the tokenizer, with the recipe's chat template where it names one.

    Raises:
        ModelError: there is none, or it needs code of its own.
        MachineError: the hub cannot be reached.
    """
    with explained(path):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, **pinned(model))
    if model.chat_template:
        tokenizer.chat_template = assets.chat_template(model.chat_template)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(
    config: RecipeConfig,
    path: str,
    dtype: torch.dtype,
    device: str,
    *,
    shards: bool,
    vocabulary: Vocabulary | None = None,
) -> Any:
    """Load the weights to train: with the adapter, the frozen layers and the score head that the recipe asks for.

    Args:
        config: The recipe.
        path: What `source` returned.
        dtype: The run's compute type: of the weights, and of the arithmetic on 4-bit weights.
        device: 'cpu', or this rank's 'cuda:N'.
        shards: ZeRO-3 partitions the weights while they are loaded, so they are not put on a device here.
        vocabulary: The embeddings have, or get, a row for each of its tokens; None: not checked.

    Raises:
        ModelError: there is no such model, it needs code of its own, or the recipe does not fit it.
        MachineError: the hub cannot be reached.
    """
    model = _load(config, path, dtype, device, shards, vocabulary)
    model.train()
    if config.adapter:
        return with_adapter(model, config, path)
    if config.train_cfg.trainable_layers:
        _freeze_all_but(model, config.train_cfg.trainable_layers)
    return model


def load_reference(
    config: RecipeConfig,
    path: str,
    dtype: torch.dtype,
    device: str,
    *,
    shards: bool,
    vocabulary: Vocabulary | None = None,
) -> Any | None:
    """Load the frozen copy that the model is compared with, or None where nothing needs one.

    With a new adapter that is the base model itself, the adapter switched off; with one that goes on it is the frozen
    copy of it that TRL makes. Arguments and errors as `load_model`.
    """
    objective = config.objective
    if not objective.loads_reference or config.adapter:
        return None
    return _load(config, path, dtype, device, shards, vocabulary).requires_grad_(False)


def _load(
    config: RecipeConfig, path: str, dtype: torch.dtype, device: str, shards: bool, vocabulary: Vocabulary | None
) -> Any:
    arguments: dict[str, Any] = {}
    _unpack_stored(config, path, arguments)
    if config.quantization:
        arguments["quantization_config"] = quantized(config.quantization, dtype)
        if device != "cpu" and not shards:
            arguments["device_map"] = {"": device}
    model = load_weights(config.model, path, dtype, scores=config.objective.facts.scores, **arguments)
    if config.model.use_liger_kernel is True:
        # TRL's head and ours compute the loss (worker/loss.py); Liger's would take the forward that they stand on.
        apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})
    if vocabulary is not None:
        integrity.fit_rows(model, vocabulary, config, path)
    model.config.use_cache = False
    return model


def load_weights(model: Model, path: str, dtype: torch.dtype, *, scores: bool, **arguments: Any) -> Any:
    """Load the weights that a folder or an id on the hub holds, into the compute type, as they are.

    Args:
        model: Which commit, and how attention is computed.
        path: What `source` returned.
        dtype: Of the weights that are not quantized.
        scores: The model has a head of one score instead of one that writes.
        arguments: More of `from_pretrained`.

    Raises:
        ModelError: there is no such model, a weight is missing or has no place in it, or it needs code of its own.
        MachineError: the hub cannot be reached, or a package is missing.
    """
    arguments |= {"dtype": dtype, **pinned(model)}
    if os.path.isdir(path):  # noqa: PTH112 (a name too long is no folder, and no error)
        arguments["use_safetensors"] = True  # old repositories on the hub have pickles alone: data is all they may hold
    if _can_attend(model.attn_implementation):
        arguments["attn_implementation"] = model.attn_implementation
    compat.hide_kernels_of_gpus()
    if torch.cuda.is_available():
        compat.repeat_heads_on_old_gpus(torch.cuda.get_device_capability())
    auto = transformers.AutoModelForSequenceClassification if scores else transformers.AutoModelForCausalLM
    if scores:
        arguments["num_labels"] = 1
    with explained(path), compat.zero3_told() as unexpected, shown(f"loading {path}"):
        transformers.utils.logging.set_tqdm_hook(tqdm_hook)
        loaded, report = auto.from_pretrained(path, output_loading_info=True, tqdm_class=tqdm_class(), **arguments)
    report["unexpected_keys"] |= unexpected
    integrity.check(loaded, report, path, _layers(loaded), new_head=scores and not is_scorer(loaded.config))
    compat.keep_4_bits_as_stored(loaded)
    compat.name_parts(loaded)
    return loaded


def is_scorer(config: Any) -> bool:
    """Return whether a checkpoint is of a model that scores texts, by its config."""
    return bool(config.architectures) and config.architectures[0].endswith("ForSequenceClassification")


def _can_attend(name: str | None) -> bool:
    """Return whether to ask for an attention: a run's on GPUs may have none on the CPU that its result is tried on."""
    return name not in (None, "auto") and (name not in FLASH or torch.cuda.is_available())


def _unpack_stored(config: RecipeConfig, path: str, arguments: dict[str, Any]) -> None:
    """Ask for 16-bit weights where a checkpoint is stored in fewer bits, as gpt-oss and DeepSeek-V3 are.

    Raises:
        ModelError: the recipe needs weights that such a checkpoint does not give.
    """
    with explained(path):
        stored = transformers.AutoConfig.from_pretrained(path, **pinned(config.model))
    method = (getattr(stored, "quantization_config", None) or {}).get("quant_method")
    if method is None:
        return
    if config.quantization:
        what = f"the weights of {path!r} are already stored in {method} and cannot be quantized again"
        raise ModelError(what, where="quantization", fix="Use the method lora, or a 16-bit copy of the model.")
    if method in _UNPACKED:
        arguments["quantization_config"] = _UNPACKED[method](dequantize=True)
    elif not config.adapter:
        what = f"the weights of {path!r} are stored in {method} and cannot be trained"
        raise ModelError(what, where="model.path", fix="Use the method lora, or a 16-bit copy of the model.")


def _freeze_all_but(model: Any, count: int) -> None:
    """Leave the last `count` decoder layers, and a new score head, to be trained."""
    layers = decoder_layers(model)
    if count > len(layers):
        what = f"trainable_layers = {count}, but the model has {len(layers)} decoder layers"
        raise ModelError(what, where="train_cfg.trainable_layers", fix=f"Use at most {len(layers)}.")
    model.requires_grad_(False)
    for module in (*layers[-count:], getattr(model, integrity.HEAD, None)):
        if module is not None:
            module.requires_grad_(True)


def decoder_layers(model: Any) -> Any:
    """Return the decoder's layers: the list as long as the config says, whatever an architecture calls it.

    Raises:
        ModelError: there is none.
    """
    layers = _layers(model)
    if layers is None:
        what = f"{type(model).__name__} has no list of decoder layers with the length that its config says"
        raise ModelError(what, where="train_cfg.trainable_layers", fix="Use another method.")
    return layers


def _layers(model: Any) -> Any | None:
    number = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    return next((module for module in lists if len(module) == number), None)


def quantized(block: Quantization, dtype: torch.dtype) -> transformers.BitsAndBytesConfig:
    """Return what `from_pretrained` takes for a recipe's `quantization`, with arithmetic in the compute type."""
    if block.bits == 8:
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=block.quant_type,
        bnb_4bit_use_double_quant=block.double_quant,
        bnb_4bit_compute_dtype=dtype,
        # Any other storage than this or the compute type is cast by value and trains silently wrong.
        bnb_4bit_quant_storage=torch.uint8,
    )


def pinned(model: Model) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that say which commit is meant, and whether its code may run."""
    return {"revision": model.revision or "main", "trust_remote_code": model.trust_remote_code}


class explained:
    """Say what from_pretrained's many exceptions mean for the user.

    Raises:
        MachineError: the hub cannot be reached, or a package is missing.
        ModelError: there is no such model, it is not whole, or it needs code of its own.
        DiskError: there is no room to download it.
    """

    def __init__(self, path: str, where: str = "model.path", flag: str = "--model") -> None:
        self.path, self.where, self.flag = path, where, flag

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = "Free space, or set HF_HOME to a folder on another disk."
            raise DiskError(f"not enough space to download {self.path!r}: {error.strerror}", fix=fix) from error
        offline = OfflineModeIsEnabled | LocalEntryNotFoundError | ConnectionError
        if isinstance(error, offline) or _is_network(error):
            fix = f"Check the network and HF_TOKEN, or give a local folder with {self.flag}."
            raise MachineError(f"cannot reach the hub for {self.path!r}", where=self.where, fix=fix) from error
        if isinstance(error, ImportError):
            fix = "Install it, or choose another model.attn_implementation or method."
            raise MachineError(
                f"{self.path!r} needs a package: {_first_line(error)}", where="model", fix=fix
            ) from error
        if isinstance(error, HfHubHTTPError | OSError):
            fix = "Give a folder written by save_pretrained, or an id on the hub that you have access to (HF_TOKEN)."
            raise ModelError(f"cannot load {self.path!r}: {_first_line(error)}", where=self.where, fix=fix) from error
        if isinstance(error, ValueError) and "trust_remote_code" in str(error):
            fix = "Set model.trust_remote_code=True and model.revision to a commit that you have read."
            raise ModelError(f"{self.path!r} needs remote code", where=self.where, fix=fix) from error
        if isinstance(error, _OF_ITS_FILES) or type(error) is Exception or "mismatched_sizes" in str(error):
            fix = "Its files do not match or are damaged: download or copy it again."
            told = " ".join(str(error).split())
            raise ModelError(f"cannot load {self.path!r}: {told}", where=self.where, fix=fix) from error


def _is_network(error: BaseException | None) -> bool:
    text, inner = str(error), error
    while inner is not None:  # transformers tells of a download that broke off as of a folder that lacks a file
        if isinstance(inner, httpx.TransportError):
            return True
        inner = inner.__cause__ or inner.__context__
    return isinstance(error, OSError) and (
        "couldn't connect" in text or "Max retries" in text or "offline mode" in text
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")

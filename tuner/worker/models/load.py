"""Load what a recipe names: tokenizer, weights in the run's compute type or in 4 bits, adapter.

It does not train, and it never runs a model's own code unless the recipe pins a commit.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from peft import LoraConfig, get_peft_model

from tuner.errors import MachineError, ModelError
from tuner.recipes import catalog, paths
from tuner.recipes.schema import Model, RecipeConfig
from tuner.worker.models.tiny import materialize

CACHE = Path(os.environ.get("TUNER_CACHE") or Path.home() / ".cache" / "tuner")


def source(model: Model) -> str:
    """Return what `from_pretrained` takes: a folder, or an id on the hub. The package's tiny model is made first."""
    assert model.path is not None, "checked before the ranks start"
    if model.path.startswith(catalog.ASSET):
        return str(materialize(Path(catalog.asset(model.path)), CACHE))
    folder = paths.local(model.path)
    return str(folder) if folder else model.path


def load_tokenizer(model: Model, path: str) -> Any:
    """Load the tokenizer, with the recipe's chat template where it names one.

    Raises:
        ModelError: there is none, or it needs code of its own.
        MachineError: the hub cannot be reached.
    """
    with _explained(path):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, **_pinned(model))
    if model.chat_template:
        tokenizer.chat_template = catalog.chat_template(model.chat_template).read_text(encoding="utf-8")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(config: RecipeConfig, path: str, dtype: torch.dtype, device: str, *, shards: bool) -> Any:
    """Load the weights, and lay the adapter over them where the recipe has one.

    Args:
        config: The recipe.
        path: What `source` returned.
        dtype: The run's compute type: of the weights, and of the arithmetic on 4-bit weights.
        device: 'cpu', or this rank's 'cuda:N'.
        shards: ZeRO-3 partitions the weights while they are loaded, so they are not put on a device here.

    Raises:
        ModelError: there is no such model, or it needs code of its own.
        MachineError: the hub cannot be reached.
    """
    arguments: dict[str, Any] = {"dtype": dtype, **_pinned(config.model)}
    if config.model.attn_implementation:
        arguments["attn_implementation"] = config.model.attn_implementation
    if config.quantization:
        arguments["quantization_config"] = _quantization(config, dtype)
        if device != "cpu" and not shards:
            arguments["device_map"] = {"": device}
    with _explained(path):
        model = transformers.AutoModelForCausalLM.from_pretrained(path, **arguments)
    for module in model.modules():
        # In eval mode on a CPU with AVX512-BF16, bitsandbytes repacks 4-bit weights; ZeRO-3 drops the repacking and is
        # silently wrong from the first evaluation on (validation loss 7.51 instead of 7.28, measured on 0.50.2).
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    model.train()
    model.config.use_cache = False
    return _with_adapter(model, config) if config.adapter else model


def _with_adapter(model: Any, config: RecipeConfig) -> Any:
    adapter = config.adapter
    assert adapter is not None
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=adapter.r,
        lora_alpha=adapter.lora_alpha,
        lora_dropout=adapter.lora_dropout,
        target_modules=list(adapter.target_modules)
        if isinstance(adapter.target_modules, tuple)
        else adapter.target_modules,
        use_dora=adapter.use_dora,
        use_rslora=adapter.use_rslora,
        modules_to_save=adapter.modules_to_save,
        bias="none",
    )
    # Adapters in the compute type at every ZeRO level; PEFT's fp32 default breaks ZeRO-3 and doubles activations.
    try:
        return get_peft_model(model, lora, autocast_adapter_dtype=False)
    except ValueError as error:
        raise ModelError(f"the adapter does not fit this model: {error}", where="adapter.target_modules") from error


def _quantization(config: RecipeConfig, dtype: torch.dtype) -> transformers.BitsAndBytesConfig:
    block = config.quantization
    assert block is not None
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


def _pinned(model: Model) -> dict[str, Any]:
    return {"revision": model.revision or "main", "trust_remote_code": model.trust_remote_code}


class _explained:
    """Say what from_pretrained's many exceptions mean for the user."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, OfflineModeIsEnabled | ConnectionError) or _is_network(error):
            fix = "Check the network and HF_TOKEN, or name a local folder with --model."
            raise MachineError(f"cannot reach the hub for {self.path!r}", where="model.path", fix=fix) from error
        if isinstance(error, ImportError):
            fix = "Install it, or choose another model.attn_implementation or method."
            raise MachineError(
                f"{self.path!r} needs a package: {_first_line(error)}", where="model", fix=fix
            ) from error
        if isinstance(error, HfHubHTTPError | OSError):
            fix = "Name a folder of save_pretrained, or an id on the hub that you may read (HF_TOKEN)."
            raise ModelError(f"cannot load {self.path!r}: {_first_line(error)}", where="model.path", fix=fix) from error
        if isinstance(error, ValueError) and "trust_remote_code" in str(error):
            fix = "Set model.trust_remote_code=True and model.revision to a commit that you have read."
            raise ModelError(f"{self.path!r} needs code of its own", where="model.path", fix=fix) from error
        if isinstance(error, ValueError | KeyError):
            raise ModelError(f"cannot load {self.path!r}: {_first_line(error)}", where="model.path") from error


def _is_network(error: BaseException | None) -> bool:
    text = str(error)
    return isinstance(error, OSError) and (
        "couldn't connect" in text or "Max retries" in text or "offline mode" in text
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")

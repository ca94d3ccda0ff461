"""The private parts of transformers and bitsandbytes that loading and saving models use or repair.

Seen with transformers 5.24, TRL 1.16 and bitsandbytes 0.50.2. It decides nothing about a model.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    modeling_utils,
)
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key, revert_weight_conversion
from transformers.integrations import deepspeed as integration
from transformers.integrations import sdpa_attention
from transformers.integrations.bitsandbytes import Bnb4bitQuantize, Bnb8bitQuantize
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.quantizers_utils import get_module_from_name
from transformers.utils import is_torchvision_available
from transformers.utils.loading_report import LoadStateDictInfo
from transformers.video_processing_utils import BaseVideoProcessor

from tuner.errors import MachineError
from tuner.machine.libraries import KERNELS, is_installed, replaced, require_names

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, ProcessorMixin
    from transformers.modeling_utils import LoadStateDictConfig

_BACKBONE = "model"
_CONVOLUTION = "causal_conv1d"


@contextmanager
def os_errors() -> Iterator[None]:
    """Turn safetensors' error about a disk into an OSError; safetensors 0.8 has the number of the error in its text."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


NAMES = (
    ("transformers", modeling_utils, "_load_state_dict_into_zero3_model", "log_state_dict_report"),
    ("transformers", PreTrainedModel, "_adjust_missing_and_unexpected_keys"),
    ("transformers", sdpa_attention, "use_gqa_in_sdpa"),
    ("transformers", integration, "deepspeed_config"),
)
"""The private names that are used here, which `worker.compat.check_names` looks for."""


@contextmanager
def unexpected_at_zero3() -> Iterator[set[str]]:
    """Yield a set; ZeRO-3's loader adds the names of weights that have no place in the model.

    transformers 5.24 does not report them at ZeRO-3: "we assume only best-case scenario" (modeling_utils.py, 4546).
    No public hook sees the names that the loader reads.
    """
    unexpected: set[str] = set()
    load = modeling_utils._load_state_dict_into_zero3_model

    def load_and_note(
        model: PreTrainedModel, state_dict: dict[str, Tensor], load_config: LoadStateDictConfig | None = None
    ) -> object:
        assert load_config is not None, "transformers passes it"
        unexpected.update(_without_place(model, list(state_dict), load_config.weight_mapping or ()))
        with _whole_layers():
            return load(model, state_dict, load_config)

    with replaced(modeling_utils, _load_state_dict_into_zero3_model=load_and_note):
        yield unexpected


Shapes = tuple[tuple[int, ...], tuple[int, ...]]
"""Of a tensor in a model's files, and by its config.json."""


@contextmanager
def checked_tensors(check: Callable[[dict[str, Shapes], dict[str, str]], None]) -> Iterator[None]:
    """Call `check` when the tensors of a model have been read, before transformers 5.24 ends with an error of its own.

    Args:
        check: Gets the tensors with another shape, those among them that were quantized too, which transformers does
            not compare; and those that were not made of several others, each with the reason.
    """
    report, shapes = modeling_utils.log_state_dict_report, dict[str, Shapes]()
    converts = {kind: kind.convert for kind in (Bnb4bitQuantize, Bnb8bitQuantize)}

    def compared(
        operation: Any, input_dict: dict[str, Any], model: PreTrainedModel | None = None, **options: Any
    ) -> Any:
        assert model is not None, "transformers passes it"
        for name, value in input_dict.items():
            stored = value[0] if isinstance(value, list) else value
            is_turned = issubclass(get_module_from_name(model, name)[0].source_cls, Conv1D)
            shape, expected = tuple(stored.shape), tuple(model.get_parameter_or_buffer(name).shape)
            if shape != (expected[::-1] if is_turned else expected):
                shapes[name] = shape, expected
        convert = next(convert for kind, convert in converts.items() if isinstance(operation, kind))
        return convert(operation, input_dict, model=model, **options)

    def check_first(*, loading_info: LoadStateDictInfo, **options: Any) -> None:
        mismatched = {name: (tuple(shape), tuple(expected)) for name, shape, expected in loading_info.mismatched_keys}
        check(shapes | mismatched, dict(_reasons(loading_info.conversion_errors)))
        report(loading_info=loading_info, **options)

    with (
        replaced(modeling_utils, log_state_dict_report=check_first),
        replaced(Bnb4bitQuantize, convert=compared),
        replaced(Bnb8bitQuantize, convert=compared),
    ):
        yield


def _reasons(errors: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield what failed with the reason, if torch refused the tensors: not for want of memory, nor by a bug."""
    for name, text in errors.items():
        if "\nRuntimeError: " in text and "out of memory" not in text:
            yield name, text.rpartition("\nRuntimeError: ")[2].partition("\n")[0].rstrip(".")


@contextmanager
def _whole_layers() -> Iterator[None]:
    """Let transformers 5.24 convert the names of weights at ZeRO-3 although ranks will split the layers.

    It refuses that with tensor parallelism in the DeepSpeed config, but DeepSpeed splits layers when they are loaded.
    """
    config = integration.deepspeed_config() or {}
    split = {key: value for key, value in config.items() if key != "tensor_parallel"}
    with replaced(integration, deepspeed_config=lambda: split):
        yield


def repeat_heads_on_old_gpus(capability: tuple[int, int]) -> None:
    """Copy keys and values to all query heads for SDPA on GPUs older than compute capability 8.0.

    transformers 5.24 asks torch to group the heads (`enable_gqa`) if there is no mask. Torch's flash kernel supports it
    from 8.0 on, and its memory-efficient kernel on no GPU, so an older GPU used the plain kernel, which keeps the
    scores of all pairs of tokens in fp32 (transformers issue 48633).
    """
    if capability < (8, 0):
        sdpa_attention.use_gqa_in_sdpa = lambda *_: False


def _without_place(
    model: PreTrainedModel, names: Iterable[str], mapping: Iterable[WeightRenaming | WeightConverter]
) -> set[str]:
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    expected = model.state_dict()
    renamed = {rename_source_key(name, renamings, converters, model.base_model_prefix, expected)[0] for name in names}
    report = LoadStateDictInfo(set(), renamed - expected.keys(), set(), [], {}, set())
    model._adjust_missing_and_unexpected_keys(report)  # it removes the names that the architecture ignores
    return set(report.unexpected_keys)


def offer_kernels() -> None:
    """Let transformers find the GPU kernels of mixers that can run here, and no others.

    A model's module looks for them when it is imported: call it before. Without a GPU they would be called with CPU
    tensors. With one, flash-linear-attention's convolution, which Triton compiles, stands in for the package
    causal-conv1d, which has no wheels. mamba-ssm looks for more in that package, so beside it nothing stands in.
    """
    if not torch.cuda.is_available():
        for name in KERNELS:
            sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    elif is_installed("fla") and not (is_installed(_CONVOLUTION) or is_installed("mamba_ssm")):
        module = ModuleType(_CONVOLUTION)
        module.__spec__ = ModuleSpec(_CONVOLUTION, None)
        module.causal_conv1d_fn = _convolution  # type: ignore[attr-defined]
        sys.modules[_CONVOLUTION] = module


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cu_seq_lens_q: Tensor | None = None,
) -> Tensor:
    """Convolve [S, channels, T], under the names that transformers 5.24 has for causal-conv1d; by fla-core 0.6."""
    from fla.modules.causal_conv1d import causal_conv1d

    mixed: Tensor
    mixed, _ = causal_conv1d(x.transpose(1, 2), weight, bias, activation=activation, cu_seqlens=cu_seq_lens_q)
    return mixed.transpose(1, 2)


def keep_4_bits_as_stored(model: PreTrainedModel) -> None:
    """Keep bitsandbytes from repacking 4-bit weights, which it does in eval mode on a CPU with AVX512-BF16.

    ZeRO-3 loses the repacked weights, and results are silently wrong from the first validation on (validation loss 7.51
    instead of 7.28, measured with 0.50.2).
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def has_adapter(model: PreTrainedModel) -> bool:
    """Return whether transformers has loaded an adapter: it does if a model's folder has an adapter_config.json."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


class _AsPublished(GenerationConfig):  # type: ignore[misc]
    """Saves the settings that it was loaded with, also those without effect, such as a temperature of greedy choices.

    transformers saves them too, but refuses them once another setting has changed: the tokens that end an answer do, in
    training, and the run would end without its result.
    """

    def save_pretrained(self, *args: object, **options: object) -> None:
        self._original_object_hash = hash(self)
        super().save_pretrained(*args, **options)


def save_as_published(generation: GenerationConfig) -> None:
    """Let a generation config be saved with the settings that were published, also those without effect."""
    generation.__class__ = _AsPublished


def name_parts(model: PreTrainedModel) -> None:
    """Let TRL 1.16 find the layers below the head, and the number of experts for the loss that balances them.

    In transformers 5.24 Llama 4's class has the prefix of another class, and Granite's configs have only the name
    `num_local_experts`, where others (Mixtral's) also have the usual `num_experts`.
    """
    if model.base_model is model and hasattr(model, _BACKBONE):
        model.base_model_prefix = _BACKBONE
    config = model.config.get_text_config()
    if hasattr(config, "num_local_experts") and not hasattr(config, "num_experts"):
        kind = type(config)
        aliases = kind.attribute_map  # DeepSeek V4's name is another one's too
        kind.attribute_map = {**aliases, "num_experts": aliases.get("num_local_experts", "num_local_experts")}


def reads_images(config: PreTrainedConfig) -> bool:
    """Return whether the config belongs to a model that transformers 5.24 loads with its vision tower."""
    is_known = type(config) in AutoModelForImageTextToText._model_mapping
    return is_known and getattr(config, "vision_config", None) is not None


def processor(path: str, **options: object) -> ProcessorMixin:
    """Load a processor, without its processor of videos if torchvision is missing.

    In transformers 5.24 the processors of Qwen-VL, InternVL, SmolVLM and Gemma 4 ask for torchvision, which only their
    processor of videos needs. They also check the class of each part, and the class of videos cannot be imported.
    SmolVLM's asks for num2words too, to write the number of a video's frames.
    """
    config = AutoConfig.from_pretrained(path, **options)
    name = PROCESSOR_MAPPING_NAMES.get(config.model_type)
    kind: type[ProcessorMixin] | None = getattr(transformers, name, None) if isinstance(name, str) else None
    if kind is not None and getattr(module := sys.modules[kind.__module__], _WORDS, str) is None:
        setattr(module, _WORDS, str)
    if kind is None or is_torchvision_available() or _VIDEOS not in kind.get_attributes():
        return AutoProcessor.from_pretrained(path, **options)
    written, _ = kind.get_processor_dict(path, **options)
    parameters = inspect.signature(kind.__init__).parameters
    values = {key: value for key, value in written.items() if key in parameters and key not in kind.get_attributes()}
    without = _without_videos(kind, _settings_of_videos(path, **options))
    parts = {name: auto.from_pretrained(path, **options) for name, auto in _PARTS.items() if name in parameters}
    processor = without(video_processor=None, **parts, **values)
    # Not before: the constructor of transformers counts its arguments.
    without.get_attributes = classmethod(lambda cls: [part for part in kind.get_attributes() if part != _VIDEOS])
    return processor


def _settings_of_videos(path: str, **options: object) -> object:
    """Return the settings of a processor of videos where transformers finds them: perhaps in the file of images."""
    try:
        return BaseVideoProcessor.get_video_processor_dict(path, **options)[0]
    except OSError:
        return None


def _without_videos(kind: type[ProcessorMixin], videos: object) -> type[ProcessorMixin]:
    """Return a class of processors that has no processor of videos, and saves the settings that it would have."""

    class WithoutVideos(kind):  # type: ignore[misc]
        def check_argument_for_proper_class(self, part: str, value: object) -> object:
            return None if part == _VIDEOS else super().check_argument_for_proper_class(part, value)

        def save_pretrained(self, folder: str | Path, **others: object) -> object:
            result = super().save_pretrained(folder, **others)
            if videos:
                (Path(folder) / _VIDEOS_FILE).write_text(json.dumps(videos, indent=2), encoding="utf-8")
            return result

    WithoutVideos.__name__ = kind.__name__  # transformers saves the name
    return WithoutVideos


_PARTS = {"image_processor": AutoImageProcessor, "tokenizer": AutoTokenizer, "feature_extractor": AutoFeatureExtractor}
_VIDEOS_FILE = "video_preprocessor_config.json"
_VIDEOS = "video_processor"
_WORDS = "num2words"
_KEPT = "_weight_conversions"


def forget_unused_conversions(model: PreTrainedModel) -> None:
    """Keep only the conversions of names that loading used, as transformers does below ZeRO-3.

    At ZeRO-3 transformers 5.24 keeps them all, and `save_pretrained` reverts renamings that never happened: a LLaVA's
    weights get names such as `language_model.model.model.layers`.
    """
    if kept := getattr(model, _KEPT, None):
        setattr(model, _KEPT, [conversion for conversion in kept if conversion.was_used()])


def keep_conversions(model: PreTrainedModel, conversions: list[WeightConverter]) -> None:
    """Store on a model the conversions that `save_pretrained` reverts (transformers#42396).

    Raises:
        MachineError: this release of transformers looks for another name, and would revert nothing.
    """
    if _KEPT not in revert_weight_conversion.__code__.co_consts:
        message = f"transformers does not look for {_KEPT} when it saves, which tuner builds on"
        raise MachineError(message, fix="Install the tested versions: pip install -r requirements.txt")
    setattr(model, _KEPT, conversions)


def varlen_backward(
    of_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value by the kernel of torch's causal `varlen_attn` (torch 2.13).

    Args:
        out: The attended values, [T, heads, width].
        lse: The log-sum-exp of each token's scores, fp32 [heads, T].

    Raises:
        MachineError: this torch has it by another name.
    """
    kernels = torch.ops.torch_attn
    require_names("torch", kernels, "_varlen_attn_backward")
    no_dropout, is_causal = torch.zeros(2, dtype=torch.uint64, device=query.device), window_size == (-1, 0)
    lengths = (cu_seq_q, cu_seq_k, max_q, max_k, is_causal)
    gradients: tuple[Tensor, Tensor, Tensor] = kernels._varlen_attn_backward(
        of_out, query, key, value, out, lse, *lengths, no_dropout, scale, list(window_size)
    )
    return gradients

"""The private part of transformers' server that a model with images needs. Seen with transformers 5.23."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import ProcessorMixin
    from transformers.cli.serving.model_manager import ModelManager


def use_processor(manager: type[ModelManager], processor: ProcessorMixin) -> None:
    """Give the server a processor that is loaded already: without torchvision it cannot load that of Qwen-VL."""
    manager._load_processor = lambda self, model, gguf_file=None: processor

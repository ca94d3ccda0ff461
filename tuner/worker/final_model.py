"""Write the result of training: the same files from every ZeRO stage, for transformers and peft alone.

Resumable checkpoints are the trainer's; this is what a user publishes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from peft import PeftModel

from tuner.data.templates import answers_end
from tuner.recipes.template import plain
from tuner.worker import compat

_SEARCHES = (
    *("num_beams", "num_beam_groups", "diversity_penalty", "num_return_sequences", "penalty_alpha", "dola_layers"),
    *("constraints", "force_words_ids", "prompt_lookup_num_tokens", "assistant_early_exit"),
)


def save_final_model(trainer: Any, tokenizer: Any, folder: Path) -> None:
    """Write weights (or adapter), tokenizer with its chat template, and generation config; every rank takes part."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    state = _gathered(trainer.deepspeed, model)
    if dist.get_rank() == 0:
        # Not Trainer.save_model: it adds training_args.bin, a pickle, to what a user will publish.
        # PEFT would save embeddings that an adapter is on, or that were given rows, up to three times.
        once = {"save_embedding_layers": False} if isinstance(model, PeftModel) else {}
        model.save_pretrained(folder, state_dict=state, **once)
        if isinstance(tokenizer.chat_template, str):
            tokenizer.chat_template = plain(tokenizer.chat_template)
        tokenizer.save_pretrained(folder)
        if generation := getattr(model, "generation_config", None):  # a model that scores has none
            stop_where_answers_end(generation, tokenizer)
            generation.save_pretrained(folder)
    dist.barrier()


def stop_where_answers_end(generation: Any, tokenizer: Any) -> None:
    """Add the token that closes an answer in the tokenizer's chat template to those that end generation."""
    # A base model's own end is that of a document: it would go on after the <|im_end|> that it has learned to write.
    known, end = generation.eos_token_id, answers_end(tokenizer)
    ends = list(known) if isinstance(known, list) else [known] if known is not None else []
    if end is not None and end not in ends:
        generation.eos_token_id = [*ends, end]


def ask_for_one_answer(generation: Any) -> None:
    """Switch off searches among several answers: they cannot be streamed, and some run code of the hub's."""
    for name in _SEARCHES:
        setattr(generation, name, None)


def _gathered(engine: Any, model: Any) -> dict[str, Any] | None:
    """Return ZeRO-3's weights, whole, on rank 0; None where every rank holds the whole model."""
    if engine.zero_optimization_stage() < 3:
        return None
    is_adapter = isinstance(model, PeftModel)
    state = compat.whole_weights(engine, trained_alone=is_adapter)
    # Each name of a shared weight is gathered into a tensor of its own, which below stage 3 is saved once.
    tied = {} if is_adapter else model.all_tied_weights_keys
    return {name: weight for name, weight in state.items() if name not in tied}

"""The rows of a model's embeddings: as many as its tokenizer has tokens, or the model is refused.

What a folder's files tell of it is `recipes.vocabulary`'s.
"""

from __future__ import annotations

from typing import Any

import torch

from tuner import vocabulary
from tuner.recipes.schema import RecipeConfig
from tuner.vocabulary import Vocabulary


def fit_rows(model: Any, tokenizer: Any, config: RecipeConfig, path: str) -> None:
    """Add the rows that the tokenizer needs, where the recipe asks for them; the same ones on every rank and each time.

    Raises:
        ModelError: rows are lacking, and the recipe asks for none, or would not train them.
    """
    last, num_rows = _vocabulary(tokenizer).last, num_rows_of(model)
    if last is None or last[1] < num_rows:
        return
    if not config.model.resize_embeddings:
        raise vocabulary.too_few_rows(*last, num_rows, path)
    trained = config.adapter.modules_to_save or () if config.adapter else ()
    lacking = tuple(name for name in _names(model) if name not in trained)
    if lacking and (config.adapter or config.train_cfg.trainable_layers):
        raise vocabulary.untrained_rows(lacking, adapter=config.adapter is not None)
    with torch.random.fork_rng():
        torch.manual_seed(config.randomness.seed)
        model.resize_token_embeddings(last[1] + 1)  # transformers draws new rows around the mean of the old ones


def num_rows_of(model: Any) -> int:
    """Return the rows of the input embeddings; ZeRO-3 has taken the weight itself apart."""
    weight = model.get_input_embeddings().weight
    return int(getattr(weight, "ds_shape", weight.shape)[0])


def _vocabulary(tokenizer: Any) -> Vocabulary:
    specials = {str(token): id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
    named = [tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token]
    idle = vocabulary.idle(specials, named, str(tokenizer.chat_template))
    return Vocabulary(tokenizer.get_vocab(), idle)


def _names(model: Any) -> tuple[str, ...]:
    """Return the last parts of the names of the modules that have a row for each token."""
    embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    names = (
        (name for name, one in model.named_modules() if one is module) for module in embeddings if module is not None
    )
    return tuple(next(name).rpartition(".")[2] for name in names)

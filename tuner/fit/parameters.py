"""How many parameters a model has: exactly as many as transformers builds from the same architecture.

It takes architecture alone; it knows no bytes and no recipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from tuner.errors import ModelError, did_you_mean
from tuner.fit.decoder_layer import Layer, Linear, layer
from tuner.fit.families import FAMILIES, Family
from tuner.recipes.schema.architecture import Architecture


class Built(NamedTuple):
    """A model's parts; `linears` are those outside its layers, but for the head, whose weight the embeddings may be."""

    family: Family
    layers: tuple[Layer, ...]
    linears: tuple[Linear, ...]
    embeddings: int
    head: Linear
    tied: bool
    others: int

    @property
    def backbone(self) -> int:
        """Parameters without the head."""
        outside = self.embeddings + self.others + sum(linear.parameters for linear in self.linears)
        return outside + sum(layer.parameters for layer in self.layers)

    @property
    def parameters(self) -> int:
        return self.backbone + self.head.parameters - (self.head.weights if self.tied else 0)

    def all_linears(self) -> Iterator[Linear]:
        """Yield every linear layer but the head, layer by layer."""
        yield from self.linears
        for one in self.layers:
            yield from one.linears


def has_formula(architecture: Architecture) -> bool:
    """Return whether models of this model_type can be counted."""
    return architecture.model_type in FAMILIES


def num_parameters(architecture: Architecture) -> int:
    """Return the parameters of the model with its language-model head; tied embeddings count once.

    Raises:
        ModelError: there is no formula for the model_type.
    """
    return built(architecture).parameters


def active_parameters(architecture: Architecture) -> int:
    """Return the parameters without the experts that one token does not pass through; embeddings count whole.

    Raises:
        ModelError: there is no formula for the model_type.
    """
    model = built(architecture)
    return model.parameters - sum(layer.experts.idle for layer in model.layers if layer.experts)


@lru_cache(maxsize=64)
def built(architecture: Architecture) -> Built:
    """Return the model's parts.

    Raises:
        ModelError: there is no formula for the model_type.
    """
    family = FAMILIES.get(architecture.model_type)
    if family is None:
        fix = did_you_mean(architecture.model_type, FAMILIES) or "Choose a level: --deepspeed zero3."
        raise ModelError(
            f"no formula for model_type {architecture.model_type!r}", where="architecture.model_type", fix=fix
        )
    layers = tuple(layer(family, architecture, index) for index in range(architecture.num_hidden_layers))
    width = architecture.word_embed_proj_dim or architecture.hidden_size
    head = Linear("lm_head", width, architecture.vocab_size, architecture.lm_head_bias, quantizable=False)
    outside, others = tuple(_outside(architecture)), _once(family, architecture)
    return Built(family, layers, outside, head.weights, head, architecture.tie_word_embeddings, others)


def _outside(architecture: Architecture) -> Iterator[Linear]:
    hidden, own = architecture.hidden_size, architecture.hidden_size_per_layer_input
    if architecture.word_embed_proj_dim:
        yield Linear("project_in", architecture.word_embed_proj_dim, hidden)
        yield Linear("project_out", hidden, architecture.word_embed_proj_dim)
    if own:
        yield Linear("per_layer_model_projection", hidden, architecture.num_hidden_layers * own)
    for index in range((architecture.altup_num_inputs or 1) - 1):
        yield Linear(f"altup_projections.{index}", hidden, hidden)
        yield Linear(f"altup_unembed_projections.{index}", hidden, hidden)


def _once(family: Family, architecture: Architecture) -> int:
    norm = architecture.hidden_size * (2 if family.norm_bias else 1)
    total = norm * (bool(family.norms and architecture.do_layer_norm_before) + family.embedding_norm)
    if family.positions is not None:
        total += (architecture.max_position_embeddings + family.positions) * architecture.hidden_size
    if own := architecture.hidden_size_per_layer_input:
        total += (architecture.vocab_size_per_layer_input or 0) * architecture.num_hidden_layers * own + own
    return total

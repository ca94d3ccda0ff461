"""How many parameters a model has, and how many a recipe trains, freezes and quantizes.

Models count exactly as transformers builds them from the same architecture, adapters as PEFT 0.21's LoRA. It knows no
bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from tuner.errors import ModelError, Option, did_you_mean
from tuner.fit.families import (
    FAMILIES,
    Family,
    Layer,
    layer,
    layer_of_tower,
    layers_as_measured,
    pixels_of_patch,
    projector,
    tower_family,
)
from tuner.recipes.schema import TEACHERS, Adapter, AnyPart, Quantization, RecipeConfig
from tuner.recipes.schema.architecture import Architecture, Tower
from tuner.recipes.schema.measured import Experts, Linear
from tuner.recipes.schema.unlearned_layers import without_gradient


@dataclass(frozen=True)
class Built:
    """A model's parts; `linears` are those outside its layers, but not the head."""

    family: Family
    layers: tuple[Layer, ...]
    linears: tuple[Linear, ...]
    embeddings: int
    head: Linear
    tied: bool
    others: int

    @cached_property
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
        for of_layer in self.layers:
            yield from of_layer.linears

    @cached_property
    def kinds(self) -> Counter[Linear]:
        """How many there are of each linear layer but the head: most decoder layers are alike."""
        return Counter(self.all_linears())

    def quantized(self, block: Quantization) -> int:
        """Return the weights that quantization takes."""
        experts = sum(layer.experts.quantizable for layer in self.layers if layer.experts and block.packs_experts)
        return experts + sum(number * linear.weights for linear, number in self.kinds.items() if linear.quantizable)

    @cached_property
    def largest(self) -> int:
        """The parameters of the largest tensor: what ZeRO-3 gathers at once at least."""
        linears = max((linear.weights for layer in self.layers for linear in layer.linears), default=0)
        mixtures = [layer.experts for layer in self.layers if layer.experts]
        experts = max((mixture.parameters - mixture.down for mixture in mixtures), default=0)
        return max(linears, experts, self.embeddings)


def largest_weight(recipe: RecipeConfig, architecture: Architecture) -> int:
    """Return the elements of the largest tensor of the LLM as it is loaded: those in 4 bits are stored two in one.

    Raises:
        ModelError: there is no formula for the model_type.
    """
    model, bits = built(architecture), recipe.quantization.bits if recipe.quantization else 8  # in whole bytes
    linears = (kind.weights * bits // 8 if kind.quantizable else kind.weights for kind in model.kinds)
    experts = (size for layer in model.layers if layer.experts for size in layer.experts.tensors)
    return max(model.embeddings, model.head.weights, model.others, *linears, *experts)


def has_formula(architecture: Architecture) -> bool:
    """Return whether the model can be counted: by the formula of its model_type, or because it was measured."""
    return architecture.measured is not None or architecture.model_type in FAMILIES


def num_parameters(architecture: Architecture) -> int:
    """Return the parameters of the model with its language-model head and its tower; tied embeddings count once.

    Raises:
        ModelError: there is no formula for the model_type.
    """
    return built(architecture).parameters + sum(of_tower(architecture).values())


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
    if measurement := architecture.measured:
        return Built(
            Family(embeddings=measurement.embeddings, split_experts=measurement.experts_adapted),
            layers_as_measured(measurement),
            measurement.linears,
            measurement.embedding_weights,
            measurement.head,
            architecture.tie_word_embeddings,
            measurement.others,
        )
    family = FAMILIES.get(architecture.model_type)
    if family is None:
        fix = did_you_mean(architecture.model_type, FAMILIES) or f"Choose a level: {Option('deepspeed', 'zero3')}."
        raise ModelError(
            f"no formula for model_type {architecture.model_type!r}", where="architecture.model_type", fix=fix
        )
    layers = tuple(layer(family, architecture, index) for index in range(architecture.num_hidden_layers))
    width = architecture.word_embed_proj_dim or architecture.hidden_size
    head = Linear("lm_head", width, architecture.vocab_size, architecture.lm_head_bias, quantizable=False)
    outside, other_weights = tuple(_outside(architecture)), _once(family, architecture)
    return Built(family, layers, outside, head.weights, head, architecture.tie_word_embeddings, other_weights)


def _outside(architecture: Architecture) -> Iterator[Linear]:
    hidden, per_layer_width = architecture.hidden_size, architecture.hidden_size_per_layer_input
    if architecture.word_embed_proj_dim:
        yield Linear("project_in", architecture.word_embed_proj_dim, hidden)
        yield Linear("project_out", hidden, architecture.word_embed_proj_dim)
    if per_layer_width:
        yield Linear("per_layer_model_projection", hidden, architecture.num_hidden_layers * per_layer_width)
    for index in range((architecture.altup_num_inputs or 1) - 1):
        yield Linear(f"altup_projections.{index}", hidden, hidden)
        yield Linear(f"altup_unembed_projections.{index}", hidden, hidden)


def _once(family: Family, architecture: Architecture) -> int:
    norm = architecture.hidden_size * (2 if family.norm_bias else 1)
    total = norm * (bool(family.norms and architecture.do_layer_norm_before) + family.embedding_norm)
    if family.positions is not None:
        total += (architecture.max_position_embeddings + family.positions) * architecture.hidden_size
    if width := architecture.hidden_size_per_layer_input:
        total += (architecture.vocab_size_per_layer_input or 0) * architecture.num_hidden_layers * width + width
    return total


class Parameters(NamedTuple):
    """Numbers of parameters: `trainable`, `frozen` in 16 bits, and `quantized` (frozen, stored in fewer bits)."""

    trainable: int
    frozen: int = 0
    quantized: int = 0
    quantized_bits: int = 4


def count(recipe: RecipeConfig, architecture: Architecture) -> Parameters:
    """Return how many parameters a recipe trains, freezes and quantizes: with a reference or a teacher, and a tower.

    Raises:
        ModelError: there is no formula for the model_type.
    """
    llm = _with_teacher(_of_llm(recipe, architecture), recipe)
    trained, frozen = _tower_trained(recipe, architecture)
    return llm._replace(trainable=llm.trainable + trained, frozen=llm.frozen + frozen)


def _with_teacher(parameters: Parameters, recipe: RecipeConfig) -> Parameters:
    """Add the frozen weights of a teacher; one of unknown size is left out."""
    teacher, architecture = recipe.objective.taught_by, recipe.teacher_architecture
    if teacher is None or architecture is None or not has_formula(architecture):
        return parameters
    model = built(architecture)
    if teacher.bits == 16:
        return parameters._replace(frozen=parameters.frozen + model.parameters)
    quantized = model.quantized(TEACHERS)
    kept = parameters.frozen + model.parameters - quantized
    # As many weights in the bits of the trained model's own quantized weights take the same bytes.
    return parameters._replace(
        frozen=kept, quantized=parameters.quantized + quantized * teacher.bits // parameters.quantized_bits
    )


def _of_llm(recipe: RecipeConfig, architecture: Architecture) -> Parameters:
    model = built(architecture)
    if recipe.reads_images and "language" in recipe.model.freeze and recipe.adapter is None:
        return Parameters(0, model.parameters)
    score = model.head.inputs if recipe.objective.facts.scores else 0
    total = model.backbone + score if score else model.parameters
    if recipe.adapter is None:
        # With an adapter, the reference is the same model without the adapter.
        last = recipe.train_cfg.trainable_layers
        trainable = sum(layer.parameters for layer in model.layers[-last:]) + score if last else total
        return Parameters(trainable, total - trainable + (total if recipe.objective.loads_reference else 0))
    # PEFT keeps the score head as it was beside the copy that it trains.
    trainable = _of_adapter(recipe.adapter, model) + score
    if recipe.quantization is None:
        return Parameters(trainable, frozen=total)
    quantized = model.quantized(recipe.quantization)
    return Parameters(trainable, total - quantized, quantized, recipe.quantization.bits)


def _of_adapter(adapter: Adapter, model: Built) -> int:
    """Return the parameters of an adapter, of DoRA's magnitudes and of the copies that `modules_to_save` trains.

    A regular expression in target_modules is taken for 'all-linear', which is no less.
    """
    targets = [*_targets(adapter, model)]
    low_rank = sum(number * adapter.r * (linear.inputs + linear.outputs) for linear, number in targets)
    magnitudes = sum(number * linear.outputs for linear, number in targets) if adapter.use_dora else 0
    experts = sum(on_experts(adapter, model.family, layer.experts) for layer in model.layers if layer.experts)
    sizes = {model.family.embeddings: model.embeddings, model.head.name: model.head.parameters}
    saved = adapter.modules_to_save or ()
    copies = sum(size for module, size in sizes.items() if any(module.endswith(name) for name in saved))
    return low_rank + magnitudes + experts + copies


def _targets(adapter: Adapter, model: Built) -> Iterator[tuple[Linear, int]]:
    """Yield each kind of linear layer that gets an adapter, and how many there are of it."""
    # PEFT 0.21 takes the names of experts that transformers 5 fused for the experts alone: a shared expert's
    # 'gate_proj', or a dense layer's, gets no adapter.
    fused = model.family.split_experts
    kinds = [(linear, number) for linear, number in model.kinds.items() if not without_gradient([linear.name])]
    if isinstance(adapter.target_modules, str):
        yield from (kind for kind in kinds if kind[0].name.rpartition(".")[2] not in fused)
        return
    names = [name for name in adapter.target_modules if name.rpartition(".")[2] not in fused]
    embeddings = Linear(model.family.embeddings, model.embeddings // model.head.inputs, model.head.inputs)
    for linear, number in (*kinds, (model.head, 1), (embeddings, 1)):
        if any(f".{linear.name}".endswith(f".{name}") for name in names):
            yield linear, number


def adaptable_layers(architecture: Architecture) -> frozenset[str]:
    """Return the names of the layers that an adapter may be put on, each without the path that leads to it.

    Raises:
        ModelError: there is no formula for the model_type.
    """
    model = built(architecture)
    names = {linear.name for linear in (*model.kinds, model.head)} | {model.family.embeddings}
    return frozenset(name.rpartition(".")[2] for name in names | {*model.family.split_experts})


def on_experts(adapter: Adapter, family: Family, experts: Experts) -> int:
    """Return the parameters of an adapter on the experts of one layer and their router."""
    return sum(parts_on_experts(adapter, family, experts))


def parts_on_experts(adapter: Adapter, family: Family, experts: Experts) -> tuple[int, int, int]:
    """Return those on the router, on the experts' gate and up layers, and on their down layers."""
    if not family.split_experts:
        return 0, 0, 0
    router, gate, _, down = (
        isinstance(adapter.target_modules, str)
        or any(f".{target}".endswith(f".{name}") for target in adapter.target_modules)
        for name in family.split_experts
    )
    num, hidden, width, rank = experts.num, experts.hidden, experts.width, adapter.r
    gate_up = 2 * rank * num * (hidden + 2 * width)
    return router * rank * (hidden + num), gate * gate_up, down * rank * num * (width + hidden)


# Towers


def of_tower(architecture: Architecture) -> dict[AnyPart, int]:
    """Return the parameters outside the LLM by part; empty if config.json does not say their sizes.

    A tower is a Vision Transformer (Dosovitskiy et al., 2021, arXiv:2010.11929), as transformers 5.24 builds it.
    """
    tower = architecture.vision_config
    if tower is None or not (tower.hidden_size and tower.num_hidden_layers and tower.patch_size):
        return {}
    family, width = tower_family(tower), tower.hidden_size
    norm = width * (1 + family.norm_bias)
    norms = family.norms * norm + family.head_norms * (width // (tower.num_attention_heads or 1))
    layers = tower.num_hidden_layers * (sum(linear.parameters for linear in layer_of_tower(tower)) + norms)
    patches = pixels_of_patch(tower) * width
    of_projector = sum(linear.parameters for linear in projector(architecture, tower))
    if family.merges:
        return {"vision": layers + patches, "projector": of_projector + norm}
    if family.pools:
        rows_and_columns = 2 * _POSITIONS_OF_A_SIDE * width
        sizes: dict[AnyPart, int] = {"vision": layers + patches + rows_and_columns, "projector": of_projector}
        return sizes | ({"sound": tower.num_parameters_of_sound} if tower.num_parameters_of_sound else {})
    positions = (_patches_of_a_side(tower) ** 2 + 1) * width if tower.image_size else 0
    begin_and_end = width + 2 * norm  # the class token, and norms around the layers
    return {"vision": layers + patches + positions + begin_and_end, "projector": of_projector}


def trained_share(recipe: RecipeConfig, architecture: Architecture) -> float:
    """Return the part of the parameters that is trained."""
    return min(1.0, count(recipe, architecture).trainable / num_parameters(architecture))


def backward_share(recipe: RecipeConfig, architecture: Architecture) -> float:
    """Return the part of the LLM's parameters that gradients pass through: not the layers below the trained ones."""
    last = recipe.train_cfg.trainable_layers
    below = built(architecture).layers[:-last] if last else ()
    return 1 - sum(layer.parameters for layer in below) / num_parameters(architecture)


def _tower_trained(recipe: RecipeConfig, architecture: Architecture) -> tuple[int, int]:
    """Return how many parameters of the tower and the projector are trained, LoRA's among them, and how many frozen."""
    sizes = of_tower(architecture) if recipe.reads_images else {}
    total, low_rank = sum(sizes.values()), _of_lora(recipe, architecture) if sizes else 0
    if recipe.adapter:
        # PEFT keeps a projector that it trains whole as it was, beside the copy.
        return sizes.get("projector", 0) * _is_copied(recipe) + low_rank, total
    frozen = {"sound", *recipe.model.freeze, *(["vision"] if recipe.model.vision_lora else [])}
    num_frozen = sum(count for part, count in sizes.items() if part in frozen)
    return total - num_frozen + low_rank, num_frozen


def trained_tensors(recipe: RecipeConfig, architecture: Architecture) -> list[int]:
    """Return the parameters of each large tensor that is trained without an adapter, in the model's own order.

    Norms and biases are left out.
    """
    model, tower = built(architecture), architecture.vision_config
    sizes: list[int] = []
    if recipe.reads_images and tower is not None and of_tower(architecture):
        if "vision" not in recipe.model.freeze and recipe.model.vision_lora is None:
            sizes += [linear.weights for linear in layer_of_tower(tower)] * (tower.num_hidden_layers or 0)
        if "projector" not in recipe.model.freeze:
            sizes += [linear.weights for linear in projector(architecture, tower)]
        if "language" in recipe.model.freeze:
            return sizes
    last = recipe.train_cfg.trainable_layers
    sizes += [] if last else [model.embeddings, model.others, *(linear.weights for linear in model.linears)]
    for decoder_layer in model.layers[-(last or 0) :]:
        sizes += [linear.weights for linear in decoder_layer.linears]
        if experts := decoder_layer.experts:
            sizes += [experts.parameters - experts.down, experts.down]
    if not (last or model.tied or recipe.objective.facts.scores):
        sizes.append(model.head.weights)
    return [size for size in sizes if size]


def _is_copied(recipe: RecipeConfig) -> bool:
    return recipe.adapter is not None and PROJECTOR in (recipe.adapter.modules_to_save or ())


def _of_lora(recipe: RecipeConfig, architecture: Architecture) -> int:
    """Return the parameters of LoRA outside the LLM, and of DoRA's magnitudes there."""
    tower, rank = architecture.vision_config, rank_on_tower(recipe)
    if tower is None or not rank:
        return 0
    linears = [*adapted(recipe, layer_of_tower(tower))] * (tower.num_hidden_layers or 0)
    if recipe.adapter and not _is_copied(recipe):
        linears += adapted(recipe, projector(architecture, tower))
    has_magnitudes = recipe.adapter is not None and recipe.adapter.use_dora
    return sum(rank * (linear.inputs + linear.outputs) + linear.outputs * has_magnitudes for linear in linears)


def rank_on_tower(recipe: RecipeConfig) -> int:
    """Return the rank of LoRA on the tower; 0 without it."""
    if recipe.adapter:
        return (recipe.adapter.vision_r or recipe.adapter.r) if recipe.adapter.vision else 0
    return recipe.model.vision_lora.r if recipe.model.vision_lora else 0


def trains_tower(recipe: RecipeConfig) -> bool:
    """Return whether weights of the tower are trained, LoRA's among them: else no gradient passes through it."""
    if not recipe.reads_images:
        return False
    if recipe.adapter:
        return recipe.adapter.vision
    return recipe.model.vision_lora is not None or "vision" not in recipe.model.freeze


def trains_projector(recipe: RecipeConfig) -> bool:
    """Return whether weights of the projector are trained, LoRA's among them."""
    if not recipe.reads_images:
        return False
    if recipe.adapter:
        return recipe.adapter.vision or _is_copied(recipe)
    return "projector" not in recipe.model.freeze


def dropout_on_tower(recipe: RecipeConfig) -> float:
    """Return the dropout of LoRA on the tower."""
    lora = recipe.adapter or recipe.model.vision_lora
    return lora.lora_dropout if lora else 0.0


def adapted(recipe: RecipeConfig, linears: Iterator[Linear] | tuple[Linear, ...]) -> Iterator[Linear]:
    """Yield those of the layers that get LoRA; a regular expression in target_modules counts as all of them."""
    names = recipe.adapter.target_modules if recipe.adapter else "all-linear"
    for linear in linears:
        is_target = isinstance(names, str) or any(f".{linear.name}".endswith(f".{name}") for name in names)
        if is_target and not without_gradient([linear.name]):
            yield linear


_POSITIONS_OF_A_SIDE = 10_240
"""`position_embedding_size` of every published Gemma 4."""
PROJECTOR = "multi_modal_projector"
"""The projector of a LLaVA, as `adapter.modules_to_save` names it."""
_SIDE, _PATCH = 512, 14
"""Pixels of a side of an image, and of a patch, where nothing says so."""


def tokens_of_image(tower: Tower, size: tuple[int, int] | None = None) -> int:
    """Return about how many tokens an image of this size, (width, height) in pixels, becomes; at least 1."""
    if tower.num_tokens:
        return tower.num_tokens
    width, height = (tower.image_size, tower.image_size) if tower.image_size else size or (_SIDE, _SIDE)
    side = (tower.patch_size or _PATCH) * tower.merge_size
    return max(1, round(width / side) * round(height / side))


def patches_of(tower: Tower, tokens: int) -> float:
    """Return the patches that become so many tokens, with the class token of each image."""
    side = _patches_of_a_side(tower)
    if tower.num_tokens and side:
        return tokens * (side**2 + 1) / tower.num_tokens
    return float(tokens * tower.merge_size**2)


def _patches_of_a_side(tower: Tower) -> int:
    return (tower.image_size or 0) // (tower.patch_size or 1)

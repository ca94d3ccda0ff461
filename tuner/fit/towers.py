"""The half of a model that reads images: how many parameters it has, how many tokens an image becomes, what it keeps.

The tower is counted as a Vision Transformer (Dosovitskiy et al., 2021, arXiv:2010.11929) with biases, as CLIP's and
SigLIP's are: exact for LLaVA's, within a few per cent for Qwen-VL's, whose MLPs have a gate.
"""

from __future__ import annotations

from tuner.recipes.schema import RecipeConfig, VisionPart
from tuner.recipes.schema.architecture import Architecture, Tower

_BYTES_A_TOKEN = 34
"""Bytes that a layer keeps of each token and unit of width in 16 bits: Korthikanti et al., 2022 (arXiv:2205.05198)."""


def parameters(architecture: Architecture) -> dict[VisionPart, int]:
    """Return the parameters of the tower and of the projector; empty if config.json does not say their sizes."""
    tower = architecture.vision_config
    if tower is None or not (tower.hidden_size and tower.num_hidden_layers and tower.patch_size):
        return {}
    width, inner = tower.hidden_size, tower.intermediate_size or 4 * tower.hidden_size
    layer = 4 * width * (width + 1) + 2 * width * inner + inner + width + 4 * width
    patches = 3 * tower.patch_size**2 * width
    positions = (_patches_of_a_side(tower) ** 2 + 1) * width if tower.image_size else 0
    begin_and_end = width + 4 * width  # the class token, and norms around the layers
    llm, merged = architecture.hidden_size, width * tower.merge_size**2
    projector = merged * llm + llm + llm * llm + llm
    return {"vision": tower.num_hidden_layers * layer + patches + positions + begin_and_end, "projector": projector}


def _patches_of_a_side(tower: Tower) -> int:
    return (tower.image_size or 0) // (tower.patch_size or 1)


def trained(recipe: RecipeConfig, architecture: Architecture) -> tuple[int, int]:
    """Return how many parameters of the tower and the projector are trained, and how many are frozen."""
    sizes = parameters(architecture) if recipe.reads_images else {}
    frozen = {"vision", "projector"} if recipe.adapter else set(recipe.model.freeze)
    num_frozen = sum(count for part, count in sizes.items() if part in frozen)
    return sum(sizes.values()) - num_frozen, num_frozen


def tokens_of_image(tower: Tower, size: tuple[int, int] | None = None) -> int:
    """Return about how many tokens an image of this size, (width, height) in pixels, becomes; at least 1."""
    if tower.num_tokens:
        return tower.num_tokens
    width, height = (tower.image_size, tower.image_size) if tower.image_size else size or (_SIDE, _SIDE)
    side = (tower.patch_size or _PATCH) * tower.merge_size
    return max(1, round(width / side) * round(height / side))


_SIDE, _PATCH = 512, 14
"""Pixels of a side of an image, and of a patch, where nothing says so."""


def activation_bytes(recipe: RecipeConfig, architecture: Architecture, tokens: int, weight_bytes: int) -> float:
    """Return what the tower keeps for the backward pass of a micro-batch of so many tokens, all of them of images.

    With recomputation that is the input of each layer. A tower without a trained weight keeps nothing.
    """
    tower = architecture.vision_config
    learns = "vision" not in recipe.model.freeze and (recipe.adapter is None or recipe.adapter.vision)
    if not recipe.reads_images or tower is None or not tower.hidden_size or not learns:
        return 0.0
    patches = tokens * tower.merge_size**2
    bytes_a_token = weight_bytes if recipe.split.recompute else _BYTES_A_TOKEN * weight_bytes / 2
    return float(bytes_a_token * patches * tower.hidden_size * (tower.num_hidden_layers or 0))

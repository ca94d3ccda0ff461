"""Translates what other tools set for images: which parts of a model are frozen, how large images are, where they are.

Such settings count if the model reads images. A model of text alone ignores them, as the tools do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tuner import paths
from tuner.importers.translation import Outcome, Rule, Setting, Translation
from tuner.recipes import model_facts
from tuner.recipes.recipe_file import read_part

_PARTS = ("vision", "projector", "language")
_DATASET = "train_dataloader.dataset"


def of_images(*our_keys: str) -> Rule:
    """Return the rule for a key that counts if the model reads images.

    Args:
        our_keys: The parts of the model that the key freezes if it is true, or the recipe's key that it sets.
    """

    def rule(t: Translation, setting: Setting) -> None:
        t.of_images |= dict.fromkeys(our_keys, setting)

    return rule


folder = of_images("image_folder")
"""The rule for the folder in which the paths of images begin, for each data set."""


def marks_images(t: Translation, setting: Setting) -> None:
    """Record that the model reads images."""
    t.of_images.setdefault("model.images", setting)


def set_images(t: Translation, part: str | None) -> None:
    """Write the settings of images into the translation if the model reads images, and record why if it does not.

    Args:
        t: The translation, after all keys.
        part: The catalog's part of the model, or None.
    """
    reads_images = _reads_images(t, part)
    is_written = any(not setting.is_default for setting in t.of_images.values())
    if reads_images is False or not (reads_images or t.has_images or is_written):
        for setting in _each_once(t.of_images):
            t.leave(setting, "the model reads text alone")
        return
    if reads_images is None:
        marking = t.of_images.get("model.images") or Setting("images", None, t.document.name)
        t.set(marking, "model.images", True, "the model reads images")
    elif "model.images" in t.of_images:
        t.leave(t.of_images["model.images"], "config.json says that the model reads images")
    _freeze(t)
    for our_key, setting in t.of_images.items():
        if our_key == "image_folder":
            for dataset in (*t.datasets, *t.validation):
                dataset.setdefault("image_folder", str(setting.value))
            t.note(setting, Outcome.TRANSLATED, f"{_DATASET}.image_folder = {str(setting.value)!r}")
        elif our_key not in (*_PARTS, "model.images"):
            t.set(setting, our_key, setting.value)


def _each_once(settings: Mapping[str, Setting]) -> Iterable[Setting]:
    return {setting.key: setting for setting in settings.values()}.values()


def _freeze(t: Translation) -> None:
    settings = {part: t.of_images[part] for part in _PARTS if part in t.of_images}
    parts = [part for part, setting in settings.items() if setting.truth()]
    if t.method in ("lora", "qlora", "dora", "rslora"):
        _adapt(t, settings, parts)
        return
    for setting in _each_once(settings):
        t.set(setting, "model.freeze", tuple(parts), None if parts else "every part is trained")


def _adapt(t: Translation, settings: dict[str, Setting], parts: list[str]) -> None:
    """Adapt the tower and the projector if they are not frozen: an adapter freezes every weight below it."""
    adapted = [part for part in ("vision", "projector") if part in settings and part not in parts]
    for part, setting in settings.items():
        if part == "language" and part in parts:
            t.note(setting, Outcome.CHANGED, why="tuner's adapter always adapts the LLM")
        elif part == "language":
            t.leave(setting, "the LLM gets the adapter")
        else:
            is_alone = adapted == [part]
            why = "tuner adapts the tower and the projector together, or neither" if is_alone else None
            t.set(setting, "adapter.vision", bool(adapted), why, changed=is_alone)


def _reads_images(t: Translation, part: str | None) -> bool | None:
    """Return whether the model reads images by the catalog or its config.json; None if neither says so."""
    if part:
        architecture = read_part("models", part).values.get("architecture") or {}
        return "vision_config" in architecture
    local = paths.local(str(t.model.value)) if t.model else None
    return model_facts.reads_images(local) if local is not None and paths.exists(local) else None

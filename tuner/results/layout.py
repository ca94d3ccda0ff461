"""A published model's tensors beside those of the model that transformers makes of them: names, fusing, tied weights.

The model is on the device 'meta': names and shapes, no weights. What transformers converts while it loads a whole model
is converted here piece by piece, and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from tuner.errors import ModelError
from tuner.models.compat import keep_conversions, reads_images
from tuner.models.load import auto_class
from tuner.results.tensors import Piece, Stored, Tensors

Change = Callable[[str, torch.Tensor | None], torch.Tensor]
"""Takes the name of a tensor of the loaded model, and the base's tensor if it has one; returns the new tensor."""


def empty_model(config: PreTrainedConfig, *, scores: bool, trust_remote_code: bool = False) -> PreTrainedModel:
    """Return a model without weights for a config: a language model, one that reads images, or one that scores texts.

    Raises:
        ModelError: transformers cannot build the model.
    """
    auto = auto_class(reads_images=reads_images(config), scores=scores)
    try:
        with torch.device("meta"):
            return auto.from_config(config, trust_remote_code=trust_remote_code)
    except ValueError as error:
        raise ModelError(f"its config.json does not describe a valid model: {str(error).splitlines()[0]}") from error


@dataclass(frozen=True)
class _Unit:
    """Published tensors that are loaded together: one tensor that is renamed, or several that a converter changes."""

    published: tuple[str, ...]
    loaded: tuple[str, ...]
    converter: WeightConverter | None = None
    patterns: tuple[str, ...] = ()


class Layout:
    """How the tensors of a published model map to those of the loaded model."""

    def __init__(self, model: PreTrainedModel, stored: Stored, *, scores: bool) -> None:
        """Match the tensors of `stored` with those of `model`, without an adapter; if it `scores`, its head is new."""
        self._model, self._stored, self._scores = model, stored, scores
        self._expected: Tensors = model.state_dict()
        self._tied: dict[str, str] = model.all_tied_weights_keys
        self._units = tuple(self._matched())
        self._at = {name: unit for unit in self._units for name in unit.loaded}

    def _matched(self) -> Iterator[_Unit]:
        conversions = get_model_conversion_mapping(self._model)
        renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
        converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
        of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        together: dict[str, list[tuple[str, str]]] = {}
        for name in sorted(self._stored.shapes, key=dot_natural_key):
            loaded, pattern = rename_source_key(
                name, renamings, converters, self._model.base_model_prefix, self._expected
            )
            if pattern is None:
                yield _Unit((name,), (loaded,))
            else:
                together.setdefault(loaded, []).append((name, pattern))
        # As after from_pretrained: only conversions that were used are reverted when saving.
        keep_conversions(self._model, [conversion for conversion in conversions if conversion.was_used()])
        for loaded, sources in together.items():
            names, patterns = zip(*sources, strict=True)
            unit = _Unit(names, (loaded,), of_pattern[patterns[0]], patterns)
            yield _Unit(names, tuple(self._loaded(unit, self._stored.shapes)), unit.converter, patterns)

    def _loaded(self, unit: _Unit, published: Tensors) -> Tensors:
        """Return the tensors of the loaded model for a unit."""
        if unit.converter is None:
            return {unit.loaded[0]: published[unit.published[0]]}
        converter = deepcopy(unit.converter)
        for name, pattern in zip(unit.published, unit.patterns, strict=True):
            converter.add_tensor(unit.loaded[0], name, pattern, published[name])
        converted = converter.convert(unit.loaded[0], model=self._model, config=self._model.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in converted.items()}

    def check(self, replaced: set[str]) -> None:
        """Check that the model is complete; tensors in `replaced` may be missing.

        Raises:
            ModelError: a tensor is missing, or its shape differs from config.json.
        """
        lacking = sorted(self._expected.keys() - self._at.keys() - self._tied.keys() - replaced)
        if lacking:
            problem = f"{len(lacking)} of the model's tensors are missing, such as {lacking[0]}"
            raise ModelError(problem, fix="Use the complete model.")
        for unit in self._units:
            for name, tensor in self._loaded(unit, self._stored.shapes).items():
                if name in self._expected and self._expected[name].shape != tensor.shape:
                    shapes = f"{tuple(tensor.shape)}, but {tuple(self._expected[name].shape)} by config.json"
                    raise ModelError(f"{name} has the shape {shapes}", fix="Use the complete model.")

    def ties(self, changed: set[str]) -> bool:
        """Return whether tied weights stay equal when the tensors in `changed` change."""
        return not changed & (self._tied.keys() | set(self._tied.values()))

    def pieces(self, changed: set[str], change: Change, *, published: bool) -> Iterator[Piece]:
        """Yield the whole model, in the publisher's layout or in that of the loaded model.

        Args:
            changed: Names of the tensors of the loaded model that `change` computes.
            change: Computes a tensor. A new head has no base tensor; for a tensor on 'meta' it returns only the shape.
            published: Write the publisher's layout, not the loaded model's.
        """
        for unit in self._units:
            # A model that scores does not use the head of the language model that it was made from.
            if not self._scores or self._expected.keys() & set(unit.loaded):
                yield from self._of_unit(unit, changed, change, published)
        tied = {name for name, other in self._tied.items() if {name, other} & changed}
        for name in sorted((tied | changed) - self._at.keys()):
            yield self._beside(name, changed, change, published)

    def _of_unit(self, unit: _Unit, changed: set[str], change: Change, published: bool) -> Iterator[Piece]:
        if not changed & set(unit.loaded) and published:
            yield from map(self._stored.piece, unit.published)
            return

        def make(load: Callable[[str], torch.Tensor], change: Change) -> Tensors:
            tensors = self._loaded(unit, {name: load(name) for name in unit.published})
            tensors = {name: change(name, tensor) if name in changed else tensor for name, tensor in tensors.items()}
            if published and unit.converter is None:
                return {unit.published[0]: tensors[unit.loaded[0]]}
            return self._written(tensors, published)

        shapes = make(self._stored.shapes.__getitem__, change)
        assert not published or shapes.keys() == set(unit.published), f"{unit.published} would become {[*shapes]}"
        yield Piece(shapes, lambda: make(self._stored.load, change))

    def _beside(self, name: str, changed: set[str], change: Change, published: bool) -> Piece:
        """Return a tensor that the published model does not have: a new head, or one of two tied tensors."""
        unit = self._at.get(self._tied.get(name, ""))

        def make(load: Callable[[str], torch.Tensor], change: Change) -> Tensors:
            base = self._loaded(unit, {part: load(part) for part in unit.published})[unit.loaded[0]] if unit else None
            tensor = change(name, base) if name in changed else base
            assert tensor is not None, f"{name} is tied to nothing"
            return self._written({name: tensor}, published)

        expected = self._expected[name]
        meta_tensors = make(
            self._stored.shapes.__getitem__, lambda name, base: change(name, expected if base is None else base)
        )
        return Piece(meta_tensors, lambda: make(self._stored.load, change))

    def _written(self, tensors: Tensors, published: bool) -> Tensors:
        return dict(revert_weight_conversion(self._model, tensors)) if published else tensors

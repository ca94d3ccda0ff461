"""The objectives: one module each, with the keys of its block and its facts. The trainers are in `worker.objectives`.

A new objective is a module here, a module there, and a part in `configs/objectives`. Nothing else knows its name. The
module has the name in `objective.type`, and is imported when a recipe has this objective.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Annotated, get_args

from pydantic import BeforeValidator, SerializeAsAny
from pydantic_core import PydanticKnownError

from tuner.recipes.schema.block import Block
from tuner.recipes.schema.objective import Objective as Objective
from tuner.recipes.schema.objective import ObjectiveFacts as ObjectiveFacts
from tuner.recipes.schema.objective import RowKind as RowKind
from tuner.recipes.schema.objective import Teacher as Teacher


class _Objectives(Mapping[str, type[Objective]]):
    def __init__(self) -> None:
        self._names = frozenset(module.name for module in iter_modules(__path__))

    def __getitem__(self, name: str) -> type[Objective]:
        if name not in self._names:
            raise KeyError(name)
        return _block(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        kinds = get_args(RowKind)

        def order(name: str) -> tuple[int, bool, bool, str]:
            objective_facts = self[name].facts
            return kinds.index(objective_facts.rows), not objective_facts.is_usual, objective_facts.has_teacher, name

        return iter(sorted(self._names, key=order))

    def __len__(self) -> int:
        return len(self._names)


OBJECTIVES = _Objectives()
"""The block of each objective by the name in `objective.type`: those with the same kind of rows follow each other.

The usual one comes first, those that need another model last. Lists of objectives have this order everywhere; `tuner
new dataset` suggests the first that suits the rows.
"""


@cache
def _block(name: str) -> type[Objective]:
    module = import_module(f"{__name__}.{name}")
    classes = (value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Objective))
    return next(block for block in classes if block.__module__ == module.__name__)


def _of_its_type(value: object) -> object:
    """Return the block of an objective by its type."""
    if not isinstance(value, Mapping):
        return value
    if "type" not in value:
        raise PydanticKnownError("union_tag_not_found", {"discriminator": "'type'"})
    if (name := value["type"]) not in OBJECTIVES:
        expected = ", ".join(map(repr, OBJECTIVES))
        tags = {"discriminator": "'type'", "tag": str(name), "expected_tags": expected}
        raise PydanticKnownError("union_tag_invalid", tags)
    return OBJECTIVES[name].model_validate(value)


AnyObjective = Annotated[SerializeAsAny[Objective], BeforeValidator(_of_its_type)]


def blocks_of(annotation: object) -> list[type[Block]]:
    """Return the blocks that a value with this annotation may be."""
    if annotation is Objective:
        return [*OBJECTIVES.values()]
    options = (annotation, *get_args(annotation))
    return [option for option in options if isinstance(option, type) and issubclass(option, Block)]


def facts_of(name: str) -> ObjectiveFacts:
    """Return the facts of an objective.

    Raises:
        KeyError: there is no such objective.
    """
    return OBJECTIVES[name].facts


def takes_images(name: object) -> bool:
    """Return whether an objective trains on rows with images; an unknown name does not."""
    return name in OBJECTIVES and facts_of(str(name)).rows == "conversations"


def objectives_with(setting: str) -> tuple[str, ...]:
    """Return the names of the objectives that have a setting."""
    return tuple(name for name, block in OBJECTIVES.items() if setting in block.model_fields)

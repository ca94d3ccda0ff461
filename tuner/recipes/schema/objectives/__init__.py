"""The objectives: one module each, with the keys of its block and its facts. The trainers are in `worker.objectives`.

A new objective is a module here, a module there, and a part in `configs/objectives`. Nothing else knows its name.
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Annotated, Union, get_args

from pydantic import Field

from tuner.recipes.schema.objectives.objective_block import Objective as Objective
from tuner.recipes.schema.objectives.objective_block import ObjectiveFacts as ObjectiveFacts
from tuner.recipes.schema.objectives.objective_block import RowKind as RowKind
from tuner.recipes.schema.objectives.objective_block import Teacher as Teacher

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

_ROWS = get_args(RowKind)


def _blocks(base: type[Objective]) -> list[type[Objective]]:
    """Return the blocks of objectives; a class without facts is the base of several."""
    below = [block for one in base.__subclasses__() for block in _blocks(one)]
    return [base, *below] if hasattr(base, "facts") else below


def _order(block: type[Objective]) -> tuple[int, bool]:
    """Return the kind of the rows, and whether a recipe needs more than them."""
    return _ROWS.index(block.facts.rows), block.facts.has_teacher


OBJECTIVES: dict[str, type[Objective]] = {
    get_args(block.model_fields["type"].annotation)[0]: block for block in sorted(_blocks(Objective), key=_order)
}
"""The block of each objective by the name in `objective.type`: those with the same kind of rows follow each other.

Lists of objectives have this order everywhere; `tuner new dataset` suggests the first that suits the rows.
"""
READ_IMAGES = frozenset(name for name, block in OBJECTIVES.items() if block.facts.rows == "conversations")
"""The objectives that train on rows with images."""
if TYPE_CHECKING:
    AnyObjective = Objective
else:
    AnyObjective = Annotated[Union[tuple(OBJECTIVES.values())], Field(discriminator="type")]  # noqa: UP007


def facts_of(name: str) -> ObjectiveFacts:
    """Return the facts of an objective.

    Raises:
        KeyError: there is no such objective.
    """
    return OBJECTIVES[name].facts


def scores(name: object) -> bool:
    """Return whether an objective trains a model that scores answers; an unknown name does not."""
    return name in OBJECTIVES and facts_of(str(name)).scores


def objectives_with(setting: str) -> tuple[str, ...]:
    """Return the names of the objectives that have a setting."""
    return tuple(name for name, block in OBJECTIVES.items() if setting in block.model_fields)

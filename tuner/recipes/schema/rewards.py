"""The blocks of rewards: what scores the completions that an objective generates, with the settings of each.

A reward is a block, `dict(type='format', pattern='...')`, or the text of its type alone: 'math',
'my_rewards.py:length' or 'my_package.my_module:function'. The functions themselves are in `tuner.rewards`.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union, get_args

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    Tag,
    field_validator,
    model_serializer,
)

from tuner.errors import did_you_mean
from tuner.files import JsonObject
from tuner.recipes.schema.block import Block, Lax

_OWN = "own function"
_EXAMPLE_OF_OWN = "'my_rewards.py:my_function'"


class RewardBlock(Block):
    """One reward: a function that returns a number for a completion, or None for no opinion.

    Attributes:
        varies: A reward that returns one value for every completion of the trial is a mistake.
    """

    varies: ClassVar[bool] = True
    type: str
    # The reward is multiplied by it, and the rewards are added up. A negative weight makes it a penalty.
    weight: float = 1.0
    # Seconds for one call, which scores a batch of completions, or one completion after such a call failed.
    timeout: PositiveFloat = 10.0
    # The run ends if a greater share of the last 1,000 completions has no reward because the function failed. With 8
    # generations a prompt 0.1 is less than one a group, so that means over a group stay meaningful.
    max_failures: Annotated[float, Field(ge=0, le=1)] = 0.1

    @property
    def name(self) -> str:
        """The name in metrics: the type, or the function of an own reward."""
        return self.type.rpartition(":")[2]

    @field_validator("weight")
    @classmethod
    def _weighs_something(cls, weight: float) -> float:
        if not weight:
            raise ValueError("0 switches the reward off; leave the reward out instead")
        return weight

    @model_serializer(mode="wrap")
    def _written_keys(self, dump: SerializerFunctionWrapHandler) -> JsonObject:
        """Leave out the keys that have their default, except for the type."""
        fields = type(self).model_fields
        return {key: value for key, value in dump(self).items() if key == "type" or value != fields[key].default}


class OfAnswer(RewardBlock):
    """A reward that compares a completion with a column of the row."""

    # The column of the row with the right answer.
    column: str = "answer"


class MathReward(OfAnswer):
    """1 if the completion's final answer equals the right answer as a number or an expression, else 0."""

    type: Literal["math"]


class ExactReward(OfAnswer):
    """1 if the completion is the right answer, without white space around both, else 0."""

    type: Literal["exact"]
    # Upper and lower case are the same.
    ignore_case: bool = False


class ContainsReward(OfAnswer):
    """1 if the right answer, or `text`, occurs in the completion, else 0."""

    type: Literal["contains"]
    # The text to look for. None: the right answer.
    text: str | None = None
    ignore_case: bool = False


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression of Python: {error}") from None
    return pattern


class FormatReward(RewardBlock):
    """1 if the whole completion matches a regular expression, else 0; a dot matches line ends too."""

    varies: ClassVar = False
    type: Literal["format"]
    # Python's regular expression, such as '<think>.*</think>.+'.
    pattern: Annotated[str, BeforeValidator(_compiles)]


class JsonReward(RewardBlock):
    """1 if the completion is JSON that fits a JSON Schema, else 0; a code fence around it is taken off."""

    varies: ClassVar = False
    type: Literal["json"]
    # A JSON Schema, or the path of a file with one. None: any JSON.
    json_schema: dict[str, Any] | str | None = None


class LengthReward(RewardBlock):
    """Minus the distance of a completion's length from the wanted length, as a share of it; at least -1."""

    type: Literal["length"]
    # The wanted length in characters.
    target: PositiveInt = 200


class ModelReward(RewardBlock):
    """The score of a reward model, such as one that the objective for reward models trained."""

    type: Literal["model"]
    # Its folder, or its id on the hub. Each rank loads it once.
    path: str
    # What its config.json says; tuner reads it.
    architecture: JsonObject | None = None
    # Completions that it reads at a time.
    batch_size: PositiveInt = 8
    timeout: PositiveFloat = 600.0


class EnvironmentReward(RewardBlock):
    """What the method `get_reward` of a completion's environment returns: see `objective.environment`."""

    type: Literal["environment"]


class OwnReward(RewardBlock):
    """A function of the user's: 'my_rewards.py:my_function' or 'my_package.my_module:my_function'."""

    type: str
    # False: `tuner check` does not refuse the function if it returns one value for every completion.
    trial: bool = True

    @field_validator("type")
    @classmethod
    def _names_a_function(cls, name: str) -> str:
        return names_code(name, _EXAMPLE_OF_OWN)


def names_code(name: str, example: str) -> str:
    """Return the name of a function or a class in a file or a module.

    Raises:
        ValueError: `name` is not written as FILE:FUNCTION or MODULE:FUNCTION.
    """
    module, _, function = name.rpartition(":")
    if not module or not function.isidentifier():
        raise ValueError(f"{name!r} does not name a function; write it as {example}")
    return name


def file_of(name: str) -> str | None:
    """Return the file of a function or a class by its name; None if that names a module."""
    module = name.rpartition(":")[0]
    return module if module.endswith(".py") else None


BUILT_IN: dict[str, type[RewardBlock]] = {
    get_args(block.model_fields["type"].annotation)[0]: block
    for block in (
        *(MathReward, ExactReward, ContainsReward, FormatReward, JsonReward, LengthReward),
        *(ModelReward, EnvironmentReward),
    )
}
"""The block of each reward of the package by its type."""


def _with_type(reward: object) -> object:
    """Return the block of a reward that is written as a text; refuse a type that does not exist."""
    if isinstance(reward, RewardBlock):
        return reward
    block = {"type": reward} if isinstance(reward, str) else reward
    if not isinstance(block, Mapping):
        raise ValueError(f"{reward!r} is not a reward; write 'math', {_EXAMPLE_OF_OWN} or dict(type='math')")
    name = block.get("type")
    if not isinstance(name, str):
        raise ValueError(f"a reward needs a type: one of {', '.join(BUILT_IN)}, or {_EXAMPLE_OF_OWN}")
    if name not in BUILT_IN and ":" not in name:
        near = did_you_mean(name, BUILT_IN, see=", ".join(BUILT_IN))
        raise ValueError(f"there is no reward {name!r}. {near}. A function of yours is written {_EXAMPLE_OF_OWN}.")
    fields = BUILT_IN.get(name, OwnReward).model_fields
    if unknown := next((key for key in block if key not in fields), None):
        near = did_you_mean(str(unknown), fields, see=", ".join(fields))
        raise ValueError(f"the reward {name!r} has no key {unknown!r}. {near}")
    if missing := next((key for key, field in fields.items() if field.is_required() and key not in block), None):
        raise ValueError(f"the reward {name!r} needs {missing}")
    return dict(block)


def _kind(reward: Any) -> str:
    name = reward.get("type") if isinstance(reward, dict) else reward.type
    return name if name in BUILT_IN else _OWN


def _several(value: object) -> object:
    """Return a tuple of one reward for a single reward."""
    if not value:
        raise ValueError("the list is empty; name at least one reward, such as 'math'")
    return (value,) if isinstance(value, str | dict | RewardBlock) else value


if TYPE_CHECKING:
    AnyReward = RewardBlock
else:
    _TAGGED = (*(Annotated[block, Tag(name)] for name, block in BUILT_IN.items()), Annotated[OwnReward, Tag(_OWN)])
    AnyReward = Annotated[Union[_TAGGED], Discriminator(_kind), BeforeValidator(_with_type)]  # noqa: UP007


def rewards_of(objective: Block) -> tuple[RewardBlock, ...]:
    """Return the rewards of an objective; empty if it has none."""
    rewards: tuple[RewardBlock, ...] = getattr(objective, "rewards", ())
    return rewards


Rewards = Annotated[tuple[AnyReward, ...], Lax, BeforeValidator(_several)]
"""The key `rewards` of an objective: one reward or several."""

"""What every block of a recipe's schema is made of: a class of annotated keys, which pydantic's core checks.

It knows no key of a recipe. A block is written as a pydantic model is, and what is said of wrong values is pydantic's.
`pydantic` itself is not imported: that, and building these models with it, took 120 of the 180 ms of `tuner show`;
pydantic_core, which is all that checks a value, takes 10.

A module of blocks has no `from __future__ import annotations`: its annotations as texts would be compiled anew.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from copy import copy
from functools import cache
from inspect import get_annotations
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
)

from pydantic_core import PydanticCustomError, SchemaValidator, ValidationError
from pydantic_core import core_schema as core

_CONFIG = core.CoreConfig(strict=True, extra_fields_behavior="forbid", allow_inf_nan=False)
_PLAIN = {str: "str", int: "int", float: "float", bool: "bool", Any: "any"}
_REQUIRED = object()
Mode = Literal["python", "json"]


class Field:
    """What a value must be beside its type, in the names of pydantic_core's schemas: gt, ge, lt, le, max_length ...

    `discriminator` names the key by which the blocks of a union are told apart.
    """

    def __init__(self, **limits: Any) -> None:
        self.limits = limits


class Before(NamedTuple):
    """A function that changes a value before it is checked."""

    function: Callable[[Any], Any]


Fraction = Annotated[float, Field(ge=0, lt=1)]
PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Lax = Field(strict=False)
"""Of a tuple: a list may stand for it."""


class Key(NamedTuple):
    """One key of a block: its type without what `Annotated` adds, that, and its default."""

    annotation: Any
    marks: tuple[Any, ...]
    default: Any

    @property
    def is_required(self) -> bool:
        return self.default is _REQUIRED


def check_key(*keys: str) -> Callable[[Any], Any]:
    """Mark a classmethod (value, info) that checks the value of each of some keys; `info.data` holds those before."""

    def mark(method: Any) -> Any:
        method.__func__.checks = keys
        return method

    return mark


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Block:
    """A part of a recipe: unknown keys, other types, NaN and infinity are errors; immutable.

    Raises:
        ValidationError: the values are wrong; it holds every mistake.
    """

    # Where pydantic_core keeps an instance's values and which of them were given.
    __slots__ = ("__dict__", "__pydantic_extra__", "__pydantic_fields_set__", "__pydantic_private__")
    __pydantic_fields_set__: set[str]
    model_fields: ClassVar[dict[str, Key]]

    def __init_subclass__(cls) -> None:
        # Not get_type_hints, which evaluates those of the bases again, and in twice the time.
        own = {name: hint for name, hint in get_annotations(cls, eval_str=True).items() if not name.startswith("_")}
        inherited: dict[str, Key] = getattr(cls, "model_fields", {})
        cls.model_fields = inherited | {name: _key(hint, getattr(cls, name, _REQUIRED)) for name, hint in own.items()}

    def __init__(self, **values: Any) -> None:
        type(self)._validator().validate_python(values, self_instance=self)

    @classmethod
    def model_validate(cls, values: Any) -> Self:
        """Return the block that these values are, or a block itself as it is."""
        block: Self = cls._validator().validate_python(values)
        return block

    @classmethod
    def model_construct(cls, **values: Any) -> Self:
        """Return a block of values that need no check."""
        block = cls.__new__(cls)
        defaults = {name: key.default for name, key in cls.model_fields.items() if not key.is_required}
        block.__setstate__((defaults | values, {"__pydantic_fields_set__": {*values}}))
        return block

    def model_copy(self, *, update: dict[str, Any]) -> Self:
        """Return the block with other values, which are not checked."""
        other = copy(self)
        other.__dict__.update(update)
        object.__setattr__(other, "__pydantic_fields_set__", self.model_fields_set | update.keys())
        return other

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """Return the block with other values by dotted key, those of blocks in it too; they are not checked."""
        made = self
        for dotted, value in values.items():
            key, _, inner = dotted.partition(".")
            made = made.model_copy(update={key: getattr(made, key).with_values({inner: value}) if inner else value})
        return made

    def model_dump(self, *, mode: Mode = "python", exclude: Container[str] = ()) -> dict[str, Any]:
        """Return plain nested values; mode 'json' makes lists of tuples, `exclude` leaves keys out."""
        return {key: plain(getattr(self, key), mode) for key in self.model_fields if key not in exclude}

    @property
    def model_fields_set(self) -> set[str]:
        """The keys that were given."""
        return self.__pydantic_fields_set__

    @classmethod
    def schema(cls) -> core.CoreSchema:
        """Return what pydantic_core checks a block by; blocks may put their own around it."""
        checks = [method for one in cls.__mro__ for method in vars(one).values() if isinstance(method, classmethod)]
        fields = {}
        for name, key in cls.model_fields.items():
            schema = _schema(key)
            for method in checks:
                if name in getattr(method.__func__, "checks", ()):
                    schema = core.with_info_after_validator_function(method.__get__(None, cls), schema)
            if not key.is_required:
                always = any(mark.limits.get("validate_default") for mark in key.marks if isinstance(mark, Field))
                schema = core.with_default_schema(schema, default=key.default, validate_default=always)
            fields[name] = core.model_field(schema)
        of_fields = core.model_fields_schema(fields, model_name=cls.__name__)
        return core.model_schema(cls, of_fields, config=core.CoreConfig(title=cls.__name__, **_CONFIG))

    @classmethod
    @cache
    def built_schema(cls) -> core.CoreSchema:
        """Return the schema, which is made once."""
        return cls.schema()

    @classmethod
    @cache
    def _validator(cls) -> SchemaValidator:
        return SchemaValidator(cls.built_schema(), _CONFIG)

    def __setattr__(self, name: str, value: Any) -> None:
        detail: Any = {"type": "frozen_instance", "loc": (name,), "input": value}
        raise ValidationError.from_exception_data(type(self).__name__, [detail])

    def __setstate__(self, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
        values, slots = state
        for name, value in {"__dict__": dict(values), **slots}.items():
            object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((type(self), *self.__dict__.values()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"


def plain(value: Any, mode: Mode) -> Any:
    """Return a value with plain dicts in the place of blocks, and in mode 'json' with lists in that of tuples."""
    if isinstance(value, Block):
        return value.model_dump(mode=mode)
    if isinstance(value, dict):
        return {key: plain(one, mode) for key, one in value.items()}
    if isinstance(value, list | tuple):
        items = [plain(one, mode) for one in value]
        return tuple(items) if isinstance(value, tuple) and mode == "python" else items
    return value


def wrong_key(key: str, why: str) -> PydanticCustomError:
    """Return the error of a block whose `key` does not go with values outside of it; `why` completes "`key` ..."."""
    return PydanticCustomError("wrong_key", "{key} {why}", {"key": key, "why": why})


def _key(hint: Any, default: Any) -> Key:
    annotation, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    return Key(annotation, tuple(marks), default)


def _schema(key: Key) -> Any:
    """Return what pydantic_core checks a key's value by."""
    limits = {name: limit for mark in key.marks if isinstance(mark, Field) for name, limit in mark.limits.items()}
    discriminator = limits.pop("discriminator", None)
    limits.pop("validate_default", None)
    if discriminator:
        blocks = {get_args(one.model_fields[discriminator].annotation)[0]: one for one in get_args(key.annotation)}
        choices = {tag: block.built_schema() for tag, block in blocks.items()}
        return core.tagged_union_schema(choices, discriminator, from_attributes=True)
    schema: Any = {**_of_type(key.annotation), **limits}
    for mark in key.marks:
        if isinstance(mark, Before):
            schema = core.no_info_before_validator_function(mark.function, schema)
    return schema


def _of_type(kind: Any) -> Any:
    """Return the schema of one type as it stands in an annotation."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _schema(_key(kind, _REQUIRED))
    if origin is Literal:
        return core.literal_schema(list(inner))
    if origin in (Union, UnionType):
        options = [_of_type(one) for one in inner if one is not NoneType]
        union = options[0] if len(options) == 1 else core.union_schema(options)
        return core.nullable_schema(union) if NoneType in inner else union
    if origin is tuple:
        items = [_of_type(one) for one in inner if one is not ...]
        return core.tuple_schema(items, variadic_item_index=0 if ... in inner else None)
    if origin is list:
        return core.list_schema(_of_type(inner[0]))
    if origin is dict:
        return core.dict_schema(*map(_of_type, inner))
    return kind.built_schema() if is_block(kind) else {"type": _PLAIN[kind]}


def blocks_of(annotation: Any) -> list[type[Block]]:
    """Return the blocks that an annotation is or may be."""
    return [option for option in (annotation, *get_args(annotation)) if is_block(option)]


def is_block(kind: Any) -> bool:
    """Return whether an annotation is a block."""
    return isinstance(kind, type) and issubclass(kind, Block)

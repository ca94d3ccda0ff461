"""The mistakes in a recipe's values: an error for each value that the schema refuses, with its place and what to do."""

from __future__ import annotations

from typing import get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tuner.errors import RecipeError, TunerError, brief_repr, did_you_mean, together
from tuner.recipes.aliases import instead_of_objective, key_hint
from tuner.recipes.merging import Keys, Kind, Merged, lookup
from tuner.recipes.schema import schema_keys
from tuner.recipes.schema.objectives import objectives_with

_MAX_MISTAKES = 20


def explained(error: ValidationError, merged: Merged) -> TunerError:
    """Return one error for all values that the schema refuses."""
    mistakes: dict[Keys, RecipeError] = {}
    for detail in error.errors(include_url=False):
        if len(mistakes) == _MAX_MISTAKES:
            break
        keys = _keys(detail, merged)
        # pydantic reports a wrong value of a union once for each of its branches.
        mistakes.setdefault(keys, _explain(detail, keys, merged))
    errors = [*mistakes.values()]
    if len(errors) == _MAX_MISTAKES:
        errors[-1].fix = f"{errors[-1].fix or ''} These are the first {_MAX_MISTAKES} mistakes.".strip()
    return together(errors)


def _keys(detail: ErrorDetails, merged: Merged) -> Keys:
    """Return the recipe's key of an error."""
    keys = tuple(str(key) for key in detail["loc"])
    if detail["type"] == "extra_forbidden" and _of_another_objective(keys):
        return ("objective", "type")  # one wrong type, however many settings do not fit it
    if detail["type"] in ("missing", "extra_forbidden"):
        return keys
    # A location may end in a union's branch or a list's index ('target_modules', 'str'): keep the recipe's keys.
    while lookup(merged.values, keys, ...) is ...:
        keys = keys[:-1]
    return keys


def _explain(detail: ErrorDetails, keys: Keys, merged: Merged) -> RecipeError:
    place = merged.place_of(keys)
    dotted, where = ".".join(keys), None if place.kind is Kind.DEFAULT else place
    match detail["type"]:
        case "extra_forbidden" if keys == ("objective", "type"):
            return _wrong_objective(str(detail["loc"][-1]), merged)
        case "extra_forbidden":
            siblings = (known[-1] for known in schema_keys() if known[:-1] == keys[:-1])
            return RecipeError(f"no key {dotted!r}", where=where, fix=key_hint(keys[-1], siblings))
        case "missing":
            return RecipeError(f"{dotted} is missing", where=where, fix=f"Set {dotted}.")
        case "union_tag_not_found":
            return RecipeError(f"{dotted}.type is missing", where=where, fix=f"Set {dotted}.type.")
        case "union_tag_invalid":
            context = detail["ctx"]
            if keys == ("objective",) and (instead := instead_of_objective(context["tag"])):
                place = merged.place_of((*keys, "type"))
                return RecipeError(f"tuner has no objective {context['tag']!r}", where=place, fix=instead)
            return _none_of((*keys, "type"), context["tag"], context["expected_tags"], merged)
        case "literal_error":
            return _none_of(keys, detail["input"], detail["ctx"]["expected"], merged)
        case "wrong_key":
            return RecipeError(f"{dotted}: {detail['msg']}", where=merged.place_of((*keys, detail["ctx"]["key"])))
    message = str(detail["ctx"]["error"]) if detail["type"] == "value_error" else detail["msg"]
    if isinstance(detail["input"], dict) and keys:
        return RecipeError(f"{dotted}: {message}", where=where)
    return RecipeError(f"{dotted} = {brief_repr(detail['input'])}: {message[:1].lower()}{message[1:]}", where=where)


def _none_of(keys: Keys, value: object, expected: str, merged: Merged) -> RecipeError:
    hint = did_you_mean(value, _choices(schema_keys().get(keys))) if isinstance(value, str) else ""
    message = f"{'.'.join(keys)} = {brief_repr(value)}: input should be {expected}"
    return RecipeError(message, where=merged.place_of(keys), fix=hint or None)


def _choices(annotation: object) -> list[str]:
    """Return the texts of all `Literal`s in an annotation."""
    inner = get_args(annotation)
    return [one for one in inner if isinstance(one, str)] + [text for one in inner for text in _choices(one)]


def _of_another_objective(keys: Keys) -> bool:
    return keys[:1] == ("objective",) and len(keys) == 2 and bool(objectives_with(keys[1]))


def _wrong_objective(setting: str, merged: Merged) -> RecipeError:
    """Return the error for a setting that the objective does not have; the fix changes the later of the two."""
    kind = merged.values["objective"]["type"]
    message = f"objective.{setting} belongs to {', '.join(objectives_with(setting))}, and objective.type is {kind!r}"
    if merged.order["objective.type"] < merged.order[f"objective.{setting}"]:
        return RecipeError(message, where=merged.place_of(("objective", setting)), fix=f"Remove {setting}.")
    fix = f"Use the recipe's name instead, which brings its own settings: tiny_{kind}_full_sample_e3."
    return RecipeError(message, where=merged.place_of(("objective", "type")), fix=fix)

"""Whether a DeepSpeed config says what its author means: every key, type, value and contradiction, without DeepSpeed.

It changes no value beyond cleaning; what a recipe and the machine add is `merge`.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

from tuner.errors import did_you_mean, nearest
from tuner.zero import conflicts, obsolete
from tuner.zero.config_schema import Field, Misfit, fit, schema, spellings
from tuner.zero.findings import Findings
from tuner.zero.jsonfile import Document, Keys, named


class Checked(NamedTuple):
    """A config that DeepSpeed will understand as it is meant.

    Attributes:
        value: A copy of the document's value: 5e8 is an int where DeepSpeed wants one, obsolete and inert keys are
            gone, other spellings of a key are replaced by its main one, and "auto" stands only where Hugging Face
            resolves it.
        warnings: What was dropped and what replaces it, each with its place.
    """

    value: dict[str, Any]
    warnings: tuple[str, ...] = ()


def check(document: Document) -> Checked:
    """Check a whole config; the relation of the three batch sizes is `merge`'s.

    Raises:
        DeepSpeedConfigError: one or more problems, all told in one error: an unknown key, a wrong type or value, a
            removed feature that is on, an "auto" that nothing resolves, keys that contradict each other.
    """
    checked, findings = inspect(document)
    findings.raise_problems()
    return checked


def inspect(document: Document, *, to_run: bool = False) -> tuple[Checked, Findings]:
    """Check a whole config and refuse nothing: the value is of use where the findings hold no problem.

    `to_run`: what no run of tuner survives is a problem too, and not a warning.
    """
    findings = Findings(document)
    value = copy.deepcopy(document.value)
    obsolete.drop_comments(value, findings)
    obsolete.drop(value, findings)
    cleaned = _block(value, (), {"keys": schema()["keys"], "parsed": "legacy"}, findings)
    conflicts.check_optimizer(cleaned, findings, _block)
    conflicts.check_scheduler(cleaned, findings, _block)
    conflicts.check_rules(cleaned, findings, to_run=to_run)
    return Checked(cleaned, tuple(warning.message for warning in findings.warnings)), findings


def _block(block: dict[str, Any], keys: Keys, field: Field, findings: Findings, path: str = "") -> dict[str, Any]:
    """Return the block cleaned; problems go to `findings`, and what has one is left out.

    Args:
        keys: The block's key as written, for its place in the file.
        path: Its key in the main spelling, for the rules; ends with a dot unless empty.
    """
    if "keys" not in field:
        return block
    known_as = spellings(field["keys"])
    result: dict[str, Any] = {}
    for written, value in block.items():
        at = (*keys, written)
        name = known_as.get(written)
        if name is None:
            findings.problem(at, *_unknown(at, field["keys"]))
        elif name in result:
            findings.problem(at, f"{written} is another spelling of {name}, and both are set", "Keep one of the two.")
        else:
            if field["keys"].get(written, {}).get("deprecated"):
                findings.warn(at, f"{written} is deprecated in DeepSpeed", f"Use {name}.")
            known = field["keys"][name]
            _entry(result, name, f"{path}{name}", value, at, known, field["parsed"], findings)
    return result


def _entry(
    result: dict[str, Any], name: str, path: str, value: Any, at: Keys, field: Field, parsed: str, findings: Findings
) -> None:
    if isinstance(value, dict) and "object" in field["type"]:
        result[name] = _block(value, at, field, findings, f"{path}.")
        return
    try:
        result[name] = fit(value, field, path, parsed)
    except Misfit as misfit:
        fix = _as_block(at, field) if isinstance(value, bool | int) and "keys" in field else misfit.fix
        findings.problem(at, f"{named(at, value)} {misfit.what}", fix)


def _as_block(at: Keys, field: Field) -> str:
    example = '"stage": 2' if "stage" in field["keys"] else '"enabled": true'
    return f'Write "{at[-1]}": {{{example}}}.' if "enabled" in field["keys"] or "stage" in field["keys"] else ""


def _unknown(at: Keys, fields: dict[str, Field]) -> tuple[str, str]:
    name, block = str(at[-1]), ".".join(map(str, at[:-1]))
    what = f"there is no key {name!r}{f' in {block}' if block else ''}"
    what += "" if block else "; DeepSpeed would silently ignore it"
    home = _homes(schema()["keys"]).get(name)
    if not nearest(name, fields) and home:
        return what, f"It belongs into {home}."
    return what, did_you_mean(name, fields) or "Remove it."


def _homes(fields: dict[str, Field], path: str = "") -> dict[str, str]:
    """Return the block in which a key stands, for keys that stand in one block only."""
    homes: dict[str, str] = {}
    for name, field in fields.items():
        for key in field.get("keys", {}):
            homes[key] = "" if key in homes else f"{path}{name}"
        homes |= _homes(field.get("keys", {}), f"{path}{name}.")
    return {key: home for key, home in homes.items() if home}

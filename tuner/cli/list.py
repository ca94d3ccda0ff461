"""`tuner list`: the parts that recipe names are composed of, and the names that a pattern means."""

from __future__ import annotations

import fnmatch
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

import click

from tuner.assets import TEMPLATES
from tuner.cli import complete, parts
from tuner.cli.help import Command
from tuner.cli.options import Decorator, all_of, catalog_option
from tuner.cli.parts import mistake
from tuner.cli.say import say, say_json, wrapped
from tuner.errors import RecipeError, did_you_mean, visible
from tuner.files import JsonObject
from tuner.recipes import catalog, patterns
from tuner.recipes.catalog import PRESETS

_MAX_NAMES = 1_000
_WHAT_IT_IS = "A recipe is MODEL_[OBJECTIVE_]METHOD_DATASET_eEPOCHS, such as internlm2_chat_7b_qlora_oasst1_e3."
_NEXT = (
    "One line for each: tuner list --models [TEXT]. Full names: tuner list 'qwen3*_lora_alpaca*'.",
    "Next: tuner show NAME, tuner data NAME, tuner train NAME --dry-run, tuner copy NAME",
)

Parts = Mapping[str, Sequence[str]]
"""Kind -> names."""


def _kind_option(kind: str) -> Decorator:
    """Return the option for a kind of part; its value may be left out."""
    help_text = f"List the {kind}; with TEXT, those that contain it or match it as a pattern."
    return click.option(f"--{kind}", is_flag=False, flag_value="", metavar="[TEXT]", help=help_text)


@click.command(
    cls=Command,
    examples=(
        "tuner list '*qwen3*qlora*'",
        "tuner list --models",
    ),
    json_keys={
        "tuner list --json": "`models`, `methods`, `objectives`, `datasets`, `recipes`",
    },
    uses={
        "names of models, methods and data sets": (
            "`tuner list`, with `--models`, `--methods`, `--datasets` or a pattern"
        ),
    },
)
@click.argument("pattern", required=False, shell_complete=complete.recipes)
@all_of(*map(_kind_option, catalog.KINDS))
@click.option("--json", "as_json", is_flag=True, help="Print the parts as JSON, with paths and numbers of parameters.")
@catalog_option
def command(pattern: str | None, as_json: bool, **texts: str | None) -> None:
    """List the models, methods and data sets that recipe names are made of.

    A recipe's name is MODEL_[OBJECTIVE_]METHOD_DATASET_eEPOCHS. PATTERN is a part of it, such as qwen3, or a pattern
    of full names, such as 'qwen3*_lora_alpaca*'.

    Parts of your own catalog (./tuner_configs, TUNER_CATALOG, --catalog, installed packages) are listed with their
    folder. Invalid parts are reported on standard error.
    """
    text_of_kind = {kind: text or pattern or "" for kind, text in texts.items() if text is not None}
    if pattern and not text_of_kind and _is_glob(pattern):
        _print_names(pattern, as_json=as_json)
        return
    parts = _parts(text_of_kind or dict.fromkeys(catalog.KINDS, pattern or ""))
    is_all = parts.keys() == {*catalog.KINDS}
    _tell_mistakes({**parts, **_others()} if is_all else parts, is_all=is_all)
    if as_json:
        _print_json(parts)
    elif text_of_kind or pattern or not sys.stdout.isatty():
        _print_summaries(parts)
    else:
        _print_compactly(parts)


def _is_glob(text: str) -> bool:
    return not patterns.WILDCARDS.isdisjoint(text)


def _parts(text_of_kind: Mapping[str, str]) -> Parts:
    """Return the names of each kind that match its text; a kind with a text and without a match is left out."""
    fitting = {kind: _fitting(text, catalog.names(kind)) for kind, text in text_of_kind.items()}
    if any(text_of_kind.values()) and not any(fitting.values()):
        raise _nothing(text_of_kind)
    return {kind: names for kind, names in fitting.items() if names or not text_of_kind[kind]}


def _fitting(text: str, names: Iterable[str]) -> list[str]:
    """Return the names that match a glob or hold a text; people write 'Qwen2.5-7B' for qwen2_5_7b."""
    if _is_glob(text):
        return fnmatch.filter(names, text.lower())
    part = re.sub(r"[-. ]", "_", text.lower())
    return [name for name in names if part in name]


def _nothing(text_of_kind: Mapping[str, str]) -> Exception:
    text = next(filter(None, text_of_kind.values()))
    names = [name for kind in text_of_kind for name in catalog.names(kind)]
    # 'qwne3' is near to 'qwen3', and to no whole name.
    starts = {"_".join(name.split("_")[:count]) for name in names for count in range(1, 9)}
    kinds = "part" if len(text_of_kind) > 1 else next(iter(text_of_kind)).removesuffix("s")
    option = "" if len(text_of_kind) > 1 else f" --{next(iter(text_of_kind))}"
    return RecipeError(f"no {kinds} matches {text!r}", fix=did_you_mean(text, starts, see=f"tuner list{option}"))


def _print_names(pattern: str, *, as_json: bool) -> None:
    expansion = patterns.expand(pattern, _MAX_NAMES, parts.learners)
    if not expansion.total:
        nearest = catalog.suggest(re.sub(r"[*?[\]]", "", pattern))
        hint = f"Did you mean {nearest!r}? " if nearest else ""
        raise RecipeError(f"no recipe's name matches {pattern!r}", fix=f"{hint}See: tuner list")
    if as_json:
        say_json({"names": expansion.names, "total": expansion.total})
        return
    click.echo("\n".join(expansion.names))
    if expansion.total > (shown := len(expansion.names)):
        notice = f"The first {shown:,} of {expansion.total:,} names. Use a longer pattern to see the others."
        click.echo(notice, err=True)


def _others() -> Parts:
    """Return the parts that do not occur in recipe names: presets and chat templates."""
    return {kind: catalog.names(kind) for kind in (PRESETS, TEMPLATES)}


def _tell_mistakes(parts: Parts, *, is_all: bool) -> None:
    """Print the mistakes in parts of the user's own catalog, and which of them hide others of the same name."""
    own_parts = [(kind, name) for kind, names in parts.items() for name in _own(kind) if name in names]
    if not own_parts and not catalog.has_own():
        return
    mistakes = [mistake(kind, name) for kind, name in own_parts]
    for error in (*filter(None, mistakes), *(catalog.misplaced() if is_all else ())):
        say(f"WARNING: {error}", err=True)
    for note in filter(None, (catalog.shadowing(kind, name) for kind, name in own_parts)):
        say(f"NOTE: {note}", err=True)


def _own(kind: str) -> dict[str, str]:
    """Return the user's own parts, each with its folder as the list shows it."""
    files = catalog.files(kind).items()
    return {name: visible(f"({file.folder.origin})") for name, file in files if not file.is_ours}


def _details(kind: str, name: str) -> JsonObject:
    """Return a part for `tuner list --json`: its summary, and the facts of its kind."""
    file = catalog.part_file(kind, name)
    details: JsonObject = {"summary": catalog.summary(file), "origin": file.folder.origin, "file": file.shown}
    if file.shadowed:
        details["shadows"] = [folder.origin for folder in file.shadowed]
    if wrong := mistake(kind, name):
        return {**details, "error": wrong.to_json()}
    if kind == "models":
        path = parts.values(kind, name).get("model", {}).get("path")
        return {**details, "path": path, "parameters": parts.parameters(name)}
    if kind == "datasets":
        try:
            paths = [rows["path"] for rows in parts.data_sets(name) if rows.get("path")]
        except RecipeError as error:  # a mixture of the package's, one of whose parts the user's own shadows
            return {**details, "error": error.to_json()}
        return {**details, "paths": paths, "objectives": [*parts.learners(name)]}
    return details


def _print_json(parts: Parts) -> None:
    by_kind: JsonObject = {kind: {name: _details(kind, name) for name in names} for kind, names in parts.items()}
    own_details = {kind: {name: _details(kind, name) for name in _own(kind)} for kind in _others()}
    say_json({**by_kind, "presets": catalog.presets(), "own": own_details})


def _print_summaries(parts: Parts) -> None:
    width = max(len(name) for names in parts.values() for name in names)
    lines: list[str] = []
    for kind, names in parts.items():
        lines.append(f"{kind}:")
        own_folders, files = _own(kind), catalog.files(kind)
        for name in names:
            summary = f"{catalog.summary(files[name])} {own_folders.get(name, '')}".strip()
            lines.append(wrapped(f"  {name:<{width}}  {visible(summary)}", " " * (width + 4)))
    if set(parts) == set(catalog.KINDS):
        for title, names in _titled(_others()):
            lines += [f"{title}:", f"  {', '.join(names)}"]
    click.echo("\n".join(lines))


def _titled(parts: Parts) -> Iterator[tuple[str, list[str]]]:
    """Yield the title and the names of each kind; the user's own names with their folder."""
    for kind, names in parts.items():
        title, own_folders = {PRESETS: "presets", TEMPLATES: "chat templates"}.get(kind, kind), _own(kind)
        yield title, [f"{name} {own_folders.get(name, '')}".strip() for name in names]


def _print_compactly(parts: Parts) -> None:
    click.echo(wrapped(_WHAT_IT_IS))
    for kind, names in _titled({**parts, **_others()}):
        click.echo(f"\n{kind} ({len(names)}):")
        for line in _families(names) if kind == "models" else ["  ".join(names)]:
            click.echo(wrapped(f"  {line}", "    "))
    click.echo()
    for hint in _NEXT:
        click.echo(wrapped(hint, "  "))


def _families(names: Iterable[str]) -> Iterator[str]:
    """Yield the names of each family (their first word) on one line; small families share one line."""
    small: list[str] = []
    for _, family in groupby(names, key=lambda name: name.split("_")[0]):
        group = [*family]
        if len(group) < 3:
            small += group
        else:
            yield "  ".join(group)
    if small:
        yield "  ".join(small)

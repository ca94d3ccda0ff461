"""Writes into the pages what the code owns: keys, commands, errors, exit codes, parts, other tools' words.

    python -m docs.generate            # after a change to an option, a key, a message or a part
    python -m docs.generate --check    # writes nothing; exit code 1 if a page is out of date
    python -m docs.generate --record   # also trains the examples of the guides again: minutes

The text between `<!-- generated: NAME ... -->` and `<!-- end -->` in a page or a README is `GENERATED[NAME]`. It is
committed, so the pages of a checkout are whole; `tests/test_docs.py` holds it equal to the code. The same command runs
the commands that a page shows with their output (`docs.transcripts`). `docs/zh.md` is the Chinese README as a page.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import is_dataclass
from enum import StrEnum
from functools import cache
from itertools import takewhile
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import click
from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from docs import transcripts
from tests.worker.families import METHODS, examples
from tuner import assets
from tuner.cli import COMMANDS, explain, other_tools, parts, tuner
from tuner.cli.help import Command
from tuner.cli.plan import cell_text
from tuner.data.formats import FORMATS
from tuner.data.sample_kinds import kinds_of
from tuner.errors import TunerError
from tuner.files import sized
from tuner.fit.estimate import model_states
from tuner.fit.levels import Costs
from tuner.fit.parameters import Parameters
from tuner.importers import aliases
from tuner.importers.xtuner_names import SPELLINGS
from tuner.launch import trainable
from tuner.launch.machines import MachineFlags
from tuner.machine.libraries import KERNELS, KERNELS_OF
from tuner.optimizers import OPTIMIZERS
from tuner.recipes import catalog
from tuner.recipes.loading import load
from tuner.recipes.merging import leaves
from tuner.recipes.overrides import KEY_FLAGS
from tuner.recipes.schema import RecipeConfig
from tuner.recipes.schema.architecture import KEEPS_APART, Architecture
from tuner.recipes.schema.block import Block
from tuner.recipes.schema.objectives import OBJECTIVES, Objective, blocks_of
from tuner.recipes.schema.tools import Tools
from tuner.runs.directory import RunDirectory
from tuner.runs.records import Keys, RunRecord, RunStatus, Versioned
from tuner.zero import presets

ROOT = Path(__file__).parents[1]
COMMAND = "python -m docs.generate"
CHINESE = ROOT / "docs" / "zh.md"
REASONS = ROOT / "docs" / "preset-reasons.toml"
_READMES = (ROOT / "README.md", ROOT / "README_zh-CN.md")
_CARDS = ("rtx4090", "rtx5090", "l40s", "a100-80g", "h100-80g")
_SHORT_ROW = 4096
"""Tokens: the largest model that a card trains is one for rows of so many."""
_SIGNAL = 128
_ByKey = dict[tuple[str, ...], str]
_MARK = re.compile(r"<!-- generated: (?P<name>[a-z .-]+?)(?: from [^>]*)? -->\n.*?<!-- end -->", re.DOTALL)
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^):#]+)(?P<anchor>#[^)]*)?\)")
_PLAIN = {str: "text", int: "whole number", float: "number", bool: "`True` or `False`", Any: "any value", dict: "dict"}


class Table(NamedTuple):
    """A generated text: the function that makes it, and the file that its facts come from."""

    text: Callable[[], str]
    source: str


def main() -> None:
    """Write every page that is out of date, or with --check name it."""
    is_check, is_outdated = "--check" in sys.argv, False
    for name in ("presets", "preset values"):
        GENERATED[name].text()  # a new preset without its reasons is told now, and not after minutes
    for page, text in outdated(record="--record" in sys.argv):
        is_outdated = True
        if not is_check:
            page.write_text(text, encoding="utf-8")
        print(page.relative_to(ROOT))
    if is_check and is_outdated:
        sys.exit(f"These pages are out of date. Run: {COMMAND}")


def outdated(pages: Sequence[Path] = (), *, record: bool = False) -> Iterator[tuple[Path, str]]:
    """Yield the pages that differ from what the code says today, each with its new text as soon as that is made.

    Args:
        pages: Those to look at; none: all, and both READMEs.
    """
    for page in pages or (*_READMES, *sorted((ROOT / "docs").rglob("*.md"))):
        text = chinese(_made(_READMES[1], record=record)) if page == CHINESE else _made(page, record=record)
        if page.read_text(encoding="utf-8") != text:
            yield page, text


def _made(page: Path, *, record: bool) -> str:
    """Return what a page should be, made again if it was edited meanwhile: its commands can take minutes."""
    while True:
        before = page.read_text(encoding="utf-8")
        text = transcripts.filled(filled(before), record=record)
        if page.read_text(encoding="utf-8") == before:
            return text


def filled(markdown: str) -> str:
    """Return the text of a page with everything generated in its place.

    Raises:
        KeyError: a page asks for what nothing here makes.
    """
    return _MARK.sub(lambda match: _section(match["name"]), markdown)


def _section(name: str) -> str:
    text, source = GENERATED[name]
    return f"<!-- generated: {name} from {source}; do not edit here, run: {COMMAND} -->\n{text()}<!-- end -->"


def chinese(readme: str) -> str:
    """Return the Chinese README as a page of the site: links lead to pages, and other links become text."""

    def linked(match: re.Match[str]) -> str:
        target, text, anchor = match["target"], match["text"], match["anchor"] or ""
        page = "index.md" if target == "README.md" else target.removeprefix("docs/")
        return f"[{text}]({page}{anchor})" if page.endswith(".md") and (page != target or anchor) else text

    note = f"<!-- This page is generated from README_zh-CN.md; do not edit it here, run: {COMMAND} -->\n"
    return note + _LINK.sub(linked, readme).replace("](docs/images/", "](images/")


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(_cell(cell) for cell in line)} |\n" for line in lines)


def _cell(cell: object) -> str:
    return str(cell).replace("|", "\\|").replace("\n", " ")


def _code(names: Iterable[object]) -> str:
    return ", ".join(f"`{name}`" for name in names)


# Reference: commands, recipe keys, exit codes


def _commands() -> str:
    return "\n".join(_command(command, context, f"tuner {name}", 2) for name, command, context in _top_commands())


def _command(command: click.Command, above: click.Context, title: str, level: int) -> str:
    context = click.Context(command, parent=above, info_name=title.rpartition(" ")[2])
    told = inspect.cleandoc(command.help or "").replace("\b\n", "")
    usage = " ".join((context.command_path, *command.collect_usage_pieces(context)))
    lines = [f"{'#' * level} {title}", "", told, "", "```text", usage, "```", ""]
    if isinstance(command, Command):
        lines += ["```sh", *command.examples, "```", ""]
    records = (param.get_help_record(context) for param in command.params)
    lines += [f"- `{flags}`: {_text(text)}" for flags, text in filter(None, records) if text]
    if isinstance(command, click.Group):
        inner = ((name, command.get_command(context, name)) for name in command.list_commands(context))
        lines += ["", *(_command(command, context, f"{title} {name}", level + 1) for name, command in inner if command)]
    return "\n".join(lines) + "\n"


def _json_keys() -> str:
    """Return a row for each line of JSON; the links lead from docs/skill."""
    rows = (pair for _, command in _every_command() for pair in command.json_keys.items())
    return _table(("command", "keys"), ((f"`{line}`", keys) for line, keys in rows))


def _uses() -> str:
    """Return a row for each thing that one may want of a command."""
    return _table(("you want", "command"), (pair for _, command in _every_command() for pair in command.uses.items()))


def _top_commands() -> Iterator[tuple[str, click.Command, click.Context]]:
    context = click.Context(tuner, info_name="tuner", **tuner.context_settings)
    for name in COMMANDS:
        if command := tuner.get_command(context, name):
            yield name, command, context


def _every_command() -> Iterator[tuple[str, Command]]:
    """Yield each command that does something, with its whole name."""
    for name, command, _ in _top_commands():
        inner = command.commands if isinstance(command, click.Group) else {"": command}
        yield from (
            (f"{name} {word}".strip(), command) for word, command in inner.items() if isinstance(command, Command)
        )


def _text(text: str) -> str:
    """Return what a terminal shows as Markdown that shows the same."""
    return re.sub(r"([\\`*_<|\[\]])", r"\\\1", text)


def _keys() -> str:
    defaults, notes = _base()
    sections = []
    for name, key in RecipeConfig.model_fields.items():
        sections += [f"## {name}", ""]
        blocks = blocks_of(key.annotation) if name not in ("architecture", "val_dataloader") else []
        if not blocks or (name,) in defaults:
            sections.append(_key_table([_row((name,), key, defaults, notes)]))
        elif notes[name,]:
            sections += [_text(notes[name,]), ""]
        if len(blocks) > 1:
            types = " or ".join(_type(block.model_fields["type"].annotation) for block in blocks)
            sections.append(
                _key_table([(f"`{name}.type`", types, defaults[name, "type"], "One of the objectives below.")])
            )
        for block in blocks:
            rows = [*_rows((name,), block, defaults, notes)]
            if len(blocks) > 1:
                rows = [row for row in rows if row[0] != f"`{name}.type`"]
                (word,) = get_args(block.model_fields["type"].annotation)
                sections += [f"### {name}: {word}", "", inspect.cleandoc(block.__doc__ or ""), ""]
            sections.append(_key_table(rows) if rows else "")
    return "\n".join(sections)


def _key_table(rows: Iterable[Sequence[str]]) -> str:
    return _table(("key", "type", "default", "what it does"), rows)


def _rows(keys: tuple[str, ...], block: type[Block], defaults: _ByKey, notes: _ByKey) -> Iterator[Sequence[str]]:
    """Yield a row for each key of a block, and of the blocks in it."""
    own = _comments_of(block)
    for name, key in block.model_fields.items():
        inner = [block for block in blocks_of(key.annotation) if block is not Architecture]  # config.json's keys
        if inner and (*keys, name) not in defaults:
            yield from _rows((*keys, name), inner[0], defaults, notes)
        else:
            yield _row((*keys, name), key, defaults, {(*keys, name): own.get(name, "")} | notes)
            if inner:  # None by default
                yield from _rows((*keys, name), inner[0], defaults, notes)


def _row(keys: tuple[str, ...], key: FieldInfo, defaults: _ByKey, notes: _ByKey) -> Sequence[str]:
    default = defaults.get(keys) or ("required" if key.is_required() else f"`{key.default!r}`")
    return (f"`{'.'.join(keys)}`", _type(key.annotation, key.metadata), default, _text(notes.get(keys, "")))


def _type(annotation: Any, marks: Sequence[Any] = ()) -> str:
    """Return a type and its limits as people say them."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        key = FieldInfo.from_annotation(annotation)
        return _type(key.annotation, key.metadata)
    if marks:
        signs = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
        limits = [
            f"{sign} {getattr(mark, word)}" for word, sign in signs.items() for mark in marks if hasattr(mark, word)
        ]
        return f"{_type(annotation)} {', '.join(limits)}".strip()
    if origin is Literal:
        return ", ".join(f"`{value!r}`" for value in inner)
    if origin in (Union, UnionType):
        return " or ".join(
            dict.fromkeys("`None`" if inner_type is NoneType else _type(inner_type) for inner_type in inner)
        )
    if origin in (tuple, list):
        return f"list of {_type(inner[0])}"
    if isinstance(annotation, type) and issubclass(annotation, Block):
        return "dict"
    return _PLAIN[origin or annotation]


def _base() -> tuple[_ByKey, _ByKey]:
    """Return the default of each key in `configs/base.py`, and the comment above it."""
    source = (assets.CONFIGS / "base.py").read_text(encoding="utf-8")
    defaults, notes = {}, {}

    def walk(keys: tuple[str, ...], node: ast.expr, line: int) -> None:
        notes[keys] = _comment_above(source, line)
        if isinstance(node, ast.Call):
            for word in node.keywords:
                walk((*keys, str(word.arg)), word.value, word.lineno)
        else:
            defaults[keys] = f"`{ast.unparse(node)}`"

    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            walk((statement.targets[0].id,), statement.value, statement.lineno)
    return defaults, notes


def _comments_of(block: type[Block]) -> dict[str, str]:
    """Return the comment above each key of a block, where the block itself stands."""
    inherited: dict[str, str] = {}
    for base in reversed(block.__bases__):
        inherited |= _comments_of(base) if issubclass(base, Block) and base is not Block else {}
    source = inspect.getsource(block)
    (tree,) = ast.parse(source).body
    keys = (node for node in getattr(tree, "body", ()) if isinstance(node, ast.AnnAssign))
    own = {node.target.id: _comment_above(source, node.lineno) for node in keys if isinstance(node.target, ast.Name)}
    return {**inherited, **{name: comment for name, comment in own.items() if comment}}


def _comment_above(source: str, line: int) -> str:
    above = source.splitlines()[: line - 1]
    comment = reversed([*takewhile(lambda text: text.lstrip().startswith("#"), reversed(above))])
    return " ".join(text.strip().removeprefix("#").strip() for text in comment)


def _error_sections() -> str:
    """Return a section for each error code."""
    return "".join(
        f"\n## {error.code}\n\n{error.means} Exit code {error.exit_code}.\n\n**Cause.** {error.cause}\n\n"
        f"```text\n{error.shown}\n```\n\n**Fix.** {error.fix}\n"
        for error in explain.explanations().values()
    )


def _exit_codes() -> str:
    """Return what each exit code means, with the errors that have it; those of signals are one row."""
    of_code: dict[int, list[str]] = defaultdict(list)
    for code, explanation in explain.explanations().items():
        of_code[min(explanation.exit_code, _SIGNAL)].append(f"[`{code}`](errors.md#{code})")
    means: dict[int, list[str]] = defaultdict(list)
    for error in _errors(TunerError):
        means[error.exit_code].append(inspect.cleandoc(error.__doc__ or "").splitlines()[0])
    told = {0: "Done.", **{code: " ".join(dict.fromkeys(lines)) for code, lines in sorted(means.items())}}
    rows = [(f"`{code}`", what, ", ".join(of_code[code])) for code, what in told.items()]
    killed = "Signal n killed a process: 137 is SIGKILL, 143 is SIGTERM."
    rows.append((f"`{_SIGNAL}` + n", killed, ", ".join(of_code[_SIGNAL])))
    return _table(("code", "what happened", "errors"), rows)


def _errors(error: type[TunerError]) -> Iterator[type[TunerError]]:
    yield error
    for kind in error.__subclasses__():
        if kind.__module__ == TunerError.__module__:
            yield from _errors(kind)


# The catalog


def _models() -> str:
    rows = []
    for name in catalog.names("models"):
        count = parts.parameters(name)
        path = parts.values("models", name)["model"]["path"]
        rows.append((f"`{name}`", path, f"{count:,}" if count else "", _summary("models", name)))
    return _table(("model", "path", "parameters", ""), rows)


def _families() -> str:
    rows = (
        (
            f"`{kind}`",
            f"`{part}`" if part else "a folder of yours",
            ", ".join(METHODS),
            "packed" if kind in KEEPS_APART else "padded",
            " ".join(KERNELS[name] for name in KERNELS_OF.get(kind, ())),
        )
        for kind, part in examples().items()
    )
    return _table(("model_type", "such as", "trained", "rows", "faster on GPUs with"), rows)


def _presets() -> str:
    each = sorted(map(presets.find, presets.names()), key=lambda preset: not preset.stage)
    if missing := [preset.name for preset in each if preset.name not in presets.WHEN]:
        raise ValueError(f"tuner/zero/presets.py: WHEN has no line for {', '.join(missing)}")
    rows = [(f"`{preset.name}`", f"`{_model_states(preset)}`", presets.WHEN[preset.name]) for preset in each]
    return _table(("preset", "bytes per GPU", "use it if"), rows)


def _model_states(preset: presets.Preset) -> str:
    """Return the bytes of model states for x trained parameters on N GPUs, as a plan counts them."""
    recipe, level = load("tiny_full_sample_e1").config, Costs.of_config(preset.config)
    one_gpu, many_gpus = (
        round(sum(model_states(recipe, Parameters(10**6), level, gpus, 2).values()) / 10**6) for gpus in (1, 10**9)
    )
    whole, shared = many_gpus and f"{many_gpus}x", one_gpu - many_gpus and f"{one_gpu - many_gpus}x/N"
    return " + ".join(filter(None, (whole, shared))) or "near 0"


def _preset_values() -> str:
    """Return a row for each value of the presets: which of them have it, and the reason.

    Raises:
        ValueError: a value has no reason, or a reason no value.
    """
    shipped = [preset for preset in map(presets.find, presets.names()) if preset.stage]
    where: dict[tuple[str, str], list[str]] = defaultdict(list)
    for preset in shipped:
        for key, value in leaves(preset.config):
            where[key, json.dumps(value)].append(catalog.short_name(preset.name))
    reasons = {
        (key, value): reason
        for key, of_key in tomllib.loads(REASONS.read_text(encoding="utf-8")).items()
        for value, reason in of_key.items()
    }
    if missing := [pair for pair in where if pair not in reasons]:
        lines = (f'["{key}"]\n{_toml_key(value)} = "WHY"' for key, value in missing)
        raise ValueError("\n".join((f"{REASONS.name} has no reason for some values of presets. Write:", *lines)))
    if left := [f"{key} = {value}" for key, value in reasons if (key, value) not in where]:
        raise ValueError(f"{REASONS.name} has reasons for values that no preset has. Remove: {', '.join(left)}")
    rows = (
        (f"`{key}`", f"`{value}`", "all" if len(named) == len(shipped) else ", ".join(named), reasons[key, value])
        for key, value in reasons
        for named in [where[key, value]]
    )
    return _table(("Key", "Value", "Where", "Why"), rows)


def _toml_key(value: str) -> str:
    return value if re.fullmatch("[a-z0-9]+", value) else f"'{value}'"


def _run_directory() -> str:
    return _table(("file", "content"), ((f"`{file.name}`", file.content) for file in RunDirectory.files()))


def _file_keys(file: type[Versioned]) -> str:
    """Return a row for each key of a file of a run, as its docstring has it.

    Raises:
        KeyError: the docstring leaves a key out.
    """
    meanings = _arguments(file)
    names = [name for name in file.model_fields if name not in Versioned.model_fields]
    rows = ((f"`{name}`", meanings[name], _code(_inner_keys(file.model_fields[name]))) for name in names)
    return _table(("key", "meaning", "values, or keys in it"), rows)


def _arguments(documented: type) -> dict[str, str]:
    """Return what the section Args of a docstring says of each name, in a line."""
    section = inspect.cleandoc(documented.__doc__ or "").partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8,}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def _inner_keys(key: FieldInfo) -> list[str]:
    """Return the keys of the object, or of each object in the list, that a key holds; of a choice its values."""
    types, names = [key.annotation], list[str]()
    while types:
        part = types.pop(0)
        if get_origin(part) is Literal:
            names += get_args(part)
        elif isinstance(part, type) and issubclass(part, StrEnum):
            names += list(part)
        elif isinstance(part, type) and issubclass(part, Keys):
            names += part.model_fields
        elif isinstance(part, type) and is_dataclass(part):
            names += TypeAdapter(part).json_schema(mode="serialization")["properties"]
        else:
            types += get_args(part)
    return names


def _optimizers() -> str:
    on_cpu = {"always": "runs", "offloaded": "runs if the optimizer is offloaded", "never": "refused"}
    rows = (
        (
            *(f"`{name}`", facts.library, facts.state_bytes, on_cpu[facts.on_cpu]),
            *("L2" if facts.decays_gradient else "decoupled", "yes" if facts.is_redistributed else "no"),
        )
        for name, facts in OPTIMIZERS.items()
    )
    states = ("bytes of states a weight", "without a GPU", "weight decay", "resumes on other ranks")
    return _table(("`type`", "made by", *states), rows)


def _summary(kind: str, name: str) -> str:
    return catalog.summary(catalog.part_file(kind, name))


def _methods() -> str:
    rows = ((f"`{name}`", _summary("methods", name)) for name in catalog.names("methods"))
    return _table(("method", ""), rows)


def _objectives() -> str:
    rows = (
        (
            *(f"`{name}`", _summary("objectives", name), _generates(name), _reference_model(name), _chunks(name)),
            *(_condition(name, "depends_on_micro_batch"), _condition(name, "depends_on_ranks")),
            _code(_formats_for(name)),
        )
        for name in catalog.names("objectives")
    )
    header = (
        *("objective", "", "generates", "reference model", "loss in chunks"),
        *("loss depends on the micro-batch", "loss depends on the number of ranks", "row formats"),
    )
    return _table(header, rows)


def _generates(objective: str) -> str:
    """Return whether the model writes completions while it trains, and whether they can call tools."""
    block = OBJECTIVES[objective]
    return ("yes, and calls tools" if issubclass(block, Tools) else "yes") if block.facts.generates else ""


def _reference_model(objective: str) -> str:
    """Return whether the model is compared with a frozen copy, by default or with other settings."""
    if not OBJECTIVES[objective].facts.has_reference:
        return ""
    recipe = load(f"tiny_{catalog.training_name(objective, 'full')}_custom_e1")
    return "yes" if recipe.config.objective.loads_reference else "can have one"


def _chunks(objective: str) -> str:
    """Return how often a loss in chunks computes each logit; nothing if the objective has none."""
    facts = OBJECTIVES[objective].facts
    often = "once" if facts.computes_logits_once else "twice"
    return f"each logit {often}" if facts.can_chunk_logits else ""


def _condition(objective: str, name: str) -> str:
    """Return when a property of an objective is true, in the words of its docstring; nothing if it never is."""
    own = getattr(OBJECTIVES[objective], name)
    return "" if own is getattr(Objective, name) else inspect.cleandoc(own.__doc__)


def _rates() -> str:
    """Return the default rates of the objectives that do not imitate text; those with the same share a row."""
    of_rates: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, block in OBJECTIVES.items():
        if block.facts.packs:  # SFT and pre-training: the page has more to say about their rates
            continue
        recipes = (load(f"tiny_{catalog.training_name(name, method)}_custom_e1") for method in ("lora", "full"))
        adapter, full = (f"{recipe.config.optim_wrapper.optimizer.lr:.0e}".replace("e-0", "e-") for recipe in recipes)
        of_rates[adapter, full].append(block.facts.title)
    rows = ((", ".join(titles), *rates) for rates, titles in of_rates.items())
    return _table(("objective", "with an adapter", "for all weights"), rows)


def _logit_copies() -> str:
    """Return the objectives whose logits TRL keeps, with the bytes of a logit in 16 bits."""
    kept = [name for name, block in OBJECTIVES.items() if block.facts.keeps_logits]
    copies = {name: load(f"tiny_{catalog.training_name(name, 'full')}_custom_e1").config.objective for name in kept}
    return _table(
        ("objective", "bytes per logit"),
        ((f"`{name}`", f"{2 * block.logit_copies:g}") for name, block in copies.items()),
    )


def _formats_for(objective: str) -> list[str]:
    return [name for name, known in FORMATS.items() if known.kind in kinds_of(objective)]


def _datasets() -> str:
    rows = []
    for name in catalog.names("datasets"):
        blocks = [*parts.data_sets(name)]
        paths = dict.fromkeys(block["path"] for block in blocks if block.get("path"))
        formats = dict.fromkeys(block["format"] for block in blocks if block.get("format"))
        learners = parts.learners(name) if formats else ()
        what = (", ".join(paths), _code(formats), ", ".join(learners), _summary("datasets", name))
        rows.append((f"`{name}`", *what))
    return _table(("data set", "path", "format", "for", ""), rows)


def _recipes() -> str:
    rows = (
        (f"`{name}`", f"`{parts.values('recipes', name)['_base_']}`", _summary("recipes", name))
        for name in catalog.names("recipes")
    )
    return _table(("recipe", "builds on", ""), rows)


def _formats() -> str:
    rows = [
        (f"`{name}`", known.needs, ", ".join(word for word in OBJECTIVES if known.kind in kinds_of(word)))
        for name, known in FORMATS.items()
    ]
    return _table(("format", "a row has", "for"), rows)


def _spellings() -> str:
    rows = ((_code(word.written.split(", ")), word.says) for word in SPELLINGS)
    return _table(("in the name", "what it means"), rows)


def _chat_templates() -> str:
    return _code(sorted(file.stem for file in (assets.CONFIGS / "chat_templates").glob("*.jinja"))) + "\n"


# What a card can train


@cache
def _trainable() -> dict[str, trainable.Table]:
    """Return what one of each card trains; several pages show it."""
    return {card: trainable.table(MachineFlags(gpus=1, gpu=card), {}) for card in _CARDS}


def _cards() -> str:
    return "\n".join(_card(card, table) for card, table in _trainable().items())


def _card(card: str, table: trainable.Table) -> str:
    rows = [
        (f"`{row.name}`", f"{row.parameters / 1e9:.1f}", *(cell_text(*pair) for pair in row.cells.values()))
        for row in table.rows
        if row.fits
    ]
    absent = _code(row.name for row in table.rows if not row.fits)
    host = sized(table.machines.hardware.host_memory_bytes)
    head = f"## {card}\n\nOne GPU, and {host} of host memory.\n\n"
    nothing = f"\nNothing fits of {absent}.\n" if absent else ""
    return head + _table(("model", "billion parameters", *table.methods), rows) + nothing


def _largest(gpu: str, heading: str) -> str:
    methods = [method.replace("lora", "LoRA").replace("q", "Q") for method in trainable.METHODS]
    rows = (
        (f"{heading} `{card}`", *(_largest_of(table, method) for method in table.methods))
        for card, table in _trainable().items()
    )
    return _table((gpu, *methods), rows)


def _largest_of(table: trainable.Table, method: str) -> str:
    names = []
    for place in (0, 1):
        fitting = [row for row in table.rows if row.cells[method][place].tokens >= _SHORT_ROW]
        names.append(f"`{max(fitting, key=lambda row: row.parameters).name}`" if fitting else "-")
    return " / ".join(dict.fromkeys(names))


# The glossary: other tools' words


def _words() -> str:
    """Return a row for each key, option or piece of advice, with the words of other tools that lead to it."""
    _, notes = _base()
    flags = {key: flag for flag, key in KEY_FLAGS.items()}
    rows = []
    for answer, words in sorted(_by_answer((word, it.flag or it.key) for word, it in aliases.table().items())):
        option = f", option `{flags[answer]}`" if answer in flags else ""
        rows.append((words, f"`{answer}`{option}", _text(notes.get(tuple(answer.split(".")), ""))))
    return _table(("word", "in tuner", "what it does"), rows)


def _by_answer(pairs: Iterable[tuple[str, str | None]]) -> Iterator[tuple[str, str]]:
    """Yield each answer with all words that have it; words without an answer are left out."""
    found: dict[str, list[str]] = defaultdict(list)
    for word, answer in pairs:
        if answer:
            found[answer].append(word)
    yield from ((answer, _code(sorted(words))) for answer, words in found.items())


def _other_words() -> str:
    without_key = ((word, it.instead) for word, it in aliases.table().items() if not it.key and not it.flag)
    pairs = (*without_key, *other_tools.options("train").items())
    return _table(("word", "what to do"), sorted((words, _text(instead)) for instead, words in _by_answer(pairs)))


def _tool_commands() -> str:
    pairs = other_tools.commands().items()
    return _table(("command", "instead"), sorted((words, _text(ours)) for ours, words in _by_answer(pairs)))


GENERATED: dict[str, Table] = {
    "commands": Table(_commands, "tuner/cli/"),
    "json keys": Table(_json_keys, "tuner/cli/"),
    "uses of commands": Table(_uses, "tuner/cli/"),
    "keys": Table(_keys, "tuner/recipes/schema.py and tuner/configs/base.py"),
    "exit codes": Table(_exit_codes, "tuner/errors.py and tuner/cli/explanations.toml"),
    "errors": Table(_error_sections, "tuner/cli/explanations.toml"),
    "models": Table(_models, "tuner/configs/models/"),
    "families": Table(_families, "tests/worker/families.py"),
    "chat templates": Table(_chat_templates, "tuner/configs/chat_templates/"),
    "presets": Table(_presets, "tuner/zero/presets.py"),
    "preset values": Table(_preset_values, "tuner/deepspeed_presets/ and docs/preset-reasons.toml"),
    "run directory": Table(_run_directory, "tuner/runs/directory.py"),
    "keys of run.json": Table(lambda: _file_keys(RunRecord), "tuner/runs/records.py"),
    "keys of status.json": Table(lambda: _file_keys(RunStatus), "tuner/runs/records.py"),
    "optimizers": Table(_optimizers, "tuner/optimizers.py"),
    "methods": Table(_methods, "tuner/configs/methods/"),
    "objectives": Table(_objectives, "tuner/configs/objectives/ and tuner/recipes/schema/objectives/"),
    "rates": Table(_rates, "tuner/configs/objectives/"),
    "logit copies": Table(_logit_copies, "tuner/recipes/schema/objectives/"),
    "datasets": Table(_datasets, "tuner/configs/datasets/"),
    "recipes": Table(_recipes, "tuner/configs/recipes/"),
    "cards": Table(_cards, "tuner/launch/trainable.py"),
    "largest models": Table(lambda: _largest("GPU", "one"), "tuner/launch/trainable.py"),
    "largest models in chinese": Table(lambda: _largest("显卡", "一块"), "tuner/launch/trainable.py"),
    "formats": Table(_formats, "tuner/data/formats/known.py"),
    "spellings": Table(_spellings, "tuner/importers/xtuner_names.py"),
    "words": Table(_words, "tuner/importers/aliases.toml"),
    "words without a key": Table(_other_words, "tuner/importers/aliases.toml and tuner/cli/other_tools.toml"),
    "tool commands": Table(_tool_commands, "tuner/cli/other_tools.toml"),
}
"""Name -> what makes the text; a new one is a line here and its mark in a page."""


if __name__ == "__main__":
    main()

"""The names of parts, those that ship with the package and the user's own, and how a recipe's name is composed of them.

    {model}_[{objective}_]{method}_{dataset}_e{epochs}

It reads names and first lines only; which folders hold parts says `catalog_folders`, what a part holds is read by
`part`, how XTuner spells a name by `xtuner_names`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tuner import assets
from tuner.assets import CONFIGS, TEMPLATES
from tuner.errors import RecipeError, did_you_mean, nearest
from tuner.recipes import catalog_folders, xtuner_names
from tuner.recipes.catalog_folders import PRESETS, PartFile

BASE = CONFIGS / "base.py"
XTUNER_DEFAULTS = CONFIGS / "xtuner.py"
XTUNER = CONFIGS / "xtuner_recipes.txt"
KINDS = ("models", "methods", "objectives", "datasets", "recipes")
DEFAULT_OBJECTIVE = "sft"
"""The objective of a recipe name that names none."""
DEFAULT_METHOD = "lora"
"""Of a model that is trained without a recipe."""

_MAX_BYTES = 1_000_000
_MAX_WORDS = 12
"""Of a part's name; none has more."""
_EPOCHS = re.compile(r"(?P<stem>.+)_e(?P<epochs>[1-9][0-9]{0,3})")


class Parts(NamedTuple):
    """A composed name, taken apart; epochs is a count."""

    model: str
    objective: str
    method: str
    dataset: str
    epochs: int

    @property
    def name(self) -> str:
        objective = "" if self.objective == DEFAULT_OBJECTIVE else f"{self.objective}_"
        return f"{self.model}_{objective}{self.method}_{self.dataset}_e{self.epochs}"

    def kinds(self) -> Iterator[tuple[str, str]]:
        """Yield the kind and the name of each part in the order of merging, later wins.

        The objective comes after the method: a preference model bears one small learning rate, adapter or not.
        """
        yield "models", self.model
        yield "methods", self.method
        yield "objectives", self.objective
        yield "datasets", self.dataset


class Reading(NamedTuple):
    """What a name means: a recipe of the catalog or parts; `epochs` only where they are to be set over it.

    `words` are XTuner's, outermost first: the first is laid last.
    """

    base: str | Parts
    epochs: int | None
    words: tuple[xtuner_names.Word, ...]


def names(kind: str) -> tuple[str, ...]:
    """Return the sorted names of one of `KINDS`, or of another folder of a catalog."""
    return tuple(catalog_folders.files(kind))


def presets() -> tuple[str, ...]:
    """Return the names of the DeepSpeed presets."""
    return names(PRESETS)


def is_of_xtuner(name: str) -> bool:
    """Say whether XTuner has a recipe of this very name, whose numbers are kept."""
    return name in XTUNER.read_text(encoding="utf-8").split()


def part_file(kind: str, name: str) -> PartFile:
    """Return the file of a part, and whose it is.

    Raises:
        RecipeError: there is no such part.
    """
    known = catalog_folders.files(kind)
    if name not in known:
        fix = did_you_mean(name, known, see=f"tuner list --{kind}" if kind in KINDS else None)
        raise RecipeError(f"there is no {name!r} among the {kind}", fix=fix)
    return known[name]


def part_path(kind: str, name: str) -> Path:
    """Return the file of a part that `names` lists."""
    return part_file(kind, name).path


def shadowing(kind: str, name: str) -> str | None:
    """Return the line that says which other parts of its name a part stands before, or None where there is none."""
    file = catalog_folders.files(kind).get(name)
    if file is None or not file.shadowed:
        return None
    others = " and ".join(folder.origin for folder in file.shadowed)
    return f"{file.shown} shadows the {kind[:-1].replace('_', ' ')} {name!r} of {others}."


def text_of(kind: str, name: str) -> str:
    """Return the text of a part; nothing where it is one of the user's that cannot be read."""
    return _text(part_file(kind, name))


def _text(file: PartFile) -> str:
    if file.is_ours:
        return file.path.read_text(encoding="utf-8")
    try:
        from tuner.files import read_named_text  # 10 ms for hashlib, which a list of names does without

        return read_named_text(file.path, RecipeError, max_bytes=_MAX_BYTES, fix="", name=file.shown)
    except RecipeError:
        return ""  # whoever needs what it holds reads it, and is told what is wrong


def part_named(hub_id: str) -> str | None:
    """Return the model part whose path is this, the user's own before the package's, or None."""
    needle = re.compile(rf"""path["']?\s*[=:]\s*["']{re.escape(hub_id)}["']""")
    mine_first = sorted(catalog_folders.files("models").items(), key=lambda item: item[1].is_ours)
    return next((name for name, _ in mine_first if needle.search(text_of("models", name))), None)


def summary(kind: str, name: str) -> str:
    """Return the first line of a part's docstring; nothing of one that has none or is no Python."""
    return summary_of(part_file(kind, name))


def summary_of(file: PartFile) -> str:
    """Return the summary of a part whose file is known: `tuner list` asks for 600."""
    if not file.is_ours:
        return _first_line(_text(file))
    # Ours all begin with it.
    with open(file.full, encoding="utf-8") as stream:  # noqa: PTH123
        return stream.readline().strip().strip('"').strip()


def _first_line(text: str) -> str:
    import ast  # 7 ms, for the user's own parts alone

    try:
        return next(iter((ast.get_docstring(ast.parse(text)) or "").splitlines()), "")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return ""


def chat_template(name: str) -> str:
    """Return the chat template that `name` means, also one of the user's catalog; see `assets.chat_template`.

    Raises:
        RecipeError: no such template, or its file is not UTF-8.
    """
    return assets.chat_template(name, {known: file.path for known, file in catalog_folders.files(TEMPLATES).items()})


def with_epochs(name: str) -> tuple[str, int | None]:
    """Split `x_e3` into ('x', 3); a name without epochs keeps None."""
    match = _EPOCHS.fullmatch(name)
    return (match["stem"], int(match["epochs"])) if match else (name, None)


def read(name: str, hidden: str | None = None) -> Reading:
    """Return what a name means: as it is written, or else with the fewest of XTuner's words taken out of it.

    Args:
        name: A composed name, a recipe of the catalog with or without `_eN`, or one of XTuner's.
        hidden: A recipe that the name does not mean, because it builds on it.

    Raises:
        RecipeError: no recipe has this name; the message holds the nearest one.
    """
    for text, words in xtuner_names.translations(name):
        stem, epochs = with_epochs(text)
        for recipe, over in ((text, None), (stem, epochs)):
            if recipe in names("recipes") and recipe != hidden:
                return Reading(recipe, over, words)
        if parts := _composed(stem, epochs):
            return Reading(parts, epochs, words)
    raise _unknown(name)


def parse(name: str) -> Parts:
    """Take a composed name apart. The default objective is not written, so no name has two readings.

    Raises:
        RecipeError: the name is not composed of known parts; the message holds the nearest one that is.
    """
    parts = _composed(*with_epochs(name))
    if parts is None:
        raise _unknown(name)
    return parts


def _composed(stem: str, epochs: int | None) -> Parts | None:
    """Return the parts that a name is composed of, or None.

    Raises:
        RecipeError: it can be read in two ways, as the user's own parts may be named.
    """
    readings = [*_readings(stem, epochs)] if epochs else []
    if len(readings) > 1:
        ways = " or ".join(f"{one.model} + {one.objective} {one.method} + {one.dataset}" for one in readings)
        fix = "Rename a part of your own catalog."
        raise RecipeError(f"the name '{stem}_e{epochs}' can be read as {ways}", where="the recipe's name", fix=fix)
    return readings[0] if readings else None


def _readings(stem: str, epochs: int) -> Iterator[Parts]:
    for model in names("models"):
        rest = stem.removeprefix(f"{model}_")
        if rest != stem:
            yield from _after_model(model, rest, epochs)


def _after_model(model: str, rest: str, epochs: int) -> Iterator[Parts]:
    known = names("datasets")
    for training, (objective, method) in trainings().items():
        dataset = rest.removeprefix(f"{training}_")
        if dataset != rest and dataset in known:
            yield Parts(model, objective, method, dataset, epochs)


def trainings() -> dict[str, tuple[str, str]]:
    """Return how a name says each objective and method, such as 'lora' and 'dpo_lora', with the two."""
    others = [name for name in names("objectives") if name != DEFAULT_OBJECTIVE]
    plain = {method: (DEFAULT_OBJECTIVE, method) for method in names("methods")}
    return plain | {f"{objective}_{method}": (objective, method) for objective in others for method in plain}


def training(name: str) -> tuple[str, str]:
    """Return the objective and the method that `--method` names: a method, alone or after its objective.

    Raises:
        RecipeError: there is none of this name.
    """
    known = trainings()
    if name not in known:
        fix = did_you_mean(name, known) or f"Known: {', '.join(names('methods'))}; each also as dpo_lora."
        raise RecipeError(f"no method {name!r}", where="--method", fix=fix)
    return known[name]


def _unknown(name: str) -> RecipeError:
    if {name, f"deepspeed_{name}"} & {*presets()}:
        return RecipeError(
            f"{name!r} is a DeepSpeed preset, not a recipe",
            where="the recipe's name",
            fix=f"Use: tuner train RECIPE --deepspeed {name}.",
        )
    if reason := xtuner_names.refusal(name):
        return RecipeError(f"{name!r} {reason}", fix="See: tuner list")
    suggestion = _suggest_spelled(name)
    hint = f"Did you mean {suggestion!r}? " if suggestion else ""
    return RecipeError(f"no recipe {name!r}", fix=f"{hint}See: tuner list")


def _suggest_spelled(name: str) -> str | None:
    """Return what `suggest` finds once the epochs and XTuner's words at the name's end are off; they are put back."""
    stems = [with_epochs(text)[0] for text, _ in xtuner_names.translations(name)]
    stem = [stem for stem in stems if name.startswith(stem)][-1]
    nearest_name = suggest(stem)
    return f"{with_epochs(nearest_name)[0]}{name.removeprefix(stem)}" if nearest_name and stem != name else nearest_name


def suggest(name: str) -> str | None:
    """Return the recipe name that `name` most likely means, mending one part after the other."""
    import difflib

    spelled = re.sub(r"_e0+(?=[1-9])", "_e", re.sub(r"[-. ]", "_", name.strip().lower()))
    stem, epochs = with_epochs(re.sub(r"_e_*0*$|_e_\d+$", "", spelled))
    tokens = stem.split("_")
    model, tokens = _take(tokens, names("models"))
    tokens = tokens[1:] if tokens[:1] == [DEFAULT_OBJECTIVE] else tokens
    training, tokens = _take(tokens, trainings())
    dataset = nearest("_".join(tokens), names("datasets")) if tokens else None
    if model and training and dataset:
        return f"{model}_{training}_{dataset}_e{epochs or 3}"
    if model and training and _is_whole(f"{model}_{training}"):
        return f"{model}_{training}"
    # Most are a model's exceptions, whose names look alike: only a near one is what was meant.
    return next(iter(difflib.get_close_matches(stem, names("recipes"), n=1, cutoff=0.9)), None)


def _is_whole(name: str) -> bool:
    """Return whether XTuner's words fill in what a name lacks."""
    return any(_composed(*with_epochs(text)) for text, _ in xtuner_names.translations(name))


def _take(tokens: list[str], known: Iterable[str]) -> tuple[str | None, list[str]]:
    """Return the known name that the first tokens are most like, the longer of two alike, and the tokens after it."""
    import difflib

    known, best = tuple(known), (0.0, "", 0)
    for count in range(1, min(len(tokens), _MAX_WORDS) + 1):
        head = "_".join(tokens[:count])
        for name in difflib.get_close_matches(head, known, n=1):
            likeness = difflib.SequenceMatcher(None, name, head).ratio() + 0.001 * (name.count("_") + 1)
            best = max(best, (likeness, name, count))
    return best[1] or None, tokens[best[2] :]

"""The names of the parts that ship with the package, and how a recipe's name is composed of them.

    {model}_[{objective}_]{method}_{dataset}_e{epochs}

It reads names and first lines only; what a part holds is read by `recipe`, how XTuner spells a name by `xtuner_names`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tuner.errors import RecipeError, did_you_mean, nearest
from tuner.recipes import xtuner_names

PACKAGE = Path(__file__).parents[1]
CONFIGS = PACKAGE / "configs"
PRESETS = PACKAGE / "deepspeed_presets"
BASE = CONFIGS / "base.py"
SPLIT = CONFIGS / "split.py"
XTUNER = CONFIGS / "xtuner_recipes.txt"
KINDS = ("models", "methods", "objectives", "datasets", "recipes")
DEFAULT_OBJECTIVE = "sft"
DEFAULT_METHOD = "lora"
"""Of a model that is trained without a recipe."""
ASSET = "package:"
"""Prefix of a path below configs/assets, such as 'package:sample/train.jsonl'."""

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


@cache
def names(kind: str) -> tuple[str, ...]:
    """Return the sorted names of one of `KINDS`."""
    files = os.listdir(CONFIGS / kind)  # noqa: PTH208 (every command asks for 600 names, and for no Path)
    return tuple(sorted(file.removesuffix(".py") for file in files if file.endswith(".py")))


@cache
def presets() -> tuple[str, ...]:
    """Return the names of the DeepSpeed presets."""
    return tuple(sorted(path.stem for path in PRESETS.iterdir() if path.suffix == ".json"))


def is_of_xtuner(name: str) -> bool:
    """Say whether XTuner has a recipe of this very name, whose numbers are kept."""
    return name in XTUNER.read_text(encoding="utf-8").split()


def part_path(kind: str, name: str) -> Path:
    """Return the file of a part that `names` lists."""
    return CONFIGS / kind / f"{name}.py"


def part_named(hub_id: str) -> str | None:
    """Return the model part whose path is this, or None."""
    needle = re.compile(rf"""path=["']{re.escape(hub_id)}["']""")
    parts = (name for name in names("models") if needle.search(part_path("models", name).read_text(encoding="utf-8")))
    return next(parts, None)


def summary(kind: str, name: str) -> str:
    """Return the first line of a part's docstring."""
    # `tuner list` asks for 600: with a Path for each it took half as long again.
    with open(f"{CONFIGS}/{kind}/{name}.py", encoding="utf-8") as stream:  # noqa: PTH123
        return stream.readline().strip().strip('"').strip()


def asset(path: str) -> str:
    """Return the file that a `package:` path means; any other path as it is.

    Raises:
        RecipeError: the package ships no such file.
    """
    if not path.startswith(ASSET):
        return path
    inside = path.removeprefix(ASSET)
    file = CONFIGS / "assets" / inside
    if ".." in file.parts or Path(inside).is_absolute() or not os.path.exists(file):  # noqa: PTH110 (no error for a long name)
        raise RecipeError(f"{path!r} is not shipped with the package", where=CONFIGS / "assets")
    return str(file)


def chat_template(name: str) -> Path:
    """Return the file of a named chat template, or the path itself where `name` ends in .jinja.

    Raises:
        RecipeError: no such template.
    """
    folder = CONFIGS / "chat_templates"
    path = Path(name) if name.endswith(".jinja") else folder / f"{name}.jinja"
    if not os.path.isfile(path):  # noqa: PTH113 (no error for a long name)
        known = sorted(file.stem for file in folder.glob("*.jinja"))
        raise RecipeError(
            f"no chat template {name!r}",
            where="model.chat_template",
            fix=f"{did_you_mean(name, known)} Known: {', '.join(known)}, or a path to a .jinja file.".strip(),
        )
    return path


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
    return next(_readings(stem, epochs), None) if epochs else None


def _readings(stem: str, epochs: int) -> Iterator[Parts]:
    for model in names("models"):
        rest = stem.removeprefix(f"{model}_")
        if rest != stem:
            yield from _after_model(model, rest, epochs)


def _after_model(model: str, rest: str, epochs: int) -> Iterator[Parts]:
    for training, (objective, method) in trainings().items():
        dataset = rest.removeprefix(f"{training}_")
        if dataset != rest and dataset in names("datasets"):
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
    if {name, f"deepspeed_{name}"} & {*presets()} or name.endswith(".json"):
        return RecipeError(
            f"{name!r} is a DeepSpeed preset, not a recipe",
            where="the recipe's name",
            fix=f"Write: tuner train RECIPE --deepspeed {name}.",
        )
    for kind in ("models", "methods", "objectives", "datasets"):
        if name in names(kind):
            what = f"{name!r} is only a part of a recipe's name ({kind})"
            return RecipeError(what, fix="Compose {model}_{method}_{dataset}_e{epochs}. See: tuner list")
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
    known, best = tuple(known), (0.0, "", 0)
    for count in range(1, min(len(tokens), _MAX_WORDS) + 1):
        head = "_".join(tokens[:count])
        for name in difflib.get_close_matches(head, known, n=1):
            likeness = difflib.SequenceMatcher(None, name, head).ratio() + 0.001 * (name.count("_") + 1)
            best = max(best, (likeness, name, count))
    return best[1] or None, tokens[best[2] :]

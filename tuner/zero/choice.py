"""Which DeepSpeed config was chosen: a preset, a user's file, a dict in the recipe, or none; opened as a document.

Values of `--ds` are laid over it here. `lint` checks the keys.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tuner.errors import DeepSpeedConfigError, Option, RecipeError, did_you_mean
from tuner.files import load_json
from tuner.machine.topology import LaunchFlags
from tuner.paths import is_file
from tuner.recipes import catalog, yaml_text
from tuner.recipes.catalog import PRESETS
from tuner.recipes.document_file import KEYS_OF_ACCELERATE
from tuner.recipes.merging import Kind, Layer, Merged, Origin, Place, leaves, lookup, nested
from tuner.recipes.names import Name, NameKind, identify
from tuner.recipes.recipe import Recipe
from tuner.recipes.recipe_file import YAML, read_value
from tuner.recipes.schema.tensor_parallel import SPLIT_BY
from tuner.zero import presets, yaml_configs
from tuner.zero.config import AUTO, AUTOTP, BASE, NONE, OFFLOADS, ZERO, Config, Document, Keys, stage_0, swaps_nowhere
from tuner.zero.config_schema import Field, kinds, known_keys, schema, spellings
from tuner.zero.contradictions import OBSOLETE
from tuner.zero.jsonfile import read_json_config
from tuner.zero.yaml_configs import DTYPE, AccelerateConfig

_NO_CONFIG = {
    NameKind.RUN: "Use {}/deepspeed.json.",
    NameKind.RECIPE: "Use: tuner train {} --deepspeed PRESET.",
    NameKind.RECIPE_FILE: "Use: tuner train {} --deepspeed PRESET.",
} | dict.fromkeys(
    (NameKind.MODEL, NameKind.CHECKPOINT, NameKind.FOLDER, NameKind.DATA), "Use a preset, or a JSON or YAML file."
)
"""What cannot be a DeepSpeed config, and the fix. A JSON is read all the same: its wrong keys are named then."""


def is_auto(recipe: Recipe, flag: str | None) -> bool:
    """Return whether the plan chooses the level."""
    return _chosen(recipe, flag)[0] == AUTO


def _chosen(recipe: Recipe, flag: str | None) -> tuple[str | Config, str]:
    """Return the choice, of `--deepspeed` or else of the recipe, and its place: the flag or the key."""
    if flag is not None:
        return flag, Option("deepspeed")
    return recipe.config.deepspeed, f"deepspeed ({next(iter(_places_of(recipe).values()))})"


def _places_of(recipe: Recipe) -> dict[Keys, Place]:
    """Return the place of each key in the recipe's `deepspeed`, by its path in the config."""
    paths: dict[Keys, Place] = {tuple(key.split(".")): origin.place for key, origin in recipe.origins.items()}
    return {path[1:]: place for path, place in paths.items() if path[0] == "deepspeed"}


def is_stage_0(recipe: Recipe, document: Document) -> bool:
    """Return whether DeepSpeed only averages gradients: stage 0 with torch's optimizer, without a config of its own."""
    is_torchs = recipe.config.optim_wrapper.optimizer.facts.of_deepspeed is None
    return is_torchs and not recipe.config.train_cfg.torch_compile and document == stage_0()


def open_named(recipe: Recipe, flag: str | None) -> Document | None:
    """Return the chosen config as `open_chosen` does; None for 'auto': the plan chooses."""
    return None if is_auto(recipe, flag) else open_chosen(recipe, flag)


def open_chosen(recipe: Recipe, flag: str | None) -> Document:
    """Return the chosen config, with the changes of `--ds`. Each value of a config in the recipe has its own line.

    A block that swaps to a disk and names no folder swaps to that of `disk_of`.

    Raises:
        DeepSpeedConfigError: as `open_config`, or a `--ds` that is wrong.
    """
    choice, where = _chosen(recipe, flag)
    document = open_config(choice, where, _places_of(recipe))
    layers = [layer_of_flag(text) for text in recipe.ds]
    document = laid(document, layers) if layers else document
    return with_disk(document, disk_of(recipe), Option("nvme") if recipe.nvme else Option("ds"))


def disk_of(recipe: Recipe) -> str:
    """Return the folder that a run may swap to: that of `--nvme`, or the first that `--ds` names; empty: there is none.

    Raises:
        DeepSpeedConfigError: a `--ds` that is wrong.
    """
    of_flags = document_of_flags(recipe).value
    nvme_paths = (lookup(of_flags, (ZERO, block, "nvme_path")) for block in OFFLOADS)
    return recipe.nvme or next((str(path) for path in nvme_paths if path), "")


def with_disk(document: Document, folder: str, named_by: str) -> Document:
    """Return a config whose blocks that swap to a disk and name no folder swap to this one, if there is one.

    Args:
        named_by: What names the folder.
    """
    blocks = [block for block in OFFLOADS if folder and swaps_nowhere(document.value, block)]
    folders = {ZERO: {block: {"nvme_path": folder} for block in blocks}}
    return laid(document, [Layer.at(Place(Kind.FLAG, named_by), folders)]) if blocks else document


def document_of_flags(recipe: Recipe) -> Document:
    """Return the changes of `--ds` over stage 0: all that is known before the plan chooses the config."""
    return laid(stage_0(), [layer_of_flag(text) for text in recipe.ds])


def with_tensor_parallel(recipe: Recipe, flag: str | None) -> Recipe:
    """Return the recipe with the ranks that split its layers, where the chosen config or `--ds` says so; else as it is.

    Whoever counts ranks, samples or memory asks the recipe. Its own number stays, if it has one.

    Raises:
        DeepSpeedConfigError: as `open_chosen`.
    """
    if recipe.origins[SPLIT_BY].place.kind is not Kind.PACKAGE:
        return recipe
    document = open_named(recipe, flag) or document_of_flags(recipe)
    size = lookup(document.value, AUTOTP)
    if isinstance(size, float) and size.is_integer():
        size = int(size)  # DeepSpeed takes 2.0 for 2
    if not isinstance(size, int) or size <= 1:
        return recipe  # the check of the document refuses what is no number
    return recipe.settled({SPLIT_BY: size}, document.place(AUTOTP))


def launch_flags(recipe: Recipe, flag: str | None) -> LaunchFlags | None:
    """Return where the chosen accelerate config says that a run starts; None for other configs.

    Raises:
        DeepSpeedConfigError: as `open_chosen`.
    """
    document = open_named(recipe, flag)
    return document.launch if document else None


def without_catalog(recipe: Recipe) -> Recipe:
    """Return the recipe with the name of a preset of the user's own catalog replaced by the preset's values.

    Raises:
        DeepSpeedConfigError: as `open_config`.
    """
    value = recipe.config.deepspeed
    base = value.get(BASE) if isinstance(value, dict) else value
    preset = catalog.preset_name(base) if isinstance(base, str) else None
    if preset in (None, NONE) or catalog.part_file(PRESETS, preset).is_ours:
        return recipe
    value = open_config(value, "deepspeed", _places_of(recipe)).recipe_value
    return replace(recipe, config=recipe.config.model_copy(update={"deepspeed": value}))


def open_config(choice: str | Name | Config, where: str, places: Mapping[Keys, Place] | None = None) -> Document:
    """Return the config that `--deepspeed` or the recipe chose.

    Args:
        choice: A preset's name, 'none', or a path to a JSON or YAML, perhaps identified by `names`; or a whole config
            as a dict, or a dict of changes to the config that its `base` names.
        where: The flag or key with the choice, for messages.
        places: Where each leaf of a dict is written.

    Raises:
        DeepSpeedConfigError: no such preset or file, or a file that is not strict JSON with comments, or YAML
            without a DeepSpeed config.
    """
    if isinstance(choice, dict):
        return _of_dict(copy.deepcopy(choice), where, places or {})
    name = identify(choice)
    if name.preset:
        return stage_0() if name.preset == NONE else _of_preset(name.preset)
    if name.kind in _NO_CONFIG and not (name.path and name.path.suffix == ".json"):
        if name.path and name.path.suffix in YAML:
            yaml_text.read_yaml(name.path, error=DeepSpeedConfigError)  # where it cannot be read, that is the mistake
        problem = f"{name.text!r} is {name.kind.value}, not a DeepSpeed config"
        raise DeepSpeedConfigError(problem, where=where, fix=_NO_CONFIG[name.kind].format(name.text))
    if name.path is None:
        raise _unknown_preset(name.text, where)
    return _yaml(name.path) if name.path.suffix in YAML else read_json_config(name.path)


def _of_preset(name: str) -> Document:
    """Return a preset. The preset of a user's own catalog is the user's file, so a run keeps its values."""
    file, shadowing = catalog.part_file(PRESETS, name), catalog.shadowing(PRESETS, name)
    if file.is_ours:
        return Document(copy.deepcopy(presets.find(name).config), f"preset {name}", preset=name)
    notes = (DeepSpeedConfigError(shadowing.rstrip(".")),) if shadowing else ()
    return replace(read_json_config(Path(file.shown)), notes=notes)


def _of_dict(value: Config, where: str, places: Mapping[Keys, Place]) -> Document:
    below = Document({}, where, origins={keys: Origin(place) for keys, place in places.items()})
    if BASE not in value:
        return replace(below, value=value)
    base, at = value.pop(BASE), str(places.get((BASE,), where))
    if not isinstance(base, str) or base == AUTO:
        fix = f"Use a preset, 'none', or a file; {Option('ds')} changes values of 'auto'."
        raise DeepSpeedConfigError(f"base = {base!r} is not a config that can be changed", where=at, fix=fix)
    return replace(laid(open_config(base, at), [Layer(value, below.place)]), name=where, preset=None)


def _yaml(path: Path) -> Document:
    name = str(path)
    fix = "Use a preset, a DeepSpeed JSON, an accelerate config, or a ROLL preset."
    yaml = yaml_text.read_yaml(path, error=DeepSpeedConfigError, fix=fix)
    if yaml.values.keys() & set(KEYS_OF_ACCELERATE):
        return _of_accelerate(AccelerateConfig(yaml, name), path)
    if 2 * len(yaml.values.keys() & {*schema()["keys"]}) > len(yaml.values):  # DeepSpeed's own keys, in YAML
        origins: dict[Keys, Origin] = {keys: Origin(Place(Kind.FILE, name, line)) for keys, line in yaml.lines.items()}
        return Document(yaml.values, name, origins=origins)
    return yaml_configs.read_roll(yaml, path, name)


def _of_accelerate(read_config: AccelerateConfig, path: Path) -> Document:
    # accelerate looks for the file from where it is called; a config is often written to be called beside it.
    base = read_config.base
    if not (catalog.preset_name(base) or is_file(Path(base))):
        base = str(path.parent / base)
    document = open_config(base, str(path))
    if document.preset is None:
        _refuse_contradictions(read_config, document)
    changed = laid(document, read_config.layers)
    return replace(
        changed,
        name=str(path),
        preset=None,
        origins={**changed.origins, (DTYPE,): Origin(read_config.dtype_place)},
        launch=read_config.launch,
        dtype=read_config.dtype,
        notes=read_config.notes,
    )


def _refuse_contradictions(read_config: AccelerateConfig, document: Document) -> None:
    """Refuse keys with other values than the file of `deepspeed_config_file`, as accelerate does."""
    for layer in read_config.layers:
        for key, value in leaves(layer.values):
            keys = tuple(key.split("."))
            if (file_value := lookup(document.value, keys, AUTO)) not in (AUTO, value):
                problem = f"{key} = {value!r} here, and {file_value!r} in {document.where(keys)}"
                raise DeepSpeedConfigError(problem, where=layer.place(keys), fix="Keep one of the two.")


def _unknown_preset(choice: str, where: str) -> DeepSpeedConfigError:
    known = (*catalog.presets(), *map(catalog.short_name, catalog.presets()), AUTO, NONE)
    listed = ", ".join((*catalog.presets(), AUTO, NONE))
    fix = f"{did_you_mean(choice, known)} Known: {listed}, or a path to a JSON or YAML file.".strip()
    return DeepSpeedConfigError(f"no preset {choice!r}", where=where, fix=fix)


# --- Single values over a config: `--ds KEY=VALUE`, and a recipe's `deepspeed = dict(base=...)` ---

FLAG = "--ds"
_WORDS = {"true": True, "false": False, "none": None, "null": None}
_MAX_NAMES = 6


def laid(document: Document, layers: Iterable[Layer]) -> Document:
    """Return the document with layers over its values, each with what it overrides; `changes` has them alone."""
    merged, changes = Merged(), Merged()  # RUN/recipe.py names the preset, and the changes to it
    merged.lay(Layer(copy.deepcopy(document.value), document.place))
    changes.lay(Layer.at(document.place(), document.changes))
    for layer in layers:
        values = _respelt(layer.values, merged.values, schema()["keys"])
        merged.lay(layer._replace(values=values))
        changes.lay(layer._replace(values=values))
    origins = {tuple(key.split(".")): origin for key, origin in merged.origins.items()}
    return replace(document, value=merged.values, origins=document.origins | origins, changes=changes.values)


def _respelt(above: Config, below: object, fields: Mapping[str, Field]) -> Config:
    """Return values under the spellings of the config below, if a key has several."""
    main_spelling = spellings(fields)
    written_below = {main_spelling.get(key, key): key for key in below} if isinstance(below, dict) else {}
    result: Config = {}
    for key, value in above.items():
        name = main_spelling.get(key, key)
        written = written_below.get(name, key)
        inner = fields.get(name, {}).get("keys")
        if isinstance(value, dict) and inner:
            value = _respelt(value, lookup(below, (written,)), inner)
        result[written] = value
    return result


def layer_of_flag(text: str) -> Layer:
    """Return the layer of one `KEY=VALUE`.

    Raises:
        DeepSpeedConfigError: no `=`, or a key that DeepSpeed does not have, or that fits several of its keys.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise DeepSpeedConfigError(f"{text!r} has no '='", where=FLAG, fix=f"Use {FLAG} KEY=VALUE.")
    where = f"{FLAG} {text}"
    keys = _full_key(key.strip(), where)
    return Layer.at(Place(Kind.FLAG, where), nested(keys, _value(value, known_keys().get(".".join(keys)), where)))


def _full_key(key: str, where: str) -> tuple[str, ...]:
    """Return the full path of a key, from the path itself or from its last part if no other key ends so."""
    all_keys, keys = known_keys(), tuple(key.split("."))
    if key in all_keys or keys in OBSOLETE or _is_free(keys):
        return keys
    tails = [path for path in all_keys if path.endswith(f".{key}")]
    if len(tails) == 1:
        return tuple(tails[0].split("."))
    if tails:
        more = "" if len(tails) <= _MAX_NAMES else f" or one of {len(tails) - _MAX_NAMES} others"
        names = f"{' or '.join(tails[:_MAX_NAMES])}{more}"
        raise DeepSpeedConfigError(f"{key!r} could be {names}", where=where, fix="Use a longer part of the key.")
    hint = did_you_mean(key, [*all_keys, *(path.rpartition(".")[2] for path in all_keys)])
    fix = hint or f"Known top-level keys: {', '.join(schema()['keys'])}."
    raise DeepSpeedConfigError(f"DeepSpeed has no key {key!r}", where=where, fix=fix)


def _is_free(keys: tuple[str, ...]) -> bool:
    """Return whether a key is in a block where the keys depend on its type: an optimizer's params."""
    outer = (known_keys().get(".".join(keys[:end])) for end in range(1, len(keys)))
    return any(field and "object" in kinds(field) and "keys" not in field for field in outer)


def _value(text: str, field: Field | None, where: str) -> object:
    """Return the text read as JSON or Python, else the text itself, as always for a field of strings."""
    word = text.strip()
    if field and {*kinds(field)} <= {"str", "null"}:
        return None if "null" in kinds(field) and word.lower() in ("none", "null") else text
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    with suppress(ValueError):
        return load_json(word)
    with suppress(ValueError, RecursionError, RecipeError):
        return read_value(word, where)
    return word

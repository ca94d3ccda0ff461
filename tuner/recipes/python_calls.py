"""Recipes in Python calls: overrides from keyword arguments, and messages that name arguments instead of flags.

`loading` checks the values. A whole command in a message (`tuner export RUN DEST --merge`) stays a command.
"""

from __future__ import annotations

import ast
import json
import math
import os
import re
from collections.abc import Mapping
from numbers import Integral, Real

from tuner.errors import RecipeError, TunerError, brief_repr
from tuner.files import JsonObject
from tuner.recipes.overrides import KEY_FLAGS
from tuner.recipes.recipe import Overrides
from tuner.recipes.schema import schema_keys

ROWS = ("data", "val")
"""The overrides that may be rows instead of a path; the API writes those to a file first."""
_PATHS = ("model", "data", "adapter", "val")
_FLAGS = (*_PATHS, "seed", "val_split", "epochs", "method")
"""The overrides that have a flag."""
_BLOCKS = ("model", "adapter")
"""The overrides that are also blocks of the recipe: a dict or None is that block."""


def overrides_of(arguments: Mapping[str, object]) -> Overrides:
    """Return the overrides that keyword arguments mean: `lr=1e-5`, `train_cfg={"max_steps": 3}`, `data="rows.jsonl"`.

    Raises:
        RecipeError: a value that is not plain data.
        UsageError: as `Overrides`.
    """
    plain: JsonObject = {key: _plain(key, value) for key, value in arguments.items()}
    flags = {key: plain.pop(key) for key in _FLAGS if key in plain and not (key in _BLOCKS and _is_block(plain[key]))}
    for key in _PATHS:
        several = key == "data" and isinstance(flags.get(key), list) and all(isinstance(x, str) for x in flags[key])
        if not several and not isinstance(flags.get(key), str | None):
            rows = ", or the rows: a list of dicts, a datasets.Dataset or a pandas.DataFrame" if key in ROWS else ""
            fix = f"Give a path or an id on the hub{rows}."
            raise RecipeError(f"{key} = {brief_repr(flags[key])} is not a path or a name", fix=fix)
    changes = plain.pop("ds", None) or {}
    if not isinstance(changes, dict):
        fix = 'Use a dict: ds={"overlap_comm": True}.'
        raise RecipeError(f"ds = {brief_repr(changes)} is not a dict of DeepSpeed's keys", fix=fix)
    ds = tuple(f"{key}={_text(value)}" for key, value in changes.items())
    return Overrides(**flags, ds=ds, values=plain)


def both(first: Overrides, second: Overrides) -> Overrides:
    """Return two overrides as one; the second wins where both set a value."""
    ours, theirs = vars(first), vars(second)
    single = {key: theirs[key] if theirs[key] is not None else ours[key] for key in _FLAGS}
    kept = {key: value for key, value in first.values.items() if key not in second.values}
    return Overrides(
        **single,
        pairs=(*first.pairs, *second.pairs),
        ds=(*first.ds, *second.ds),
        rewards=second.rewards or first.rewards,
        values={**kept, **second.values},  # in this order, so that of two spellings of one key the second wins
    )


def _is_block(value: object) -> bool:
    return value is None or isinstance(value, dict)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _plain(key: str, value: object) -> object:
    """Return a value as plain data of a recipe file: NumPy's numbers as Python's, paths as texts.

    Raises:
        RecipeError: it is not plain data, or a number that is not finite.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        if not math.isfinite(value):
            raise RecipeError(f"{key} = {value} is not a finite number", fix="Use a number such as 2e-4.")
        return float(value)
    if isinstance(value, list | tuple):
        items = [_plain(key, one) for one in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: _plain(f"{key}.{name}", one) for name, one in value.items()}
    fix = "Use a number, a string, a list or a dict."
    raise RecipeError(
        f"{key} = {brief_repr(value)} is of type {type(value).__name__}, which a recipe cannot hold", fix=fix
    )


SWITCHES = (
    "allow_code",
    "apply_chat_template",
    "ignore_fit",
    "merge",
    "private",
    "resume_weights",
    "trust_remote_code",
)
"""Arguments that are True or False; their flags have no value."""
_OPTIONS = (
    *("adapter", "api_key", "base", "bits", "data", "deepspeed", "dtype", "engine", "epochs", "generate", "gpu"),
    *("gpu_memory", "gpus"),
    *("host", "host_memory", "interconnect", "max_new_tokens", "max_restarts", "max_rows", "max_shard_size", "method"),
    *("model", "nodes", "nproc_per_node", "num_fewshot", "nvme", "on_oom", "out", "port", "push", "resume", "seed"),
    *("split", "tasks", "temperature", "top_p", "utilisation", "val", "val_split", "work_dir"),
    *(flag[2:].replace("-", "_") for flag in KEY_FLAGS),
)
ARGUMENTS = {f"--{name.replace('_', '-')}": name for name in (*SWITCHES, *_OPTIONS)} | {
    "--allowed-host": "allowed_hosts",
    "--as": "format",
    "--format": "row_format",
    "--grace": "grace_s",
    "--output-dir": "work_dir",
    "--reward": "rewards",
}
"""Flag -> the argument with the same meaning."""
COMMANDS = (
    *("chat", "check", "completion", "convert", "copy", "data", "doctor", "eval", "explain", "export", "import"),
    *("list", "new", "plan", "report", "runs", "serve", "show", "smoke", "submit", "train", "tune"),
)
_SHORT = {key: flag[2:].replace("-", "_") for flag, key in KEY_FLAGS.items()}
_PLACES = {"SOURCE": "source", "DEST": "dest", "RECIPE": "recipe"}
_END = r"[^\s,;.:)`?'\"]"
"""The last character of a word, without the mark that ends a sentence."""
_VALUE = rf"(?:\"[^\"]*\"|'[^']*'|[^\s<]*<[^>]*>|\S*{_END}(?:['\"](?=\s|$))?)"
_COMMAND = rf"`[^`]*`|\btuner (?:{'|'.join(COMMANDS)})\b(?: \S*{_END})*"
_PAIR = rf"(?:--set|--cfg-options|--ds) {_VALUE}"
_WORDS = r"(?:auto|none|retry|stop|gguf|llama|chatml)\b|[A-Z][A-Z_]*(?:/[A-Z]+)?\b(?![a-z])"
_OPTION = rf"(?<![\w-])--[a-z][a-z-]*(?:[ =](?:{_WORDS}|(?=\S*[0-9/._])[^\s`]*{_END}|\"[^\"]*\"))?"
_ONE = rf"(?:(?<![\w-]){_PAIR}|{_OPTION})"
_TEXT = re.compile(rf"(?P<command>{_COMMAND})|(?P<flags>{_ONE}(?: {_ONE})*)")


def in_python(text: str) -> str:
    """Return a message with arguments in place of flags."""
    return _TEXT.sub(_replaced, text) if "--" in text else text


def place_in_python(where: str) -> str:
    """Return the place of a mistake: a flag with its value as the argument, SOURCE as `source`."""
    flag, _, value = where.partition(" ")
    if flag in ARGUMENTS and value and " --" not in value and not value.startswith("and "):
        return _argument(flag, value)
    return _PLACES.get(where) or in_python(where)


def translate(error: TunerError) -> None:
    """Replace flags by arguments in an error and in all errors that it holds."""
    for one in error.each():
        one.what, one.fix = in_python(one.what), one.fix and in_python(one.fix)
        one.where = one.where and place_in_python(one.where)


def _replaced(match: re.Match[str]) -> str:
    if match["command"]:
        return match["command"]
    return ", ".join(_one(flag) for flag in re.findall(_ONE, match["flags"]))


def _one(text: str) -> str:
    flag, _, pair = re.sub("^(--[a-z-]+)=", r"\1 ", text).partition(" ")
    if flag in ("--set", "--cfg-options"):
        key, _, value = pair.strip("\"'").partition("=")
        return _keyword(key, literal(value))
    if flag == "--ds":
        key, _, value = pair.strip("\"'").partition("=")
        return f'ds={{"{key}": {literal(value)}}}'
    return _argument(flag, pair) if flag in ARGUMENTS else text


def _argument(flag: str, value: str) -> str:
    name = ARGUMENTS[flag]
    if name in SWITCHES:
        return f"{name}=True {value}".rstrip()
    return f"{name}={literal(value) if value else ''}"


def _keyword(key: str, value: str) -> str:
    """Return a key of a recipe as a keyword argument: by its daily name or unique tail, else in its block."""
    first, *rest = key.split(".")
    if key in _SHORT or not rest:
        return f"{_SHORT.get(key, key)}={value}"
    ends = [keys[-1] for keys in schema_keys()]
    if ends.count(rest[-1]) == 1:
        return f"{rest[-1]}={value}"
    for name in reversed(rest):
        value = f'{{"{name}": {value}}}'
    return f"{first}={value}"


def literal(text: str) -> str:
    """Return a value of the command line as Python writes it; a placeholder such as FILE stays as it is."""
    if text.lower() in ("true", "false"):
        return text.capitalize()
    if re.fullmatch(r"[A-Z][A-Z_]*(/[A-Z]+)?|<.*>|dict\(.*\)", text):
        return text
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return json.dumps(text, ensure_ascii=False)
    return f"({text})" if isinstance(value, tuple) and not text.startswith("(") else text

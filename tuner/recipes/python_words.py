"""Messages in Python's words: an argument's name (`data=`) where the command line has a flag (`--data`).

Every message is written with flags; what shows one to a caller in Python passes it through here. A whole command
(`tuner export RUN DEST --merge`) stays a command.
"""

from __future__ import annotations

import ast
import json
import re

from tuner.errors import TunerError
from tuner.recipes.command_line import KEY_FLAGS
from tuner.recipes.schema import schema_keys

SWITCHES = ("allow_code", "apply_chat_template", "ignore_fit", "merge", "private", "resume_weights")
"""Arguments that are True or False; their flags have no value."""
_OPTIONS = (
    *("adapter", "base", "bits", "data", "deepspeed", "dtype", "epochs", "generate", "gpu", "gpu_memory", "gpus"),
    *("host", "host_memory", "interconnect", "max_new_tokens", "max_restarts", "max_rows", "max_shard_size", "method"),
    *("model", "nodes", "nproc_per_node", "num_fewshot", "nvme", "on_oom", "out", "port", "push", "resume", "seed"),
    *("split", "tasks", "temperature", "top_p", "utilisation", "val", "val_split", "work_dir"),
    *(flag[2:].replace("-", "_") for flag in KEY_FLAGS),
)
ARGUMENTS = {f"--{name.replace('_', '-')}": name for name in (*SWITCHES, *_OPTIONS)} | {
    "--as": "format",
    "--format": "row_format",
    "--grace": "grace_s",
    "--output-dir": "work_dir",
}
"""Flag -> the argument that means the same."""
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
    """Return a message with arguments in place of the flags that have one."""
    return _TEXT.sub(_replaced, text) if "--" in text else text


def place_in_python(where: str) -> str:
    """Return the place of a mistake: a flag with its value as the argument, SOURCE as `source`."""
    flag, _, value = where.partition(" ")
    if flag in ARGUMENTS and value and " --" not in value and not value.startswith("and "):
        return _argument(flag, value)
    return _PLACES.get(where) or in_python(where)


def translate(error: TunerError) -> None:
    """Put an error, and each other one that it tells of, into Python's words."""
    for one in error.each():
        one.what, one.fix = in_python(one.what), one.fix and in_python(one.fix)
        one.where = one.where and place_in_python(one.where)


def _replaced(match: re.Match[str]) -> str:
    if match["command"]:
        return match["command"]
    return ", ".join(_one(found) for found in re.findall(_ONE, match["flags"]))


def _one(text: str) -> str:
    flag, _, value = re.sub("^(--[a-z-]+)=", r"\1 ", text).partition(" ")
    if flag in ("--set", "--cfg-options"):
        key, _, given = value.strip("\"'").partition("=")
        return _keyword(key, literal(given))
    if flag == "--ds":
        key, _, given = value.strip("\"'").partition("=")
        return f'ds={{"{key}": {literal(given)}}}'
    return _argument(flag, value) if flag in ARGUMENTS else text


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
    """Return a value of the command line as Python writes it; a word such as FILE, for which one stands, as it is."""
    if text.lower() in ("true", "false"):
        return text.capitalize()
    if re.fullmatch(r"[A-Z][A-Z_]*(/[A-Z]+)?|<.*>|dict\(.*\)", text):
        return text
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return json.dumps(text, ensure_ascii=False)
    return f"({text})" if isinstance(value, tuple) and not text.startswith("(") else text

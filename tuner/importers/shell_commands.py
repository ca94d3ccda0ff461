"""Parses command lines and shell scripts of other tools, without running them.

It understands quotes, `\\` at the end of a line, comments, variables with plain values, and arithmetic with whole
numbers. Any other computed value is an error if the recipe needs the value.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tuner import paths
from tuner.errors import RecipeError
from tuner.files import JsonObject, read_named_text
from tuner.importers.document import ForeignConfig, Keys
from tuner.importers.objective_names import WORDS
from tuner.recipes.recipe_file import read_value
from tuner.recipes.yaml_text import MAX_BYTES

_SET = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)")
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}|\$([A-Za-z_]\w*)")
_SUM = re.compile(r"\$\(\(([^()]*)\)\)|\$\(expr ([^()]*)\)")
PROGRAMS: Mapping[str, Sequence[str]] = {
    "trl": tuple(WORDS["trl"]),
    "swift": ("sft", "pt", "rlhf"),
    "llamafactory-cli": ("train",),
    "axolotl": ("train",),
    "xtuner": ("train",),
    "tune": ("run",),
}
"""Program -> its commands that train."""
_SCRIPTS = {
    **{f"{prefix}{name}.py": ("trl", name) for name in PROGRAMS["trl"] for prefix in ("", "run_")},
    "reward_modeling.py": ("trl", "reward"),
}
"""Script that a launcher starts -> program and command that it stands for."""


def read_script(path: Path) -> ForeignConfig:
    """Return the first training command of a shell script.

    Raises:
        RecipeError: the script cannot be read, or has no training command.
    """
    text = read_named_text(path, RecipeError, max_bytes=MAX_BYTES, fix="Give a shell script.", name=str(path))
    variables: dict[str, str] = {}
    # Each call with the variables that are set above it.
    calls = [
        [(_substituted(word, variables), line) for word, line in call] for call in _calls(text, str(path), variables)
    ]
    first, *later_calls = [call for call in calls if _program(call)] or [[]]
    if document := _document(first, str(path), path.parent):
        return replace(document, more_calls=tuple(call[0][1] for call in later_calls))
    programs = ", ".join(f"{program} {'|'.join(commands)}" for program, commands in PROGRAMS.items())
    raise RecipeError("the script calls no known training tool", where=str(path), fix=f"Known: {programs}.")


def read_words(words: Sequence[str]) -> ForeignConfig | None:
    """Return the command line as a document; None if it is not a command of a known tool."""
    return _document([(word, 0) for word in words], "the command line", Path())


def _calls(text: str, name: str, variables: dict[str, str]) -> Iterator[list[tuple[str, int]]]:
    """Yield a script's commands in their order, each word with its line; assignments fill `variables` on the way."""
    for line, logical_line in _logical_lines(text):
        assignment = _SET.fullmatch(logical_line.strip())
        try:
            words = shlex.split(_inner_marks(assignment[2]), comments=True) if assignment else []
            if assignment and len(words) <= 1:
                value = "".join(words).replace("\x01", "#")
                variables[assignment[1]] = _substituted(value, variables)
                continue
            yield [*_words(logical_line, line)]
        except ValueError as error:
            if any(program in logical_line for program in PROGRAMS):
                raise RecipeError(f"not valid shell syntax: {error}", where=f"{name}:{line}") from None


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield each logical line with its first line number; lines that end with a backslash are joined.

    A joined line keeps its line breaks, so that every word has its own line number.
    """
    parts: list[str] = []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        parts.append(line.rstrip().removesuffix("\\"))
        if not line.rstrip().endswith("\\"):
            yield number - len(parts) + 1, "\n".join(parts)
            parts = []


def _inner_marks(text: str) -> str:
    """Return a line with a mark for each # inside a word, as in data.jsonl#500, which begins no comment."""
    return re.sub(r"(?<=\S)#", "\x01", text)


def _words(text: str, line: int) -> Iterator[tuple[str, int]]:
    # $(expr 16 / $n) is one word to a shell.
    text = _SUM.sub(lambda match: match[0].replace(" ", "\x00"), _inner_marks(text))
    lexer = shlex.shlex(text, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, "#"
    while (word := lexer.get_token()) is not None:
        if word in ("&", "&&", "||", "|", ";"):
            return
        yield word.replace("\x00", " ").replace("\x01", "#"), line + lexer.lineno - 1


def _substituted(word: str, variables: Mapping[str, str]) -> str:
    """Return a word with known variables replaced and arithmetic computed."""
    word = _VARIABLE.sub(lambda match: _value(match, variables), word)
    return _SUM.sub(lambda match: _sum(match[1] or match[2], match[0]), word)


def _value(match: re.Match[str], variables: Mapping[str, str]) -> str:
    value = variables.get(match[1] or match[3])
    return value if value is not None else match[2] if match[2] is not None else match[0]


def _sum(text: str, full_text: str) -> str:
    try:
        value = read_value(text.replace("/", "//").replace("\\*", "*"), full_text)
    except RecipeError:
        return full_text
    return str(value) if type(value) is int else full_text


def _program(words: Sequence[tuple[str, int]]) -> tuple[int, tuple[str, str]] | None:
    """Return the index of the first argument, and the program and command; None if it is not a known tool."""
    plain = [word for word, _ in words]
    for at, word in enumerate(plain):
        name = Path(word).name
        following = plain[at + 1] if at + 1 < len(plain) else ""
        if following in PROGRAMS.get(name, ()):
            return at + 2, (name, following)
        if name in _SCRIPTS and at:
            # ms-swift's own launcher starts swift/cli/sft.py.
            is_swift = "swift" in Path(word).parts
            return at + 1, ("swift", name.removesuffix(".py")) if is_swift else _SCRIPTS[name]
    return None


def _document(words: Sequence[tuple[str, int]], name: str, folder: Path) -> ForeignConfig | None:
    if (program := _program(words)) is None:
        return None
    start, command = program
    matches = filter(None, (_SET.fullmatch(word) for word, _ in words[: start - 1]))
    environ = {match[1]: match[2] for match in matches}
    values, lines, positional = _flags(words[start:])
    launcher, launcher_lines, _ = _flags(words[: start - 1])
    for key in ("deepspeed_config_file", "config_file"):  # of accelerate launch
        if isinstance(file := launcher.get(key), str) and "accelerate_config" not in values:
            values["accelerate_config"] = file
            if (key,) in launcher_lines:
                lines[("accelerate_config",)] = launcher_lines[(key,)]
    document = ForeignConfig(values, name, lines, folder, command, environ)
    file = str(values.get("config") or (positional[0] if positional else ""))
    if Path(file).suffix in (".yaml", ".yml", ".json"):
        return _over_file(document, Path(file), positional[1:] if positional else [])
    return replace(document, values={**values, **({"": positional} if positional else {})})


def _flags(words: Sequence[tuple[str, int]]) -> tuple[JsonObject, dict[Keys, int], list[str]]:
    """Return the value of each flag, its line, and the words before all flags. A flag without a value is true."""
    values: JsonObject = {}
    lines: dict[Keys, int] = {}
    positional: list[str] = []
    key = None
    for word, line in words:
        if word.startswith("--") and len(word) > 2:
            key, equals, value = word[2:].partition("=")
            key = key.replace("-", "_")
            values[key] = [value] if equals else []
            lines |= {(key,): line} if line else {}
        elif key is None:
            positional.append(word)
        else:
            values[key].append(word)
    plain = {key: True if not texts else texts[0] if len(texts) == 1 else texts for key, texts in values.items()}
    return plain, lines, positional


def _over_file(document: ForeignConfig, path: Path, words: Sequence[str]) -> ForeignConfig:
    """Return the config file that a command names, overridden by the command's flags and key=value pairs."""
    near = path if paths.is_file(path) or path.is_absolute() else document.folder / path
    below = ForeignConfig.of_yaml(near)
    pairs = dict(word.lstrip("+").partition("=")[::2] for word in words if "=" in word)
    above = {key: value for key, value in document.values.items() if key != "config"} | pairs
    files = dict.fromkeys(above, document.name)
    lines = {keys: line for keys, line in below.lines.items() if keys[0] not in above}
    lines |= {keys: line for keys, line in document.lines.items() if keys[0] in above}
    merged = replace(below, values=below.values | above, lines=lines, files=files)
    return replace(merged, command=document.command, environ=document.environ)

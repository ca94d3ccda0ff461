"""Every mistake a user can make, as one tree of exceptions, each with its exit code.

A message has three parts: where (file:line or flag), what is wrong (with the value), what to do.
An exception outside this tree is a bug of ours and keeps its traceback.
An option in a message is an `Option` or a `Key`: `--epochs 3` on the command line, and `epochs=3` for Python's callers.

    TunerError                    1   training failed
    ├── UsageError                2   flags and environment variables that contradict or do not parse
    ├── RecipeError               2   a recipe, a part of a recipe, or an override
    ├── DeepSpeedConfigError      2   a preset name or a user's DeepSpeed JSON
    ├── DataError                 2   a data set, a row of it, a chat template
    ├── ModelError                2   a model that is not there or is no model
    ├── RewardError               2   a reward that cannot be loaded, fails, hangs, or returns no number
    ├── ToolError                 2   a tool or an environment that cannot be loaded or described
    ├── RunDirectoryError         2   a run directory in use or missing, or a checkpoint that cannot be resumed
    ├── MachineError              3   hardware, drivers, missing or too old libraries
    ├── DiskError                74   no space, no permission, input/output errors
    ├── Stopped                  75   stopped on request with a checkpoint to resume from
    ├── Hang                    124   no progress within the limit
    └── NotANumber                1   a loss, a gradient or a weight that is NaN or infinite
"""

from __future__ import annotations

import copyreg
import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

_MAX_PART, _END_OF_PART = 4_000, 500
"""Characters of one part of a message, and how many of them are its last: a name or a value can be a megabyte."""
_MAX_VALUE = 80
CONTROLS = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
_FLAGS = {
    "allowed_hosts": "--allowed-host",
    "format": "--as",
    "grace_s": "--grace",
    "rewards": "--reward",
    "start_timeout_s": "--start-timeout",
    "row_format": "--format",
}
"""The flags of the arguments in Python that have another name than their flag."""
_PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*([/.:][A-Za-z]+)*|\.\.\.")
"""A value that the reader replaces, such as FILE, OWNER/NAME or FILE.py:FUNCTION."""
_MARK = f"\x0e{os.urandom(8).hex()}\x0e"
"""Made anew in each process: a file's name or a row cannot hold it, and so hide a part of itself from a message."""
_MARKED = f"{_MARK}{{}}{_MARK}{{}}{_MARK}"
"""An option in an f-string: as typed, and in Python. `Text` takes one of them."""
_OPTION = re.compile(_MARKED.format("(.*?)", "(.*?)"), re.DOTALL)

_Values = dict[tuple[str, ...], str]

Error = TypeVar("Error", bound="TunerError")


class Text(str):
    """A text as the command line shows it; `in_python` is the text with arguments in place of flags.

    Args:
        text: An f-string may hold options, as in `Text(f"add {Option('resume', 'auto')}")`. An error makes its parts
            texts by itself; a warning or a note with an option needs `Text`.
    """

    in_python: str

    def __new__(cls, text: str) -> Text:
        if isinstance(text, Text):
            return text
        return _worded(Text, _OPTION.sub(r"\1", text), _OPTION.sub(r"\2", text))

    def __reduce__(self) -> tuple[object, ...]:
        return _worded, (type(self), str(self), self.in_python)


class Option(Text):
    """An option with its value: True for a switch, and None to name the option alone. An f-string marks it.

    Args:
        name: The argument in Python; the flag is made of it.

    Attributes:
        values: What each argument is in Python, by its name and the keys in it.
    """

    values: _Values

    def __new__(cls, name: str, value: object = None) -> Option:
        flag = _FLAGS.get(name) or f"--{name.replace('_', '-')}"
        typed = "" if value is None or value is True else f" {shlex.quote(_typed(value))}"
        return _option(cls, f"{flag}{typed}", {(name,): "" if value is None else _literal(value)})

    def __format__(self, spec: str) -> str:
        return marked(self)

    def __reduce__(self) -> tuple[object, ...]:
        return _option, (type(self), str(self), self.values)


class Key(Option):
    """A key of a recipe with its value: `--set train_cfg.loss=whole`, `train_cfg={"loss": "whole"}`."""

    def __new__(cls, key: str, value: object) -> Key:
        return _option(cls, f"--set {shlex.quote(f'{key}={_typed(value)}')}", {(*key.split("."),): _literal(value)})


class DsKey(Option):
    """A key of the DeepSpeed config with its value: `--ds overlap_comm=False`, `ds={"overlap_comm": False}`."""

    def __new__(cls, key: str, value: object) -> DsKey:
        return _option(cls, f"--ds {shlex.quote(f'{key}={_typed(value)}')}", {("ds", key): _literal(value)})


class Argument(Option):
    """An argument of a command that has no flag: SOURCE, `source`."""

    def __new__(cls, name: str) -> Argument:
        argument = _option(cls, name.upper(), {})
        argument.in_python = name
        return argument


def options(*parts: Option) -> Option:
    """Return several options as one, to type one after the other; empty ones are left out.

    In Python, the keys of one argument are one dict, because an argument may stand only once in a call.
    """
    values: _Values = {}
    for option in parts:
        values |= option.values
    return _option(Option, " ".join(filter(None, parts)), values)


def marked(text: str) -> str:
    """Return a text with its options marked, for an f-string that an error or `Text` takes."""
    return _MARKED.format(str(text), text.in_python) if isinstance(text, Text) and text != text.in_python else text


AText = TypeVar("AText", bound=Text)


AnOption = TypeVar("AnOption", bound=Option)


def _option(kind: type[AnOption], typed: str, values: _Values) -> AnOption:
    option = _worded(kind, typed, _arguments(values))
    option.values = values
    return option


def _arguments(values: _Values) -> str:
    """Return values as the arguments of a call: `train_cfg={"loss": "whole", "seed": 1}, epochs=3`."""
    return ", ".join(f"{name}={_dict_or_literal(inner)}" for name, inner in _by_first(values).items())


def _dict_or_literal(values: _Values) -> str:
    if () in values:
        return values[()]
    items = (f'"{key}": {_dict_or_literal(inner)}' for key, inner in _by_first(values).items())
    return f"{{{', '.join(items)}}}"


def _by_first(values: _Values) -> dict[str, _Values]:
    """Return the values below each first name, with the names after it."""
    below: dict[str, _Values] = {}
    for (first, *rest), literal in values.items():
        below.setdefault(first, {})[(*rest,)] = literal
    return below


def _worded(kind: type[AText], typed: str, in_python: str) -> AText:
    text = str.__new__(kind, typed)
    text.in_python = in_python
    return text


def _typed(value: object) -> str:
    return value if isinstance(value, str) else _literal(value)


def _literal(value: object) -> str:
    """Return a value as Python writes it, and as `--set` reads it; a placeholder stays as it is."""
    if isinstance(value, str):
        return value if _PLACEHOLDER.fullmatch(value) else json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        return f"dict({', '.join(f'{key}={_literal(inner)}' for key, inner in value.items())})"
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, value))}]"
    return repr(value)


def visible(text: str) -> str:
    """Return text that a terminal only shows: control characters, and those that turn its direction, as their codes."""
    text = Text(text)
    if all(map(str.isprintable, text.split("\n"))):  # nearly always; to compile the pattern takes half a ms
        return text
    return re.sub(CONTROLS, lambda match: match[0].encode("unicode_escape").decode(), text)


class TunerError(Exception):
    """Training failed, and one message says why.

    Args:
        problem: What is wrong, with the wrong value; no full stop at the end. The attribute `what` holds it.
        where: `file:line`, a flag or a variable.
        fix: What to do; an imperative sentence, such as f"Add {Option('resume', 'auto')}, or choose another folder."

    Attributes:
        others: The other errors, if several were found and this one reports all of them.
    """

    code = "training-failed"
    exit_code = 1

    def __init__(self, problem: str, *, where: object = None, fix: str | None = None) -> None:
        self.what = Text(problem)
        self.where = None if where is None else Text(where if isinstance(where, str) else str(where))
        self.fix = None if fix is None else Text(fix)
        self.others: tuple[TunerError, ...] = ()
        super().__init__(self.what, self.where, self.fix)

    def __str__(self) -> str:
        return "\n".join(f"{error.code}: {error.message}" for error in self.each())

    def for_people(self) -> list[str]:
        """Return the lines that a terminal shows: `error[bad-usage]: MESSAGE`, one for each mistake."""
        return [f"{heading(error.code)} {error.message}" for error in self.each()]

    def __reduce__(self) -> tuple[object, ...]:
        # From one process to another: `Exception` would call the class with its positional arguments alone.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]

    def each(self) -> Iterator[TunerError]:
        """Yield this error and every other one that it reports."""
        yield self
        for other in self.others:
            yield from other.each()

    def to_json(self) -> dict[str, object]:
        """Return the parts of the message, and those of the other errors."""
        parts = {"code": self.code, "exit_code": self.exit_code, "what": self.what, "where": self.where}
        return {**parts, "fix": self.fix, "others": [other.to_json() for other in self.others]}

    @property
    def message(self) -> Text:
        """Where, what is wrong, and what to do: `my.py:14: lr = nan is not a number. Write 2e-4.`, safe to print."""
        parts = (self.what, self.where or Text(""), self.fix or Text(""))
        return _worded(Text, _sentences(*parts), _sentences(*(part.in_python for part in parts)))


def _sentences(problem: str, where: str, fix: str) -> str:
    problem, where, fix = map(shortened, (problem, where, fix))
    text = f"{where}: {problem}." if where else f"{problem}."
    if fix:
        ends_in_command = ": " in fix.rpartition(". ")[2]  # See: tuner list
        text += f" {fix}" if fix.endswith((".", "?")) or ends_in_command else f" {fix}."
    return visible(text)


def exit_code_of(signal: int) -> int:
    """Return the exit code of a process that a signal has ended, as shells count it."""
    return 128 + signal


def heading(code: str) -> str:
    """Return how a line about an error begins on a terminal; `tuner explain CODE` explains the code in it."""
    return f"error[{code}]:"


def brief_repr(value: object) -> str:
    """Return a value as Python writes it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 3]}..."


def together(errors: Sequence[Error]) -> Error:
    """Return the first error, which now reports all; its exit code is the lowest: wrong recipe before wrong machine."""
    first, *others = errors
    first.others = (*first.others, *others)
    first.exit_code = min(error.exit_code for error in errors)
    return first


def shortened(text: str, max_characters: int = _MAX_PART, end: int = _END_OF_PART) -> str:
    """Return a text of at most so many characters, `end` of which are its last, and how many were left out."""
    left_out = len(text) - max_characters
    return text if left_out <= 0 else f"{text[: max_characters - end]} ... {left_out:,} characters ... {text[-end:]}"


class UsageError(TunerError):
    """Flags or environment variables that are unknown, malformed, or contradict each other."""

    code = "bad-usage"
    exit_code = 2


class RecipeError(TunerError):
    """A wrong recipe, part of a recipe, or override."""

    code = "bad-recipe"
    exit_code = 2


class DeepSpeedConfigError(TunerError):
    """A wrong preset name or DeepSpeed JSON."""

    code = "bad-deepspeed-config"
    exit_code = 2


class DataError(TunerError):
    """A wrong data set, row, or chat template.

    Args:
        of_row: One row is wrong by itself, and may be left out; `where` is its place.
    """

    code = "bad-data"
    exit_code = 2

    def __init__(self, problem: str, *, where: object = None, fix: str | None = None, of_row: bool = False) -> None:
        super().__init__(problem, where=where, fix=fix)
        self.of_row = of_row


class ModelError(TunerError):
    """A model that cannot be found or loaded."""

    code = "bad-model"
    exit_code = 2


class RewardError(TunerError):
    """A reward that cannot be loaded, fails, takes too long, or does not return numbers."""

    code = "bad-reward"
    exit_code = 2


class ToolError(TunerError):
    """A tool or an environment that cannot be loaded or described to the model, or fails on the first row."""

    code = "bad-tool"
    exit_code = 2


class RunDirectoryError(TunerError):
    """A run directory that is in use or missing, or a checkpoint that cannot be resumed."""

    code = "bad-run-directory"
    exit_code = 2


class MachineError(TunerError):
    """Hardware, a driver or a library is missing or too old."""

    code = "bad-environment"
    exit_code = 3


class DiskError(TunerError):
    """No space, no permission, or an input/output error."""

    code = "disk"
    exit_code = 74


class Stopped(TunerError):
    """Stopped on request, with a checkpoint to resume from."""

    code = "stopped"
    exit_code = 75


class Hang(TunerError):
    """No progress within the limit."""

    code = "hang"
    exit_code = 124


class NotANumber(TunerError):
    """A loss, a gradient or a weight is NaN or infinite."""

    code = "not-a-number"

    def __init__(self, problem: str, *, rank: int, where: object = None, fix: str | None = None) -> None:
        super().__init__(problem, where=where, fix=fix)
        self.rank = rank


def words_of(text: str, where: str) -> list[str]:
    """Return the words of a command line, as a shell reads them.

    Raises:
        UsageError: a quote is not closed, or the last backslash stands before nothing.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        problem = f"{text!r} is no command line: {str(error).lower()}"
        raise UsageError(problem, where=where, fix="Close every quote, or quote the word as a whole.") from None


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that `name` most likely means, or None when none is close."""
    import difflib  # only where a name is wrong

    pool = {candidate.lower(): candidate for candidate in candidates}
    close = difflib.get_close_matches(name.lower(), pool, n=1, cutoff=0.6)
    return pool[close[0]] if close else None


def did_you_mean(name: str, candidates: Iterable[str], see: str | None = None) -> str:
    """Return `Did you mean 'x'?`, followed by where the right names are listed."""
    close = nearest(name, candidates)
    hint = f"Did you mean {close!r}?" if close not in (None, name) else ""
    return f"{hint} See: {see}".strip() if see else hint

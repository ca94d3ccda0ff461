"""`tuner train` alone in a terminal: three questions, the plan, and the command that does the same.

It offers what is at hand: data files here, models in folders, in the hub's cache and of earlier runs.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from tuner import paths
from tuner.cli.options import Changes
from tuner.cli.say import say
from tuner.cli.text import announce
from tuner.recipes import catalog, mistaken, names
from tuner.runs import listing

if TYPE_CHECKING:
    from tuner.launch.resolved_run import ResolvedRun

_MOST = 40
"""Choices that a question offers; a line says that there are more."""
_MAX_FOLDERS, _MAX_RUNS = 500, 3
_SMALL = "Qwen/Qwen3-0.6B"
"""The model that is offered if none is at hand: it trains on a laptop."""
_METHODS = ("lora", "qlora", "full")
_QUIT = ("q", "quit", "exit")


class Choice(NamedTuple):
    """One choice of a question: the value, and a note about it."""

    value: str
    note: str = ""


def ask(changes: Changes) -> Changes:
    """Return the changes with a model, data and a method; ask for those that are missing.

    Raises:
        KeyboardInterrupt, click.exceptions.Exit: the person leaves.
    """
    say("What to train, in three questions. q leaves; nothing starts before you have seen the plan.", err=True)
    model = _ask("Model", models() or [Choice(_SMALL, "is downloaded from the hub")], _model_of, "a folder or a hub id")
    data = changes["data"] or (_ask("Data", data_files(), _data_of, "a file, a folder or a hub id"),)
    summaries = [Choice(name, catalog.summary(catalog.part_file("methods", name))) for name in _METHODS]
    method = changes["method"] or _ask("Method", summaries, _method_of, "or a name that `tuner list --methods` prints")
    return {**changes, "model": model, "data": data, "method": method}


def command_of(typed: Sequence[str], changes: Changes) -> list[str]:
    """Return the words of the command without questions: the typed words, and the answers."""
    pairs = [("--model", changes["model"]), *(("--data", path) for path in changes["data"])]
    pairs += [("--method", changes["method"])] if changes["method"] != catalog.DEFAULT_METHOD else []
    answers = [(flag, value) for flag, value in pairs if value not in typed]
    return [*typed, *(word for pair in answers for word in pair)]


def agrees(run: ResolvedRun, warnings: tuple[str, ...], command: Sequence[str]) -> bool:
    """Show the plan and the command, and return whether the person starts it."""
    click.echo(err=True)
    announce(run, warnings)
    say(f"\nThe same without questions:\n  {shlex.join(command)}\n", err=True)
    return _read("Enter starts it, q leaves", "") == ""


def models() -> list[Choice]:
    """Return models at hand: folders here and one level down, those in the hub's cache, results of runs."""
    return [*_in_folders(), *_in_hub_cache(), *_of_runs()]


def data_files() -> list[Choice]:
    """Return the data files of the working directory and of ./data."""
    files = [file for folder in (Path(), Path("data")) for file in _entries(folder) if _is_data(file)]
    return [Choice(str(file), _size(file.stat().st_size)) for file in files]


def _entries(folder: Path) -> list[Path]:
    if not paths.is_folder(folder) or paths.forbidden(folder):
        return []
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def _is_data(file: Path) -> bool:
    is_suggested = file.suffix in (".json", ".jsonl", ".parquet", ".csv") and paths.is_file(file)
    return is_suggested and names.identify(str(file)).kind is names.NameKind.DATA


def _in_folders() -> Iterator[Choice]:
    folders = [entry for entry in _entries(Path()) if entry.is_dir() and entry.name != "work_dirs"]
    below = [entry for folder in folders[:_MAX_FOLDERS] for entry in islice(_entries(folder), _MAX_FOLDERS)]
    for folder in (*folders, *below):
        if paths.is_file(folder / "config.json"):
            yield Choice(f"./{folder}", "a folder")


def _in_hub_cache() -> Iterator[Choice]:
    from huggingface_hub.constants import HF_HUB_CACHE  # no client of the hub is loaded for it

    for folder in _entries(Path(HF_HUB_CACHE)):
        if folder.name.startswith("models--") and any(folder.glob("snapshots/*/config.json")):
            yield Choice(folder.name.removeprefix("models--").replace("--", "/", 1), "downloaded from the hub")


def _of_runs() -> Iterator[Choice]:
    done = (run for run in reversed(listing.below(Path("work_dirs"))) if run.state == "done")
    for run in islice((run for run in done if names.holds_model(Path(run.path))), _MAX_RUNS):
        yield Choice(f"work_dirs/{run.name}", "the result of a run")


def _ask(
    title: str, choices: Sequence[Choice], check: Callable[[str], tuple[str, str | None]], other_answers: str
) -> str:
    """Return the answer to one question: a choice by its number, or what was typed, once it is right."""
    say(f"\n{title}:", err=True)
    shown = choices[:_MOST]
    width, digits = max((len(choice.value) for choice in shown), default=0), len(str(len(shown)))
    for number, choice in enumerate(shown, 1):
        say(f"  {number:>{digits}}  {choice.value:<{width}}  {choice.note}".rstrip(), err=True)
    if len(choices) > len(shown):
        say(f"  and {len(choices) - len(shown)} more, which can be written", err=True)
    text = f"A number, {other_answers}" if choices else f"None found here. Write {other_answers}"
    while True:
        answer = _read(text, "1" if choices else None)
        if answer.isdecimal() and 0 < int(answer) <= len(shown):
            return shown[int(answer) - 1].value
        value, problem = check(answer)
        if problem is None:
            return str(value)
        say(problem, err=True)


def _read(text: str, default: str | None) -> str:
    try:
        answer: str = click.prompt(text, default=default, show_default=bool(default), err=True).strip()
    except click.Abort:
        raise KeyboardInterrupt from None
    if answer.lower() in _QUIT:
        raise click.exceptions.Exit(0)
    return answer


def _model_of(text: str) -> tuple[str, str | None]:
    local = paths.local(text)
    if local is None:
        meant = text if "/" in text else mistaken.hub_id(text)
        return meant or text, None if meant else f"No model {text!r} is known. A hub id has an owner: {_SMALL}."
    if not paths.exists(local):
        return text, f"{text!r} does not exist."
    return text, None if names.holds_model(local) else f"{text!r} holds no model (no config.json)."


def _data_of(text: str) -> tuple[str, str | None]:
    local = paths.local(text)
    missing = (local is None and "/" not in text) or (local is not None and not paths.matching(local))
    return text, f"{text!r} does not exist." if missing else None


def _method_of(text: str) -> tuple[str, str | None]:
    methods = catalog.trainings()
    return text, None if text in methods else f"No method {text!r}. Known: {', '.join(methods)}."


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:,.1f} kB"

"""Other tools' commands and options: what each is here, for whoever types them out of habit.

They stand in other_tools.toml; of XTuner those of its `entry_point.py` and `tools/` at v0.1.23. It prints nothing and
decides nothing but the words.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import click

from tuner.errors import UsageError
from tuner.recipes import aliases
from tuner.recipes.aliases import by_word

_TABLES = Path(__file__).with_suffix(".toml")


@cache
def _tables() -> dict[str, dict[str, Any]]:
    return tomllib.loads(_TABLES.read_text(encoding="utf-8"))


def commands() -> dict[str, str]:
    """Return what of ours does what each command of other tools' does."""
    return by_word(_tables()["commands"])


def options(command_name: str) -> dict[str, str]:
    """Return other tools' options of a command, each with what to do instead."""
    return by_word(_tables()["options"].get(command_name, {}))


def same(args: Sequence[str]) -> list[str] | None:
    """Return the words for a command of XTuner's that one of ours does just so, or None where none does."""
    name = args[0].lower()
    words = [part for word in args[1:] for part in (word.split("=", 1) if word.startswith("--") else [word])]
    if name == "list-cfg":
        return ["list", *(word for word in words if word not in ("-p", "--pattern"))]
    if name == "copy-cfg" and len(words) == 2:
        return ["copy", words[0], str(Path(words[1]) / f"{Path(words[0]).stem}_copy.py")]
    if name == "log-dataset":
        at = words.index("--show") if "--show" in words else len(words)
        return ["data", *words[:at], *words[at + 2 :]]  # text, masked text and tokens are shown at once
    if name == "check-custom-dataset":
        return ["data", *words, "--all", "--bad"]
    return None


def launcher(error: click.BadParameter) -> UsageError | None:
    """Return what to say of XTuner's word for torchrun, or None where the error is of something else."""
    if error.param is None or error.param.name != "launcher" or "'pytorch'" not in error.message:
        return None
    fix = (
        "Remove it: tuner starts the ranks with torchrun. If torchrun already started "
        "this process, use --launcher none."
    )
    return UsageError("no launcher 'pytorch'", where="--launcher", fix=fix)


def command(name: str) -> UsageError | None:
    """Return what to say of a command of another tool's, or None where it is none."""
    ours = commands().get(name, commands().get(name.replace("_", "-")))
    return UsageError(f"no command {name!r}", where="tuner", fix=f"Instead: {ours}.") if ours else None


def option(error: click.NoSuchOption) -> UsageError | None:
    """Return what to say of an option of another tool's, or None where it is none."""
    if error.ctx is None:
        return None
    called, flag = error.ctx.command, error.option_name
    dashed = flag.replace("_", "-")
    ours = {name for parameter in called.params for name in parameter.opts}
    instead = options(error.ctx.info_name or "")
    fix = f"Use {dashed}." if dashed in ours else instead.get(dashed)
    if fix is None and "--set" in ours:
        fix = _as_key(flag.removeprefix("--"))
    return UsageError(f"unknown option {flag}", where=error.ctx.command_path, fix=fix) if fix else None


def _as_key(word: str) -> str | None:
    """Return how a recipe's key, in another tool's words or in ours, is set, or None where it is no key."""
    from tuner.recipes.schema import schema_keys  # pydantic, which --help does not need

    if alias := aliases.find(word, "VALUE"):
        if alias.flag:
            return f"Use {alias.flag} PATH."
        return f"Use --set {alias.key}=VALUE." if alias.key else alias.instead
    plain = word.replace("-", "_")
    is_key = any(plain in (keys[-1], ".".join(keys)) for keys in schema_keys())
    return f"Use --set {plain}=VALUE." if is_key else None

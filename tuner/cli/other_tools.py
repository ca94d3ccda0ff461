"""Commands and options of other tools, and what to type instead in tuner.

They stand in other_tools.toml; those of XTuner are from its `entry_point.py` and `tools/` at v0.1.23.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import click

from tuner.errors import UsageError
from tuner.files import JsonObject, read_text
from tuner.importers import aliases
from tuner.importers.aliases import by_word
from tuner.recipes.schema import schema_keys

_TABLES = Path(__file__).with_suffix(".toml")


@cache
def _tables() -> dict[str, JsonObject]:
    return tomllib.loads(read_text(_TABLES))


def commands() -> dict[str, str]:
    """Return the commands of other tools, each with tuner's command for the same."""
    return by_word(_tables()["commands"])


def options(command_name: str) -> dict[str, str]:
    """Return the options that other tools have for a command, each with what to do instead."""
    return by_word(_tables()["options"].get(command_name, {}))


def same(args: Sequence[str]) -> list[str] | None:
    """Return tuner's words for a command of XTuner that tuner does in the same way, or None."""
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
    return _as_export(words) if name == "convert" else None


def _as_export(words: Sequence[str]) -> list[str] | None:
    """Return the words of XTuner's `convert pth_to_hf [CONFIG] SOURCE DEST` or `convert merge BASE ADAPTER DEST`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--fp32", action="store_const", const=["--dtype", "fp32"], default=[])
    size = "--max-shard-size"
    parser.add_argument(size, nargs="?", type=lambda value: [size, value], const=[size], default=[size, "2GB"])
    parser.add_argument("--safe-serialization", action="store_true")  # weights are always safetensors
    parser.add_argument("--device", nargs="?")  # none is needed
    parsed, other_words = parser.parse_known_intermixed_args(words)
    # The size is last: without its value, it takes no other word for it.
    shared = [*parsed.fp32, *other_words, *parsed.max_shard_size]
    match parsed.words:
        case ["pth_to_hf", _, source, dest] | ["pth_to_hf", source, dest]:
            return ["export", source, dest, *shared]
        case ["merge", base, adapter, dest]:
            return ["export", adapter, dest, "--merge", "--base", base, *shared]
    return None


def launcher(error: click.BadParameter) -> UsageError | None:
    """Return the error for XTuner's and PyTorch's name of what tuner does by itself, or None for another mistake."""
    names = (name for name in ("pytorch", "torchrun") if f"'{name}'" in error.message)
    if error.param is None or error.param.name != "launcher" or (name := next(names, None)) is None:
        return None
    fix = "Remove it: tuner starts the ranks itself. If torchrun has started this process, use --launcher env."
    return UsageError(f"no launcher {name!r}", where="--launcher", fix=fix)


def command(name: str) -> UsageError | None:
    """Return the error for a command of another tool, or None if no tool has it."""
    our_command = commands().get(name, commands().get(name.replace("_", "-")))
    return UsageError(f"no command {name!r}", where="tuner", fix=f"Instead: {our_command}.") if our_command else None


def option(error: click.NoSuchOption) -> UsageError | None:
    """Return the error for an option of another tool, or None if no tool has it."""
    if error.ctx is None:
        return None
    called, flag = error.ctx.command, error.option_name
    dashed = flag.replace("_", "-")
    our_flags = {name for parameter in called.params for name in parameter.opts}
    instead = options(error.ctx.info_name or "")
    fix = f"Use {dashed}." if dashed in our_flags else instead.get(dashed)
    if fix is None and "--set" in our_flags:
        fix = _as_key(flag.removeprefix("--"))
    return UsageError(f"unknown option {flag}", where=error.ctx.command_path, fix=fix) if fix else None


def _as_key(word: str) -> str | None:
    """Return how to set a recipe's key (tuner's name or another tool's), or None if it is not a key."""
    if alias := aliases.find(word, "VALUE"):
        if alias.flag:
            return f"Use {alias.flag} PATH."
        return f"Use --set {alias.key}=VALUE." if alias.key else alias.instead
    plain = word.replace("-", "_")
    is_key = any(plain in (keys[-1], ".".join(keys)) for keys in schema_keys())
    return f"Use --set {plain}=VALUE." if is_key else None

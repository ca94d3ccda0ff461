"""What a shell offers for a word that is half typed; `docs/recipes.md` says how to switch it on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from click import Context, Parameter

from tuner.cli.parts import learners
from tuner.recipes import catalog, patterns
from tuner.recipes.schema import schema_keys
from tuner.recipes.schema.rewards import BUILT_IN
from tuner.zero.config_schema import known_keys

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def recipes(context: Context, parameter: Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer recipes' names part by part, and where none begins so, files."""
    return _items(patterns.complete(incomplete, learners)) or files(context, parameter, incomplete)


def deepspeed(context: Context, parameter: Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer the presets, and where none begins so, files."""
    names = [name for name in (*catalog.presets(), "auto", "none") if name.startswith(incomplete)]
    return _items(names) or files(context, parameter, incomplete)


def deepspeed_keys(context: Context, parameter: Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer the keys of DeepSpeed's config, by their full path and by their last word."""
    return _keys(known_keys(), incomplete)


def rewards(context: Context, parameter: Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer the rewards of the package, and where none begins so, files."""
    return _items(name for name in BUILT_IN if name.startswith(incomplete)) or files(context, parameter, incomplete)


def files(context: Context, parameter: Parameter, incomplete: str) -> list[CompletionItem]:
    """Leave it to the shell to offer files."""
    return _items([incomplete], "file")


def keys(context: Context, parameter: Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer a recipe's keys, by their full path and by their last word."""
    return _keys(map(".".join, schema_keys()), incomplete)


def _keys(paths: Iterable[str], incomplete: str) -> list[CompletionItem]:
    names = {name for path in paths for name in (path, path.rpartition(".")[2])}
    return _items(name for name in sorted(names) if name.startswith(incomplete))


def _items(names: Iterable[str], kind: str = "plain") -> list[CompletionItem]:
    from click.shell_completion import CompletionItem  # only a shell asks

    return [CompletionItem(name, kind) for name in names]

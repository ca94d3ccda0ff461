"""Lines for a person: names of files may hold what a terminal takes for commands, so they are shown as their codes."""

from __future__ import annotations

import click

from tuner.errors import visible


def say(text: str = "", *, err: bool = False, fg: str | None = None) -> None:
    """Print text that a terminal only shows, on standard output or standard error, in a colour."""
    click.secho(visible(text), err=err, fg=fg)

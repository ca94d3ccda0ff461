"""`tuner completion`: the script that completes commands, options, recipes and keys in a shell."""

from __future__ import annotations

import sys

import click
from click.shell_completion import get_completion_class

from tuner import cli
from tuner.cli.help import Command
from tuner.cli.options import json_option
from tuner.cli.say import say_json

_FILES = {
    "bash": ("~/.bashrc", 'eval "$(tuner completion bash)"'),
    "zsh": ("~/.zshrc", 'eval "$(tuner completion zsh)"'),
    "fish": ("~/.config/fish/config.fish", "tuner completion fish | source"),
}
"""Where each shell reads its settings at the start, and the line that loads the script there."""


@click.command(
    cls=Command,
    examples=tuple(f"echo '{line}' >> {file}" for file, line in _FILES.values()),
    json_keys={
        "tuner completion SHELL --json": "`shell`, `script`, `file`, `line`",
    },
)
@click.argument("shell", type=click.Choice(tuple(_FILES)))
@json_option
def command(shell: str, as_json: bool) -> None:
    """Print the script that completes tuner's commands, options, recipe names and keys with the Tab key.

    The examples add it to each shell's settings; it works in the next shell that you open.
    """
    completion = get_completion_class(shell)
    assert completion is not None, "click has a class for each of these shells"
    script, (file, line) = completion(cli.tuner, {}, "tuner", "_TUNER_COMPLETE").source(), _FILES[shell]
    if as_json:
        say_json({"shell": shell, "script": script, "file": file, "line": line})
        return
    click.echo(script)
    if sys.stdout.isatty():
        click.echo(f"\n# To use it, add this line to {file} and open a new shell:\n#   {line}", err=True)

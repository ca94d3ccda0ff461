"""Options that mean a model to ask or to judge, and how it is loaded for the command that has them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

import click

from tuner.cli import complete
from tuner.cli.options import all_of, debug_option

model_options = all_of(
    click.argument("source", shell_complete=complete.files),
    click.option(
        "--adapter", metavar="PATH", shell_complete=complete.files, help="Load this LoRA adapter on top of SOURCE."
    ),
    click.option(
        "--bits",
        type=click.Choice(("4", "8", "16")),
        help="Load the weights in 4, 8 or 16 bits. [default: as in training, or 16]",
    ),
    debug_option,
)


@contextmanager
def stdout_is_the_answers() -> Iterator[None]:
    """Silence libraries, and send what they print all the same to stderr."""
    from tuner.worker.quiet import quiet_libraries

    quiet_libraries()
    with redirect_stdout(sys.stderr):
        yield


max_new_tokens_option = click.option(
    "--max-new-tokens",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="Longest answer, in tokens.",
)

"""Options that mean a model to ask or to judge, and how it is loaded for the command that has them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING

import click

from tuner.cli import complete
from tuner.cli.options import all_of, debug_option

if TYPE_CHECKING:
    from tuner.machine.hardware import Hardware
    from tuner.results.model import LoadedModel, ModelSpec

model_options = all_of(
    click.argument("source", shell_complete=complete.files),
    click.option(
        "--adapter", metavar="PATH", shell_complete=complete.files, help="Load this adapter on top of SOURCE, its base."
    ),
    click.option(
        "--bits",
        type=click.Choice(("4", "8", "16")),
        help="Bits of each weight.  [default: as the base had in training, or 16]",
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


def loaded(spec: ModelSpec, bits: str | None) -> tuple[LoadedModel, Hardware]:
    """Load it onto this machine.

    Raises:
        TunerError: it cannot be loaded, or the adapter does not fit it.
    """
    from tuner.machine.hardware import detect
    from tuner.results.model import load

    hardware = detect(os.environ)
    return load(spec, hardware, int(bits) if bits else None), hardware


max_new_tokens_option = click.option(
    "--max-new-tokens",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="Largest number of tokens in an answer.",
)

"""The command line: one file a command, imported when it is called; the only place that prints and exits."""

from __future__ import annotations

from tuner.cli import search_path as search_path

# What is imported from here on is looked for without the working directory.
# isort: split

import gc
import keyword
import os
import platform
import shlex
import signal
import sys
import time
from importlib import import_module
from io import BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from tuner import __version__
from tuner.errors import DiskError, TunerError, UsageError, did_you_mean, exit_code_of
from tuner.files import DISK_IS_FULL, JSON_VERSION, is_disk_error
from tuner.machine import libraries
from tuner.machine.variables import speaks
from tuner.progress import show_on

_LET_THE_FIRST_SPEAK_S = 20
"""Beside busy processes the first task may start this much later than another one."""
_AS_CODES = "backslashreplace"
"""For a terminal or a pipe of ASCII."""
_WIDEST = 120
"""Columns of --help where the terminal has as many."""
COMMANDS = {
    "train": "Fine-tune a model: --model and --data, or a recipe.",
    "submit": "Fine-tune as a Slurm job that requeues and resumes itself.",
    "report": "Write an HTML report of one or several runs.",
    "runs": "List runs with their state, step and loss.",
    "clean": "Remove what failed and killed runs left on disks.",
    "plan": "Estimate the memory at every ZeRO level, and what fits.",
    "check": "Check a recipe, a DeepSpeed config or a run; start nothing.",
    "list": "List the models, methods and data sets of recipe names.",
    "show": "Show every value of a recipe and where it comes from.",
    "new": "Add a model or a data set to your own catalog.",
    "copy": "Write a recipe as one commented file.",
    "import": "Convert another tool's config into a recipe.",
    "data": "Show the data as the model sees it, and bad rows.",
    "explain": "Explain an error code: cause, example, fix.",
    "doctor": "Check the installation on this machine.",
    "smoke": "Test a recipe in a minute with a small random model.",
    "tune": "Measure the fastest settings for a recipe on this machine.",
    "chat": "Chat with a trained model, or any other one.",
    "serve": "Serve a trained model, or any other one, to OpenAI clients.",
    "eval": "Evaluate a trained model, or any other one: loss, task scores.",
    "export": "Export a trained model: merged, as GGUF, or to the hub.",
    "completion": "Print the script for completion with the Tab key.",
}
"""Name -> one line, so that --help needs no command's imports."""


class LazyGroup(click.Group):
    """A group of commands; each is in `tuner.cli.NAME`, which is imported when the command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS]  # `list` is a command here once tuner.cli.list is imported

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = _imported(f"tuner.cli.{cmd_name}{'_' * keyword.iskeyword(cmd_name)}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            if args and (same := _other_tools().same(args)):
                if not _wants_json():
                    click.echo(f"Running: {shlex.join(('tuner', *same))}", err=True)
                return super().resolve_command(ctx, same)
            if args and (hint := _other_tools().command(args[0])):
                raise hint from None
            fix = did_you_mean(args[0], COMMANDS, see="tuner --help")
            raise UsageError(f"no command {args[0]!r}", where="tuner", fix=fix) from error

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except (click.NoSuchOption, click.BadOptionUsage) as error:
            raise _usage_error(error, ctx) from None

    def invoke(self, ctx: click.Context) -> object:
        _refuse_no_folder()
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            if isinstance(error, click.NoSuchOption) and (hint := _other_tools().option(error)):
                raise hint from None
            if isinstance(error, click.BadParameter) and (hint := _other_tools().launcher(error)):
                raise hint from None
            raise _usage_error(error, ctx) from None
        except KeyboardInterrupt:  # click's own 1 would say that training failed
            click.echo("\nAborted!", err=True)
            raise click.exceptions.Exit(exit_code_of(signal.SIGINT)) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([*COMMANDS.items()])


def _imported(name: str) -> ModuleType:
    """Import a module. What it makes stays, and to look there for garbage would take a tenth of a command's start."""
    if name in sys.modules or not gc.isenabled():
        return import_module(name)
    gc.disable()
    try:
        return import_module(name)
    finally:
        gc.freeze()
        gc.enable()


def _usage_error(error: click.UsageError, ctx: click.Context) -> UsageError:
    """Return click's error as ours, which has a code: one message in place of click's four lines."""
    # For an option without its value, click's error does not name the command.
    called = " ".join(filter(None, (ctx.command_path, ctx.invoked_subcommand)))
    command = error.ctx.command_path if error.ctx else called
    problem, where, fix = error.format_message(), command, ""
    if isinstance(error, click.NoSuchOption):  # its suggestion is part of the formatted message
        problem, fix = f"unknown option {error.option_name}", did_you_mean(error.option_name, error.possibilities or ())
    elif isinstance(error, click.BadParameter) and type(error) is click.BadParameter and error.param:
        problem, where = error.message, error.param.opts[0]
    return UsageError(problem.rstrip("."), where=where, fix=f"{fix} See: {command} --help".strip())


def _refuse_no_folder() -> None:
    try:
        Path.cwd()
    except OSError as error:
        problem = f"the working directory cannot be used: {error.strerror}"
        raise UsageError(problem, fix="It may have been deleted: change to a folder that exists (cd).") from None


def _other_tools() -> ModuleType:
    return import_module("tuner.cli.other_tools")  # only on the way to an error


def _show_versions(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    click.echo(f"tuner, version {__version__}")  # scripts and `--hostfile` read this line
    cuda = libraries.torch_cuda_version()
    versions = {"python": sys.version.split()[0], **libraries.versions()}
    for name, version in versions.items():
        click.echo(f"{name} {version or '(not installed)'}{f' (CUDA {cuda})' if name == 'torch' and cuda else ''}")
    ctx.exit()


_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": _WIDEST, "show_default": True}
"""Of the context of each command, which has them from this one."""


@click.group(cls=LazyGroup, context_settings=_SETTINGS)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_versions,
    help="Show the versions of tuner and its libraries, and exit.",
)
def tuner() -> None:
    """Fine-tune an LLM with one command.

    \b
    Examples:
      tuner train --model Qwen/Qwen3-0.6B --data my.jsonl
      tuner plan qwen3_8b_lora_alpaca_e1 --gpu h100 --gpus 2
      tuner chat work_dirs/NAME/TIME
    """


class _Output(FileIO):
    """Standard output; an error of it names it, so that it differs from one of a file."""

    NAME = "the standard output"

    @classmethod
    def wrapped(cls, stream: TextIOWrapper) -> TextIOWrapper:
        """Return standard output as a stream of text. What its encoding cannot show is written as codes."""
        raw = cls(stream.fileno(), "wb", closefd=False)
        return TextIOWrapper(BufferedWriter(raw), stream.encoding, _AS_CODES, line_buffering=stream.line_buffering)

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = self.NAME
            raise


def _open_closed_streams() -> None:
    """Let what was closed at the start (`>&-`, a daemon) lead nowhere: the next file would get its number.

    Ranks write to number 1, whatever file it is.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


def _wants_json() -> bool:
    return "--json" in sys.argv


def _shown(error: TunerError) -> str:
    """Return an error as a message, or with --json as one JSON object: standard output stays the command's answer."""
    if not _wants_json():
        codes = dict.fromkeys(mistake.code for mistake in error.each())
        return "\n".join((*error.for_people(), f"More: tuner explain {' '.join(codes)}"))
    import json  # only on the way to an error

    return json.dumps({"version": JSON_VERSION, "error": error.to_json()})


def main() -> None:
    """Run the command line. A user's mistake is one message and its exit code; a bug of ours keeps its traceback."""
    debug = "--debug" in sys.argv
    _open_closed_streams()
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout is sys.__stdout__:
        sys.stdout = _Output.wrapped(sys.stdout)
    if isinstance(sys.stderr, TextIOWrapper):
        sys.stderr.reconfigure(errors=_AS_CODES)
    show_on(sys.stderr)
    try:
        tuner(prog_name="tuner")
    except TunerError as error:
        if debug:
            raise
        if not speaks(os.environ) and error.exit_code == 2:
            # All tasks make the same mistake: the first tells it, and srun --kill-on-bad-exit or mpirun ends the others
            # here. The task that nobody has ended is alone with its mistake, such as a path that its node lacks.
            time.sleep(_LET_THE_FIRST_SPEAK_S)
            if not _wants_json():
                click.echo(f"On {platform.node()}:", err=True)
        click.echo(_shown(error), err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        is_full = error.errno in DISK_IS_FULL
        if debug or not (is_full or (error.filename and is_disk_error(error))):
            raise
        if error.filename == _Output.NAME:  # Python would flush it once more
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        problem = f"cannot {'write' if is_full else 'use'} {error.filename or 'a file'}: {error.strerror}"
        failure = DiskError(problem, fix="Free space." if is_full else "Name another path, or mend this one.")
        click.echo(_shown(failure) if _wants_json() else "\n".join(failure.for_people()), err=True)
        sys.exit(failure.exit_code)

"""`tuner convert`: XTuner's words for what `tuner export` does."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import click

from tuner.cli import complete
from tuner.cli.help import Command
from tuner.cli.options import OptionValue, all_of, debug_option, json_option
from tuner.cli.say import say
from tuner.errors import UsageError, did_you_mean

_KINDS = ("pth_to_hf", "merge")
_Path = click.Path(path_type=Path)


class _Conversions(click.Group):
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] == "split":
            fix = (
                "Not needed: weight files of any size are read. To split a run's result: tuner export "
                "RUN DEST --max-shard-size 2GB."
            )
            raise UsageError("no conversion 'split'", where="tuner convert", fix=fix)
        if args[0] not in _KINDS and not args[0].startswith("-"):
            fix = did_you_mean(args[0], _KINDS) or "Known: pth_to_hf and merge; tuner export does both."
            raise UsageError(f"no conversion {args[0]!r}", where="tuner convert", fix=fix)
        return super().resolve_command(ctx, args)


@click.group(cls=_Conversions)
def command() -> None:
    """Export with XTuner's commands; each prints the `tuner export` that it runs."""


_options = all_of(
    click.option(
        "--max-shard-size", default="2GB", show_default=True, metavar="SIZE", help="Largest size of one weight file."
    ),
    click.option(
        "--safe-serialization",
        is_flag=True,
        expose_value=False,
        help="Accepted for XTuner's sake; weights are always safetensors.",
    ),
    json_option,
    debug_option,
)


@command.command("pth_to_hf", cls=Command, examples=("tuner convert pth_to_hf work_dirs/NAME/TIME my-model",))
@click.argument(
    "paths", nargs=-1, required=True, metavar="[CONFIG] SOURCE DEST", type=_Path, shell_complete=complete.files
)
@click.option("--fp32", is_flag=True, help="Write the weights in fp32.")
@_options
def pth_to_hf(paths: tuple[Path, ...], fp32: bool, max_shard_size: str, as_json: bool) -> None:
    """Export a trained model: SOURCE is a run directory or a checkpoint, DEST a new folder.

    XTuner's CONFIG argument is not needed: a run directory holds its recipe.
    """
    if len(paths) not in (2, 3):
        raise UsageError("pth_to_hf takes [CONFIG] SOURCE DEST", fix="Give a run directory or a checkpoint, and DEST.")
    source, dest = paths[-2:]
    words = ["--dtype", "fp32"] if fp32 else []
    words += ["--max-shard-size", max_shard_size]
    _export(source, dest, words, dtype="fp32" if fp32 else None, max_shard_size=max_shard_size, as_json=as_json)


@command.command("merge", cls=Command, examples=("tuner convert merge Qwen/Qwen3-8B work_dirs/NAME/TIME my-model",))
@click.argument("base", shell_complete=complete.files)
@click.argument("adapter", type=_Path, shell_complete=complete.files)
@click.argument("dest", type=_Path, shell_complete=complete.files)
@click.option(
    "--device",
    type=click.Choice(("cuda", "cpu", "auto")),
    expose_value=False,
    help="Accepted for XTuner's sake; no GPU is needed.",
)
@_options
def merge(
    base: str,
    adapter: Path,
    dest: Path,
    max_shard_size: str,
    as_json: bool,
) -> None:
    """Merge an adapter into its base model and write the whole model to DEST.

    BASE is a model's folder or an id on the hub; ADAPTER is a run directory or a folder with an adapter.
    """
    words = ["--merge", "--base", base, "--max-shard-size", max_shard_size]
    _export(adapter, dest, words, merge=True, base=base, max_shard_size=max_shard_size, as_json=as_json)


def _export(source: Path, dest: Path, words: Sequence[str], **options: OptionValue) -> None:
    """Print the `tuner export` command that does the same, with its flags `words`, and call it with its `options`."""
    if not options["as_json"]:
        say(f"Running: {shlex.join(('tuner', 'export', str(source), str(dest), *words))}")
    context = click.get_current_context()
    tuner = context.find_root().command
    assert isinstance(tuner, click.Group)
    export = tuner.get_command(context, "export")
    assert export is not None
    context.invoke(export, source=str(source), dest=dest, **options)

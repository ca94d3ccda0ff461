"""`tuner export`: a run's result as a user publishes it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from tuner.cli import complete
from tuner.cli.options import debug_option
from tuner.cli.say import say

if TYPE_CHECKING:
    from tuner.results.export import Exported


@click.command()
@click.argument("source", type=click.Path(path_type=Path), shell_complete=complete.files)
@click.argument("dest", type=click.Path(path_type=Path), shell_complete=complete.files)
@click.option("--merge", is_flag=True, help="Merge the adapter into its base, in the base's precision.")
@click.option(
    "--base", metavar="PATH", shell_complete=complete.files, help="Where the base is, if not where it was in training."
)
@click.option(
    "--dtype", type=click.Choice(("bf16", "fp16", "fp32")), help="Type of the weights.  [default: as they are]"
)
@click.option("--max-shard-size", default="5GB", show_default=True, metavar="SIZE", help="Of one file of weights.")
@click.option(
    "--as", "layout", type=click.Choice(("llama", "gguf")), help="InternLM in Llama's layout; GGUF for Ollama."
)
@debug_option
def command(
    source: Path,
    dest: Path,
    merge: bool,
    base: str | None,
    dtype: str | None,
    max_shard_size: str,
    layout: Literal["llama", "gguf"] | None,
) -> None:
    """Write what SOURCE trained to the folder DEST, for transformers and peft alone.

    SOURCE is a run directory (its result, or its newest checkpoint), or a checkpoint of any ZeRO level. No GPU is
    needed; with --merge, the base is read a tensor at a time. DEST gets safetensors, config, tokenizer, chat template,
    generation config, a model card, and a manifest with the hash of every tensor; with --as gguf, one GGUF file, which
    llama.cpp's converter writes of the whole model (an adapter is merged), and a Modelfile for Ollama.
    """
    from tuner.fit.sizes import parse_bytes
    from tuner.results.saved import check_dest, find
    from tuner.worker.quiet import quiet_libraries

    most = parse_bytes(max_shard_size, "--max-shard-size")
    check_dest(dest)
    found = find(source)
    say(f"Exporting {found.description}.")
    quiet_libraries()
    from tuner.results import gguf  # torch
    from tuner.results.export import Options, export

    started = time.monotonic()
    options = Options(merge, dtype, most, base, layout or "published")
    if layout == "gguf":
        done = gguf.export_gguf(found, dest, options, os.environ)
        _tell_gguf(dest, done, time.monotonic() - started)
    else:
        done = export(found, dest, options)
        _tell(dest, done, time.monotonic() - started)


def _tell_gguf(dest: Path, done: Exported, seconds: float) -> None:
    say(f"Wrote {dest}: {dest.name}.gguf, {_size(done)}, and a Modelfile, {seconds:.0f} s.")
    if done.compared:
        click.echo(done.compared)
    say(f"Next: ollama create {dest.name.lower()} -f {dest / 'Modelfile'}")


def _size(done: Exported) -> str:
    return f"{done.num_bytes / 1e9:.2f} GB" if done.num_bytes > 1e7 else f"{done.num_bytes / 1e6:.2f} MB"


def _tell(dest: Path, done: Exported, seconds: float) -> None:
    files = "one file" if done.num_files == 1 else f"{done.num_files} files"
    say(
        f"Wrote {dest}: {done.num_tensors} tensors, {_size(done)} in {files}, every one read back, {seconds:.0f} s. "
        "manifest.json has their hashes, README.md is the model card."
    )
    if done.compared:
        click.echo(done.compared)
    if done.private_base:
        say(
            f"Others cannot load its base from here ({done.private_base}): name its id on the hub, --base ORG/MODEL, "
            "or write a whole model, --merge."
        )
    if done.needs_tuner and done.kind == "adapter":
        say(
            "transformers and vLLM alone do not know its base, and its layers have Llama's names: elsewhere it fits "
            "the base written as Llama (tuner export BASE DEST --as llama), or write a whole model, --merge --as llama."
        )
    elif done.needs_tuner:
        say(
            "It has its publisher's layout, which transformers and vLLM alone do not know, and none of its publisher's "
            "code: for them, write it as Llama, --as llama."
        )

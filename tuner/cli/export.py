"""`tuner export`: a run's result as a user publishes it."""

from __future__ import annotations

import time
from pathlib import Path

import click

from tuner.cli import complete
from tuner.cli.say import say


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
@click.option("--as", "layout", type=click.Choice(("llama",)), help="Write InternLM in Llama's layout.")
@click.option("--debug", is_flag=True, help="Show tracebacks of users' mistakes too.")
def command(
    source: Path,
    dest: Path,
    merge: bool,
    base: str | None,
    dtype: str | None,
    max_shard_size: str,
    layout: str | None,
    debug: bool,
) -> None:
    """Write what SOURCE trained to the folder DEST, for transformers and peft alone.

    SOURCE is a run directory (its result, or its newest checkpoint), or a checkpoint of any ZeRO level. No GPU is
    needed; with --merge, the base is read a tensor at a time. DEST gets safetensors, config, tokenizer, chat template,
    generation config, a model card, and a manifest with the hash of every tensor.
    """
    run(source, dest, merge=merge, base=base, dtype=dtype, max_shard_size=max_shard_size, as_llama=layout == "llama")


def run(
    source: Path,
    dest: Path,
    *,
    merge: bool,
    base: str | None,
    dtype: str | None,
    max_shard_size: str,
    as_llama: bool = False,
) -> None:
    """Export, and print what was written."""
    from tuner.fit.sizes import parse_bytes
    from tuner.results.source import check_dest, find
    from tuner.worker.quiet import hush

    most = parse_bytes(max_shard_size, "--max-shard-size")
    check_dest(dest)
    found = find(source)
    say(f"Exporting {found.told}.")
    hush()
    from tuner.results.export import Options, export  # torch

    started = time.monotonic()
    done = export(found, dest, Options(merge, dtype, most, base, as_llama))
    size = f"{done.num_bytes / 1e9:.2f} GB" if done.num_bytes > 1e7 else f"{done.num_bytes / 1e6:.2f} MB"
    files = "one file" if done.num_files == 1 else f"{done.num_files} files"
    say(
        f"Wrote {dest}: {done.num_tensors} tensors, {size} in {files}, every one read back, "
        f"{time.monotonic() - started:.0f} s. manifest.json has their hashes, README.md is the model card."
    )
    if done.compared:
        click.echo(done.compared)
    if done.kind == "adapter" and done.base and not done.base.hub_id:
        say(
            f"Others cannot load its base from here ({done.base.path}): name its id on the hub, --base ORG/MODEL, "
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

"""`tuner export`: a run's result as a user publishes it."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from tuner.cli import complete
from tuner.cli.help import Command
from tuner.cli.models import SOURCE
from tuner.cli.options import debug_option, json_option, remote_code_option
from tuner.cli.say import say, say_json
from tuner.errors import DiskError, Text, UsageError
from tuner.files import JsonObject, scratch_folder
from tuner.fit.sizes import parse_bytes

if TYPE_CHECKING:
    from tuner.hub.push import Repository
    from tuner.results.export import Exported, Options
    from tuner.results.saved import SavedModel


@click.command(
    cls=Command,
    examples=(
        "tuner export work_dirs/NAME/TIME my-model --merge",
        "tuner export work_dirs/NAME/TIME my-model --quant fp8",
        "tuner export work_dirs/NAME/TIME my-model --as gguf --quant q4_k_m",
    ),
    json_keys={
        "tuner export RUN DEST --json": (
            "`source`, `kind`, `written`, `tensors`, `files`, `bytes`, `seconds`, `compared`, `quantized`, "
            "`private_base`, `needs_tuner`, `uploaded`"
        ),
    },
)
@click.argument("source", type=SOURCE)
@click.argument("dest", required=False, type=click.Path(path_type=Path), shell_complete=complete.files)
@click.option("--merge", is_flag=True, help="Merge the LoRA adapter into its base model, in the base's precision.")
@click.option(
    "--base",
    metavar="PATH",
    shell_complete=complete.files,
    help="The base model, if it has moved since training.",
)
@click.option(
    "--dtype", type=click.Choice(("bf16", "fp16", "fp32")), help="Type of the exported weights. [default: unchanged]"
)
@click.option("--max-shard-size", default="5GB", metavar="SIZE", help="Largest size of one weight file.")
@click.option(
    "--as",
    "layout",
    type=click.Choice(("llama", "gguf", "xtuner", "llava")),
    help="gguf: one file for Ollama and llama.cpp. llama: InternLM with Llama's names. xtuner, llava: a LLaVA in the "
    "layout of XTuner, or of LLaVA's own code.",
)
@click.option(
    "--quant",
    metavar="NAME",
    help="Weights in fewer bits. By torchao: fp8, nvfp4, or int4 (on an NVIDIA GPU). With --as gguf: q8_0, q6_k, "
    "q5_k_m, q4_k_m, q4_0 ...",
)
@click.option(
    "--data",
    metavar="PATH",
    shell_complete=complete.files,
    help="Rows to measure the perplexity on before and after --quant. [default: the run's validation rows]",
)
@click.option(
    "--push",
    "repository_name",
    metavar="OWNER/NAME",
    help="Upload the export to the Hugging Face hub; DEST may then be left out.",
)
@click.option("--private", is_flag=True, help="Create the repository of --push as a private one.")
@remote_code_option
@json_option
@debug_option
def command(
    source: str,
    dest: Path | None,
    merge: bool,
    base: str | None,
    dtype: str | None,
    max_shard_size: str,
    layout: Literal["llama", "gguf", "xtuner", "llava"] | None,
    quant: str | None,
    data: str | None,
    repository_name: str | None,
    private: bool,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Export a trained model to a folder that transformers, peft, vLLM or Ollama load without tuner.

    SOURCE is a run directory (its result, or its newest checkpoint), or a checkpoint of any ZeRO level. DEST is a new
    folder: it gets safetensors, config, tokenizer, chat template, a model card and a manifest with hashes. No GPU is
    needed; --merge reads the base one tensor at a time. With --as gguf, DEST gets one GGUF file (an adapter is merged
    first) and a Modelfile for Ollama. --quant writes a whole model in fewer bits (an adapter is merged first).

    --push uses your `hf auth login` token or HF_TOKEN, and checks its write permission first.
    """
    from tuner.results.saved import check_dest, find
    from tuner.worker.quiet import quiet_libraries

    max_shard_bytes = parse_bytes(max_shard_size, "--max-shard-size")
    if dest is None and repository_name is None:
        raise UsageError("missing DEST", where="tuner export", fix="Give an output folder, or --push OWNER/NAME.")
    if private and repository_name is None:
        raise UsageError("--private needs --push", where="--private", fix="Add --push OWNER/NAME.")
    if dest:
        check_dest(dest)
    saved = find(Path(source), trust_remote_code=trust_remote_code)
    if not as_json:
        say(f"Exporting {saved.description}.")
    if repository_name:  # an upload can take an hour: the hub's own progress bars tell how far it is
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "0")
    quiet_libraries()
    from tuner.hub.push import check
    from tuner.results.export import Options  # torch

    kind = quant and quant.lower()
    options = Options(
        merge=merge,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        base=base,
        layout=layout or "published",
        quant=kind,
        data=data,
        name=repository_name,
    )
    repository = check(repository_name, options.layout, private=private) if repository_name else None
    if dest:
        _export(saved, dest, options, repository, kept=True, as_json=as_json)
        return
    assert repository is not None
    with scratch_folder(Path(tempfile.gettempdir()), "tuner-export-") as temporary:
        folder = temporary / repository.name.split("/")[1]
        try:
            _export(saved, folder, options, repository, kept=False, as_json=as_json)
        except DiskError as error:
            error.fix = Text("Free space, set TMPDIR to a folder on another disk, or give DEST there.")
            raise


def _export(
    saved: SavedModel, dest: Path, options: Options, repository: Repository | None, *, kept: bool, as_json: bool
) -> None:
    """Export to `dest`, and upload that; `kept` where the user named the folder."""
    from tuner.hub.push import upload
    from tuner.results.export import export

    started = time.monotonic()
    done = export(saved, dest, options, os.environ)
    seconds = time.monotonic() - started
    if as_json:
        url = upload(dest, done.private_base, repository, kept=kept) if repository else None
        say_json(_answer(saved, dest if kept else None, done, seconds, url))
        return
    if done.modelfile:
        _tell_gguf(dest, done, done.modelfile, seconds)
    else:
        _tell(dest if kept else None, done, seconds, pushed=repository is not None)
    if repository:
        say(f"Uploading to {repository.name}.")
        url = upload(dest, done.private_base, repository, kept=kept)
        say(f"Uploaded: {url}. Its card has no license: add the one that follows from the base and the data.")


def _answer(saved: SavedModel, dest: Path | None, done: Exported, seconds: float, url: str | None) -> JsonObject:
    """Return what --json prints; the folder of an upload alone is gone by then."""
    files = [path for path in (dest, done.modelfile) if path]
    return {
        "source": saved.description,
        "kind": done.kind,
        "written": [str(path) for path in files],
        "tensors": done.num_tensors,
        "files": done.num_files,
        "bytes": done.num_bytes,
        "seconds": round(seconds, 1),
        "compared": done.compared,
        "quantized": done.losses.to_json() if done.losses else None,
        "private_base": done.private_base,
        "needs_tuner": done.needs_tuner,
        "uploaded": url,
    }


def _tell_gguf(dest: Path, done: Exported, modelfile: Path, seconds: float) -> None:
    say(f"Wrote {dest}: {dest.name}.gguf, {_size(done)}, and a Modelfile, {seconds:.0f} s.")
    if done.compared:
        click.echo(done.compared)
    say(f"Next: ollama create {dest.name.lower()} -f {modelfile}")


def _size(done: Exported) -> str:
    return f"{done.num_bytes / 1e9:.2f} GB" if done.num_bytes > 1e7 else f"{done.num_bytes / 1e6:.2f} MB"


def _tell(dest: Path | None, done: Exported, seconds: float, *, pushed: bool) -> None:
    files = "one file" if done.num_files == 1 else f"{done.num_files} files"
    say(
        f"Wrote {dest or 'a temporary folder'}: {done.num_tensors} tensors, {_size(done)} in {files}, "
        f"verified by reading them back, {seconds:.0f} s. manifest.json has their hashes, README.md is the model card."
    )
    for sentence in filter(None, (done.compared, done.losses)):
        click.echo(sentence)
    if done.losses and done.losses.tokens is None:
        say("Its perplexity before and after: --data FILE.")
    if done.private_base and not pushed:  # an upload is refused
        say(
            f"Its base is a local folder ({done.private_base}) that others cannot load: give its id "
            "on the hub, --base ORG/MODEL, or write a whole model, --merge."
        )
    if done.needs_tuner and done.kind == "adapter":
        say(
            "transformers and vLLM cannot load its base as it is. The adapter uses Llama's layer names and fits "
            "the base written as Llama (tuner export BASE DEST --as llama), or write a whole model, --merge --as llama."
        )
    elif done.needs_tuner:
        say(
            "It has its publisher's layout, but not its publisher's code, so transformers and vLLM cannot load it. For "
            "them, write it as Llama: --as llama."
        )

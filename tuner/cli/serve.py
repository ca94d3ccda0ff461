"""`tuner serve`: a model behind an OpenAI-style address on this machine."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
from typing import Literal

import click

from tuner.cli.help import Command
from tuner.cli.models import model_options
from tuner.cli.say import say, say_json
from tuner.errors import MachineError, UsageError
from tuner.machine.hardware import detect, tool_path


@click.command(
    cls=Command,
    examples=("tuner serve work_dirs/NAME/TIME --port 8000",),
    json_keys={
        "tuner serve RUN --json": (
            "a first line, when it answers: `address`, `model`, `api_key` (if it made one), `engine`"
        ),
    },
    uses={
        "clients of OpenAI": "`tuner serve RUN`",
    },
)
@model_options
@click.option("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0: all interfaces.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, help="Port to listen on.")
@click.option("--name", metavar="NAME", help="Name of the model in requests. [default: the folder's name]")
@click.option(
    "--api-key",
    metavar="KEY",
    envvar="TUNER_API_KEY",
    show_envvar=True,
    help="What clients send as api_key. [default: a new key, which is printed]",
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    metavar="NAME",
    multiple=True,
    help="Answer requests to this host name too; repeatable. [default: this machine's address and name]",
)
@click.option(
    "--engine",
    type=click.Choice(("transformers", "vllm")),
    help="Library that generates. [default: vllm if it is installed and a GPU is here, else transformers]",
)
@click.option("--json", "as_json", is_flag=True, help="Print a first line of JSON: the address, the model, the key.")
def command(
    source: str,
    adapter: str | None,
    trust_remote_code: bool,
    bits: int | None,
    host: str,
    port: int,
    name: str | None,
    api_key: str | None,
    allowed_hosts: tuple[str, ...],
    engine: Literal["transformers", "vllm"] | None,
    as_json: bool,
) -> None:
    """Serve a trained model, or any other one, to OpenAI clients at http://HOST:PORT/v1.

    SOURCE is a run directory (its result, or its newest checkpoint), a checkpoint, a model's folder, or an id on the
    hub. The chat template is that of training. A request needs the server's key. Press Ctrl-C to stop.
    """
    from tuner.worker.quiet import quiet_libraries

    quiet_libraries()
    if name is not None and not re.fullmatch(r"\w[\w.-]*", name):
        raise UsageError(
            f"{name!r} is not a valid model name", where="--name", fix="Use letters, digits, '-', '_' and '.'."
        )
    hardware, vllm = detect(os.environ), shutil.which("vllm", path=tool_path(os.environ))
    if engine == "vllm" and not vllm:
        raise MachineError("vllm is not installed", where="--engine", fix="Install it: pip install vllm.")
    by_vllm = bool(vllm and hardware.gpus and not bits) if engine is None else engine == "vllm"
    if by_vllm and bits:
        raise UsageError("vllm loads weights as they are stored", where="--bits", fix="Use: --engine transformers.")
    from tuner.results import serve  # torch

    serve.check_installed(by_vllm=by_vllm)
    key = serve.new_key() if api_key is None else api_key
    serve.check_key(key)
    from tuner.results.chat import check_can_answer
    from tuner.results.loaded_model import encoder_of, spec_of

    spec = spec_of(source, adapter, trust_remote_code=trust_remote_code)
    check_can_answer(spec, encoder_of(spec))
    serve.check_servable(spec, by_vllm=by_vllm)
    called = name or serve.name_of(adapter or source)
    address = serve.Address(host, port, key, (*allowed_hosts, socket.gethostname()))

    def on_open() -> None:
        where = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        if as_json:
            by = "vllm" if by_vllm else "transformers"
            new_key = key if api_key is None else None  # a key of the user's own is not printed
            say_json({"address": where, "model": called, "api_key": new_key, "engine": by}, is_first=True)
            return
        say(f"Serving {spec.description} as {called!r} at {where}. Stop it with Ctrl-C.", err=True)
        if api_key is None:
            say(f"Its key, for clients (OPENAI_API_KEY): {key}", err=True)

    program = str(vllm) if by_vllm else None
    is_over = serve.run(spec, called, address, hardware, bits, program, on_open)
    say("Stopped.", err=True)
    if not is_over:  # a step of a large model on a CPU takes minutes, and no thread can be ended
        sys.stderr.flush()
        os._exit(0)

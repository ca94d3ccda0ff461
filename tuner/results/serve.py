"""Serves a model with OpenAI's protocol, by transformers' server or by vLLM; `Server` is one in a process of its own.

No weights are copied: an adapter's files and those of its base are linked into one temporary folder.
"""

from __future__ import annotations

import atexit
import contextlib
import re
import signal
import subprocess  # effect: the server is a process of its own, which outlives no program
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import transformers
from transformers.utils.import_utils import is_serve_available

from tuner import paths
from tuner.data import images
from tuner.data.formats import image_places
from tuner.data.formats.cells import Misfit
from tuner.data.image_encoder import ImageEncoder
from tuner.errors import DataError, MachineError, ModelError, TunerError, UsageError
from tuner.machine.hardware import Hardware
from tuner.models.arguments import pinned
from tuner.results import compat
from tuner.results.base_model import folder_of
from tuner.results.loaded_model import ModelSpec, dtype_of, encoder_of, quantization_of
from tuner.results.peft_adapter import STEM, read_config
from tuner.results.tensors import Stored
from tuner.runs.follow import tail

if TYPE_CHECKING:
    import PIL.Image
    from transformers.cli.serving.utils import Modality

    from tuner.data.encoder import Encoder

_TEXTS = ("text", "input_text", "output_text", "refusal")
_IMAGES = ("image_url", "input_image")
_Request = Sequence[dict[str, Any]]
"""The messages of a request, as OpenAI's clients send them."""


def name_of(source: str) -> str:
    """Return a model's default name in requests: the name of its folder."""
    return re.sub(r"[^\w.-]", "-", Path(source).resolve().name)


def check_installed() -> None:
    """Check that the packages for transformers' server are installed.

    Raises:
        MachineError: they are not.
    """
    if not is_serve_available():
        fix = "Install it: pip install 'tuner-deepspeed[serve]', or pip install 'transformers[serving]'; or vllm."
        raise MachineError("transformers' server needs packages that are not installed", fix=fix)


def check_servable(spec: ModelSpec) -> None:
    """Check that a server can load the adapter: both servers support only LoRA weights.

    Raises:
        ModelError: the adapter has other weights.
    """
    if spec.adapter is None:
        return
    others = [name for name in Stored(spec.adapter, STEM).shapes if ".lora_" not in name]
    if others:
        problem = f"{spec.description} hold {others[0]}, and servers support only LoRA weights"
        raise ModelError(problem, where="SOURCE", fix="Serve the whole model: tuner export SOURCE DEST --merge.")


def run_transformers(spec: ModelSpec, name: str, host: str, port: int, hardware: Hardware, bits: int | None) -> None:
    """Serve until SIGINT or SIGTERM; the model's id is `name`.

    Raises:
        ModelError: transformers does not have the model's architecture.
    """
    from transformers.cli.serve import Serve  # an extra
    from transformers.cli.serving.model_manager import ModelManager

    config = transformers.AutoConfig.from_pretrained(spec.path, **pinned(spec.model))
    if not hasattr(transformers, config.architectures[0]):  # where the server looks it up
        problem = f"transformers' server does not support {config.architectures[0]}"
        raise ModelError(
            problem, where="SOURCE", fix="Serve it as Llama: tuner export SOURCE DEST --as llama (--merge)."
        )
    block = quantization_of(spec, bits)
    encoder = encoder_of(spec)
    _read_images(encoder)
    if isinstance(encoder, ImageEncoder):
        encoder.render_images()
        compat.use_processor(ModelManager, encoder.processor)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # effect: removes the folder of links first
    try:
        with _folder(spec, name) as model:
            # transformers 5.23 would list the hub's cache, which is not served, and fails without a cache.
            listed = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "tuner"}
            ModelManager.get_gen_models = staticmethod(lambda cache_dir=None: [listed])
            Serve(
                force_model=model,
                dtype=str(dtype_of(spec, hardware)).removeprefix("torch."),
                quantization=f"bnb-{block.bits}bit" if block else None,
                device="auto" if hardware.gpus else "cpu",
                trust_remote_code=spec.model.trust_remote_code,
                host=host,
                port=port,
                log_level="error",
            )
    except KeyboardInterrupt:
        pass


@contextmanager
def _folder(spec: ModelSpec, name: str) -> Iterator[str]:
    """Create a folder of links to the model's files, change to its parent folder, and yield its name."""
    local = paths.local(spec.path)
    if local is None and spec.adapter is None:
        yield f"{spec.path}@{spec.model.revision or 'main'}"
        return
    base = folder_of(spec.model).resolve()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / name
        folder.mkdir()
        for source in (spec.adapter.resolve(), base) if spec.adapter else (base,):
            for file in source.iterdir():
                if (
                    file.is_file() and not (folder / file.name).exists()
                ):  # the adapter's tokenizer and template have priority
                    (folder / file.name).symlink_to(file)
        with chdir(temporary):
            yield name


def vllm_argv(vllm: str, spec: ModelSpec, name: str, host: str, port: int) -> list[str]:
    """Return the command that serves the model with vLLM.

    Raises:
        ModelError: it has a DoRA adapter, which vLLM does not support.
    """
    revision = ["--revision", spec.model.revision] if spec.model.revision else []
    trusted = ["--trust-remote-code"] if spec.model.trust_remote_code else []
    argv = [vllm, "serve", spec.path, "--host", host, "--port", str(port), *revision, *trusted]
    if spec.adapter is None:
        return [*argv, "--served-model-name", name]
    config = read_config(spec.adapter)
    if config.use_dora:
        problem = f"{spec.description} use DoRA, which vLLM does not support"
        raise ModelError(problem, where="SOURCE", fix="Serve the whole model: tuner export SOURCE DEST --merge.")
    rank = max(8, 1 << (max([config.r, *config.rank_pattern.values()]) - 1).bit_length())  # vLLM accepts powers of two
    argv += ["--enable-lora", "--max-lora-rank", str(rank), "--lora-modules", f"{name}={spec.adapter}"]
    template = spec.adapter / "chat_template.jinja"
    argv += ["--chat-template", str(template)] if template.is_file() else []
    has_generation = (spec.adapter / "generation_config.json").is_file()
    return argv + (["--generation-config", str(spec.adapter)] if has_generation else [])


_POLL_S, _STOP_S = 0.2, 20.0
_MAX_LINES = 5


class Server:
    """A model server with OpenAI's protocol, until `stop()` or the end of a `with` block.

    Attributes:
        url: The address, such as http://127.0.0.1:8000/v1.
        name: The model's name in requests.
    """

    def __init__(self, argv: Sequence[str], url: str, name: str) -> None:
        """Start the server, and return when it answers.

        Args:
            argv: The arguments of `tuner serve`.
            url: Its address.
            name: The model's name in requests.

        Raises:
            UsageError: another server uses the address.
            TunerError: the server ended before it answered; the error holds its last lines of output.
        """
        self.url, self.name = url, name
        if self._answers():
            fix = "Use another port, or stop that server."
            raise UsageError(f"another server answers at {url}", where="port", fix=fix)
        self._log = tempfile.NamedTemporaryFile(prefix="tuner-serve-", suffix=".log")  # noqa: SIM115  closed by stop
        command = [sys.executable, "-m", "tuner", "serve", *argv]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT)
        atexit.register(self.stop)
        try:
            while not self._answers():
                if self._process.poll() is not None:
                    raise TunerError(f"the server of {name} ended: {self._last_lines()}")
                time.sleep(_POLL_S)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the server; do nothing if it has ended."""
        atexit.unregister(self.stop)
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "stopped" if self._process.poll() is not None else "serving"
        return f"Server({self.name!r} at {self.url}, {state})"

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/models", timeout=_POLL_S * 10) as reply:  # noqa: S310  http, ours
                return bool(reply.status == 200)
        except OSError:  # the server is not listening yet
            return False

    def _last_lines(self) -> str:
        lines = [line for line in tail(Path(self._log.name)).splitlines() if line.strip()]
        return " ".join(lines[-_MAX_LINES:]) or f"exit code {self._process.returncode}"


# The images of requests: read as in training, from data URIs alone. The server itself would download addresses and
# open files of this machine, and leave out the images for a model of text.


def _read_images(encoder: Encoder) -> None:
    """Make transformers' server in this process read the images of requests with `encoder`.

    A request gets status 400 if one of its images is no data URI, if it has an image for a model of text alone, or if a
    text holds the model's placeholder of an image.
    """
    from transformers.cli.serving.utils import BaseHandler  # an extra

    as_it_was = BaseHandler.get_processor_inputs_from_messages

    def with_images(messages: _Request, modality: Modality) -> _Request:
        opened = iter(_opened(messages, encoder))
        turns: _Request = as_it_was(list(messages), modality)
        for part in _parts(turns):
            if part["type"] == "image":
                part["image"] = next(opened)
                del part["url"]
        return turns

    BaseHandler.get_processor_inputs_from_messages = staticmethod(with_images)


def _parts(messages: _Request) -> Iterator[dict[str, Any]]:
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and "tool_calls" not in message:  # the server ignores the content beside calls
            yield from content


def _texts(messages: _Request) -> Iterator[str]:
    yield from (content for message in messages if isinstance(content := message.get("content"), str))
    yield from (text for part in _parts(messages) if isinstance(text := part.get("text"), str))


def _opened(messages: _Request, encoder: Encoder) -> list[PIL.Image.Image]:
    """Return the images of the messages in their order."""
    from fastapi import HTTPException  # an extra

    try:
        if isinstance(encoder, ImageEncoder) and any(encoder.image_token in text for text in _texts(messages)):
            raise Misfit(f"a text holds {encoder.image_token!r}, which stands for an image in this model")
        return [_image(part, encoder) for part in _parts(messages) if part["type"] not in _TEXTS]
    except (Misfit, DataError) as error:
        raise HTTPException(400, error.what if isinstance(error, DataError) else str(error)) from error


def _image(part: dict[str, Any], encoder: Encoder) -> PIL.Image.Image:
    if part["type"] not in _IMAGES:
        raise Misfit(f"this server reads text and images, and no {part['type']!r}")
    if not isinstance(encoder, ImageEncoder):
        raise Misfit("the request has an image, and this model reads text alone")
    address = part.get("image_url")
    address = address.get("url") if isinstance(address, dict) else address
    image = image_places.of_data_uri(address) if isinstance(address, str) else None
    if image is None:
        raise Misfit(
            "an image must be a data URI (data:image/png;base64,...): this server opens no files and addresses"
        )
    return encoder.fitted(images.load(image))

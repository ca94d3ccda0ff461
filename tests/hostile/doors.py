"""Where outside input comes in: for each kind, the functions that the command line calls with it.

A door takes what its strategy gives and says whether it was refused, in one message, or taken.
Anything else that comes out is a bug of ours. It writes what the input itself is, and nothing more.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from hypothesis import strategies as st

from tests.hostile import strategies, watch
from tests.launch.plans import CPU, made
from tests.runs.made_records import run_json
from tests.tiny_model import tiny
from tuner import assets, remote_code, vocabulary
from tuner.errors import TunerError
from tuner.importers import tools
from tuner.launch.checks import model_files
from tuner.launch.meeting import messages, secret_lines
from tuner.launch.meeting.leader import Leader
from tuner.machine import hostfile
from tuner.machine.launchers import resolve
from tuner.machine.topology import LAUNCHERS, LaunchFlags, Topology
from tuner.recipes import catalog, loading, model_facts, names, path_checks, starting_weights
from tuner.recipes.recipe import Overrides
from tuner.report import gathered, page
from tuner.results import saved
from tuner.results.serving import requests
from tuner.runs import checkpoints, creation, directory, listing, lock, metrics
from tuner.zero import choice, jsonfile, lint

TINY = "tiny_full_sample_e1"
_MAX_MESSAGE = 13_000
# What an operating system or a library says for itself would be news to a user; only its words may be quoted.
LEAKS = re.compile(r"Traceback|<[\w.]+ object at 0x|\.py\", line")


@dataclass(frozen=True)
class Door:
    """A kind of input: how it is made, and the function that takes it below a folder of its own."""

    kind: str
    strategy: st.SearchStrategy[Any]
    share: float
    """The part of all generated inputs that are of this kind."""
    enter: Callable[[Path, Any], object]
    prepare: Callable[[Path, Any], Any] | None = None

    def refuses(self, folder: Path, given: Any) -> bool:
        """Say whether the input is refused.

        Raises:
            AssertionError: it has an effect, or the message is none that a user can read.
        """
        ready = self.prepare(folder, given) if self.prepare else given
        with watch.effects() as seen:
            try:
                self.enter(folder, ready)
            except TunerError as error:
                _assert_readable(error)
                return True
            finally:
                assert not seen, seen
        return False


def _assert_readable(error: TunerError) -> None:
    assert error.exit_code in (2, 3, 74), error
    text = str(error)
    assert len(text) < _MAX_MESSAGE, text[:500]
    assert not LEAKS.search(text), text


def _written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    return path


def _as(name: str) -> Callable[[Path, Any], Path]:
    """Return what writes an input as the file of this name."""
    return lambda folder, content: _written(folder, name, content)


def _recipe(_: Path, path: Path) -> None:
    loading.load(str(path)).standalone()


def _override(_: Path, text: str) -> None:
    loading.load(TINY, Overrides(pairs=[("--set", text)]))


def _config(_: Path, path: Path) -> None:
    lint.check(jsonfile.read_json_config(path))


def _rows(_: Path, path: Path) -> None:
    from tuner.data import formats, sources

    placed = list(sources.find(str(path)).read())
    name = formats.detect([row for _, row in placed], str(path))
    for place, row in placed:
        formats.read_sample(name, row, place)


def _bomb(folder: Path, given: tuple[str, int, int]) -> Path:
    kind, size, count = given
    text, path = "ab" * (size * 2**19), folder / f"bomb{given[0]}"
    if kind in (".parquet", ".arrow"):
        import pyarrow as pa
        import pyarrow.parquet as pq

        texts = pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array([text]))
        table = pa.table({"text": texts})
        if kind == ".parquet":
            pq.write_table(table, path, compression="zstd")
        else:
            with pa.OSFile(str(path), "wb") as stream, pa.ipc.new_stream(stream, table.schema) as writer:
                writer.write_table(table)
        return path
    row = json.dumps({"text": text})
    content = {
        ".jsonl.gz": f"{row}\n" * count,
        ".json.gz": f"[{','.join([row] * count)}]",
        ".csv.gz": f"text\n{text}\n",
    }[kind]
    path.write_bytes(gzip.compress(content.encode(), 1))
    return path


def _tokenizer(_: Path, text: str) -> Any:
    from tests.data.conftest import CHATML, make_tokenizer
    from tuner.data import masks as masks  # importing torch has effects of its own

    return make_tokenizer(text + CHATML)


def _template(_: Path, tokenizer: Any) -> None:
    from tuner.data import templates

    templates.choose_template(tokenizer)


def _name(folder: Path, text: str) -> None:
    """Take a text for every thing that has a name."""
    _each(
        lambda: loading.load(text),
        lambda: choice.open_config(text, "--deepspeed"),
        lambda: catalog.chat_template(text),
        lambda: assets.asset(f"package:{text}"),
        lambda: path_checks.check_model(loading.load(TINY, Overrides(model=text)).config),
        lambda: path_checks.check_data(loading.load(TINY, Overrides(data=text)).config),
        lambda: checkpoints.require_valid(folder / text),
        lambda: creation.check_free(folder / text, resume=False),
    )


def _manifest(folder: Path, _: Path) -> None:
    run = folder / "run"
    checkpoints.newest_valid(run / "checkpoints")
    checkpoints.require_valid(run / "checkpoints" / "checkpoint-5")


def _checkpoint(folder: Path, text: str) -> Path:
    home = folder / "run" / "checkpoints" / "checkpoint-5"
    home.mkdir(parents=True, exist_ok=True)
    _written(home, "model.safetensors", b"weights")
    return _written(home, "manifest.json", text)


def _variables(_: Path, environ: dict[str, str]) -> None:
    _each(*(lambda launcher=launcher: resolve(LaunchFlags(launcher), environ, 0) for launcher in LAUNCHERS))


def _in(folder: Path, name: str, content: str | bytes) -> Path:
    """Write a file of a folder that is made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / name).parent.mkdir(parents=True)
    _written(folder, name, content)
    return folder


def _model(folder: Path, given: tuple[str, str]) -> Path:

    shutil.rmtree(folder / "it", ignore_errors=True)
    whole = shutil.copytree(tiny(), folder / "it")
    _written(whole, *given)
    return whole


def _each(*takes: Callable[[], object]) -> None:
    """Take an input by every function; each refusal by itself, the last of them raised."""
    last: TunerError | None = None
    for take in takes:
        try:
            take()
        except TunerError as error:
            _assert_readable(error)
            last = error
    if last:
        raise last


def _model_files(_: Path, model: Path) -> None:
    def plan() -> None:
        run = made(model=str(model))
        for check in (model_files.architecture, model_files.tokens, model_files.context, model_files.chat_template):
            list(check(run))

    _each(
        plan,
        lambda: list(model_files.missing_weights(model)),
        lambda: list(model_files.missing_layers(model, 2)),
        lambda: vocabulary.read_vocabulary(model),
        lambda: starting_weights.chat_template_of(model),
        lambda: remote_code.check(str(model), None),
        lambda: model_facts.why_unknown(model),
        lambda: loading.load("tiny_lora_sample_e1", Overrides(pairs=[("--set", f"adapter.path={model}")])),
    )
    model_facts.read_architecture(model)


def _loaded_model(_: Path, model: Path) -> None:
    from tuner.results import loaded_model, peft_adapter

    if (model / "adapter_config.json").is_file():
        peft_adapter.read_config(model)
    else:
        loaded_model.load(loaded_model.spec_of(str(model), None), CPU)


def _tensors(folder: Path, content: bytes) -> Path:
    from tuner.models import projectors as projectors  # importing torch has effects of its own
    from tuner.results import tensors as tensors

    return _written(_in(folder / "it", "config.json", "{}"), "model.safetensors", content)


def _read_tensors(_: Path, file: Path) -> None:
    from tuner.models import projectors
    from tuner.results.tensors import Stored

    _each(
        lambda: list(model_files.missing_weights(file.parent)),
        lambda: list(model_files.missing_layers(file.parent, 2)),
        lambda: Stored(file.parent),
        lambda: projectors.read_projector(file, trusts_pickles=False),
    )


def _hosts(_: Path, path: Path) -> None:
    hostfile.read_hostfile(path, None, None)


def _message(_: Path, text: str) -> None:
    """Take a line of a process that knows the run's secret, as node 0: as its first one, and after a node's hello."""

    async def read(*texts: str) -> None:
        reader, writer = asyncio.StreamReader(), MagicMock()
        writer.get_extra_info.return_value = ("10.0.0.2", 29_501)
        writer.transport.get_write_buffer_size.return_value = 0
        for number, body in enumerate(texts):
            reader.feed_data(f"{secret_lines.proof(b'', 'caller', str(number), body)}{body}\n".encode())
        reader.feed_eof()
        lines = secret_lines.Lines(reader, writer, b"", "folder", "called", "caller")
        try:
            await node_0._attend(lines, await messages.read(lines, 5))
        except messages.OtherVersion as error:
            raise error.refusal from None
        except secret_lines.Broken:
            pass

    line = text.encode(errors="replace").decode()
    for launched in (None, "first"):
        node_0 = Leader(Topology("local", 2, 0, 1, 2, master_addr="127.0.0.1", master_port=29_500), b"")
        node_0.launched, node_0.runs = launched, launched is not None
        asyncio.run(read(strategies.MESSAGES[0], line))
        asyncio.run(read(line))


def _variables_of_hosts(folder: Path, path: Path) -> None:
    hostfile.variables(folder / "home", path.parent, path.name)


def _tool_config(_: Path, path: Path) -> None:
    _each(
        lambda: names.identify(str(path)),
        *(lambda name=name: tools.import_config([str(path)], name) for name in (None, *tools.NAMES)),
    )


def _script(_: Path, path: Path) -> None:
    text = path.read_text(encoding="utf-8", errors="replace")
    _each(
        lambda: tools.import_config([str(path)]),
        lambda: tools.import_config([text]),
        lambda: tools.import_config(text.split() or [""]),
    )


def _listed_run(_: Path, folder: Path) -> None:
    _each(
        lambda: listing.below(folder),
        lambda: page.render(gathered.gather([folder])),
        lambda: metrics.every_line(directory.RunDirectory(folder)),
        lambda: metrics.latest(directory.RunDirectory(folder)),
        lambda: saved.find(folder).recipe(),
        lambda: lock.in_use(folder, lock.Holder.here({})),
    )


def _run(folder: Path, given: tuple[str, str]) -> Path:
    made = _in(folder / "run", "status.json", '{"state": "done", "exit_code": 0}')
    (made / "ranks").mkdir()
    for name, text in (
        ("run.json", run_json()),
        ("recipe.py", "_base_ = 'tiny_full_sample_e1'\n"),
        ("deepspeed.json", "{}"),
    ):
        _written(made, name, text)
    _written(made, *given)
    return made


def _saved_rows(_: Path, folder: Path) -> None:
    from tuner.data import sources

    list(sources.find(str(folder)).read())


def _request(_: Path, text: str) -> None:
    body = text.encode("utf-8", "surrogatepass")
    for kind in (requests.ChatRequest, requests.CompletionRequest):
        try:
            requests.refuse_not_generated(requests.read_request(kind, body))
        except requests.Refused as refused:
            assert 400 <= refused.status < 500
            assert len(refused.problem) < _MAX_MESSAGE
            assert json.dumps(refused.body())


DOORS = (
    Door("recipe file", strategies.recipes, 0.2, _recipe, _as("hostile.py")),
    Door("--set", strategies.overrides, 0.2, _override),
    Door("DeepSpeed JSON", strategies.configs, 0.2, _config, _as("ds.json")),
    Door(
        "data file", strategies.rows, 0.18, _rows, lambda folder, given: _written(folder, f"rows{given[0]}", given[1])
    ),
    Door("data that unfolds", strategies.bombs, 0.01, _rows, _bomb),
    Door("chat template", strategies.chat_templates, 0.01, _template, _tokenizer),
    Door("name or path", strategies.names, 0.03, _name),
    Door("manifest", strategies.manifests, 0.07, _manifest, _checkpoint),
    Door("launch variables", strategies.variables, 0.1, _variables),
    Door("model folder", strategies.model_files, 0.01, _model_files, _model),
    Door("model to load", strategies.model_files, 0.01, _loaded_model, _model),
    Door("safetensors", strategies.tensor_files, 0.02, _read_tensors, _tensors),
    Door("hostfile", strategies.hostfiles, 0.02, _hosts, _as("hostfile")),
    Door(".deepspeed_env", strategies.environments, 0.02, _variables_of_hosts, _as(".deepspeed_env")),
    Door(
        "YAML for DeepSpeed",
        strategies.launch_configs,
        0.02,
        lambda _, path: lint.check(choice.open_config(str(path), "--deepspeed")),
        _as("launch.yaml"),
    ),
    Door("config of another tool", strategies.tool_configs, 0.02, _tool_config, _as("config.yaml")),
    Door("config of XTuner", strategies.python_configs, 0.02, _tool_config, _as("config.py")),
    Door("script of another tool", strategies.scripts, 0.02, _script, _as("train.sh")),
    Door("recipe in YAML", strategies.recipe_documents, 0.02, _recipe, _as("hostile.yaml")),
    Door("file of a run", strategies.run_files, 0.02, _listed_run, _run),
    Door("request", strategies.requests, 0.02, _request),
    Door("message of a node", strategies.messages, 0.1, _message),
    Door(
        "saved data set", strategies.saved_data, 0.02, _saved_rows, lambda folder, given: _in(folder / "saved", *given)
    ),
)

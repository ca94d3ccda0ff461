"""The Python API: the functions behind the commands, for scripts and notebooks. Its names are those of `tuner` itself.

It decides nothing: a call becomes the same request that the command line makes, and both continue the same way. A `Run`
only reads what a run logged and saved, except that it may write a report.
The environment, the working directory and the random state of the caller do not change. Libraries are silent in calls
that load a model or data in this process, unless the caller has set otherwise.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, get_args, overload

from tuner import paths
from tuner.data import sources
from tuner.errors import Stopped, Text, TunerError, UsageError, brief_repr, visible
from tuner.files import JsonObject
from tuner.fit.sizes import parse_bytes
from tuner.hooks import recipe_of_other_tool
from tuner.launch import checking, planning, preflight, previewing
from tuner.launch.announcement import announcement
from tuner.launch.checking import CheckReport
from tuner.launch.execute import execute
from tuner.launch.machines import MachineFlags
from tuner.launch.meeting.joined import joined
from tuner.launch.planning import Plan
from tuner.launch.previewing import Preview
from tuner.launch.resolve import resolve_start
from tuner.launch.resolved_run import Request
from tuner.machine import hardware
from tuner.machine.hardware import detect
from tuner.machine.topology import LaunchFlags
from tuner.progress import show_on
from tuner.recipes import loading, names, python_calls
from tuner.recipes.names import Name, NameKind
from tuner.recipes.recipe import LoadArguments, Overrides, Recipe
from tuner.report import page
from tuner.results.saved import check_dest, find
from tuner.runs import checkpoints, listing, metrics
from tuner.runs.checkpoints import Checkpoint
from tuner.runs.directory import RunDirectory
from tuner.runs.states import State
from tuner.worker.quiet import quiet

# What loads torch is imported in the function that needs it.
if TYPE_CHECKING:
    from tuner.results.chat import Chat
    from tuner.results.evaluate import Evaluation
    from tuner.results.export import Exported
    from tuner.results.serve import Server

__all__ = [
    "Recipe",
    "Run",
    "RunFailed",
    "TunerError",
    "chat",
    "check",
    "evaluate",
    "export",
    "load_recipe",
    "plan",
    "preview_data",
    "serve",
    "train",
]

PathLike = str | os.PathLike[str]
OnOom = Literal["stop", "retry"]
DType = Literal["bf16", "fp16", "fp32"]
Format = Literal["published", "llama", "gguf"]
Bits = Literal[4, 8, 16]
Engine = Literal["transformers", "vllm"]
Source = PathLike | Recipe | None
"""A recipe's name or file, a model, or a `Recipe`. None: the overrides name a model."""
Data = PathLike | Sized
"""One or several paths or hub ids, or the rows themselves: a list of dicts, a Dataset, a DataFrame."""
_CHOICES = {"on_oom": OnOom, "dtype": DType, "format": Format, "bits": Bits, "engine": Engine}
_FROM_0 = ("max_restarts", "grace_s", "start_timeout_s", "temperature", "top_p", "seed", "generate", "num_fewshot")
_FROM_1 = ("gpus", "nodes", "nproc_per_node", "max_new_tokens", "max_rows", "batch_size", "port")
_LEAST = {**dict.fromkeys((*_FROM_0, "num_rows"), 0), **dict.fromkeys(_FROM_1, 1)}
"""The values that arguments of these names may have, in whichever function; a recipe's own keys are not among them."""
_FIRST_ROWS = 1_000

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _in_python_words(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return the function with checked arguments, and errors that name them (`data=`), not options of a command."""
    parameters = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            for name, value in kwargs.items():
                if name in parameters:
                    _check(name, value)
            return function(*args, **kwargs)
        except TunerError as error:
            for single_error in error.each():
                single_error.what, single_error.where, single_error.fix = (
                    _spoken(single_error.what),
                    _spoken(single_error.where),
                    _spoken(single_error.fix),
                )
            raise

    return call


@_in_python_words
def load_recipe(recipe: Source = None, *, allow_code: bool = False, **overrides: object) -> Recipe:
    """Return a recipe, merged and checked; nothing is started.

    Args:
        recipe: A composed name, a .py file, another tool's config, or a model's folder or hub id.
        allow_code: Run the code that a recipe file holds instead of refusing it.
        overrides: Values to change, by key or unique tail (`lr=1e-5`), by blocks (`train_cfg={"max_steps": 3}`), or by
            dotted path (`**{"train_cfg.max_steps": 3}`). `trust_remote_code=True` runs the code that comes with the
            model. `model`, `data`, `val`, `adapter`, `val_split`, `epochs`,
            `seed`, `method`, `batch_size`, `max_length`, `lora_rank`, `save_every`, `eval_every`, `report_to` and
            `nvme` mean what their options mean; `ds` is a dict of values for the DeepSpeed config. `data` and `val` may
            be the rows themselves: a list of dicts, a `datasets.Dataset` or a `pandas.DataFrame`.

    Raises:
        RecipeError: there is no such recipe, or a value does not fit it.
    """
    arguments = _load_arguments(recipe, overrides, allow_code)
    loaded = loading.load(arguments.name, arguments.overrides, allow_code=arguments.allow_code)
    return replace(loaded, warnings=_all_spoken(loaded.warnings), notes=_all_spoken(loaded.notes))


@_in_python_words
def plan(
    recipe: Source = None,
    *,
    deepspeed: PathLike | Mapping[str, object] | None = None,
    gpus: int | None = None,
    gpu: str | None = None,
    gpu_memory: str | None = None,
    nodes: int = 1,
    host_memory: str | None = None,
    interconnect: str | None = None,
    utilisation: float | None = None,
    allow_code: bool = False,
    **overrides: object,
) -> Plan:
    """Return what a recipe needs on each GPU and host at every ZeRO level, as `tuner plan` prints it.

    Args:
        recipe: As for `load_recipe`, and so are `allow_code` and the overrides.
        deepspeed: As for `train`: `chosen` is then what that config needs, beside the levels.
        gpus: GPUs of each node; without any, those of this machine, or eight A100.
        gpu: GPU model, such as "a100-80g".
        gpu_memory: Memory of a GPU, such as "80GB", instead of its model.
        nodes: Number of nodes.
        host_memory: Memory of each node, such as "512GB".
        interconnect: Network of each node, such as "8x400Gb/s": adds the seconds per step.
        utilisation: Fraction of the GPU's peak FLOPs that training reaches; computed without it.

    Raises:
        TunerError: the recipe or the machines are wrong.
    """
    arguments, deepspeed_name = _load_arguments_and_config(recipe, deepspeed, overrides, allow_code)
    loaded = loading.load(arguments.name, arguments.overrides, allow_code=arguments.allow_code)
    flags = MachineFlags(
        gpus=gpus,
        gpu=gpu,
        nodes=nodes,
        gpu_memory=gpu_memory,
        host_memory=host_memory,
        interconnect=interconnect,
        utilisation=utilisation,
    )
    result = planning.make(loaded, flags, os.environ, deepspeed_name)  # effect: as the command line
    return result._replace(warnings=_all_spoken(result.warnings))


@_in_python_words
def check(
    recipe: Source = None,
    *,
    deepspeed: PathLike | Mapping[str, object] | None = None,
    gpus: int | None = None,
    gpu: str | None = None,
    nodes: int = 1,
    allow_code: bool = False,
    **overrides: object,
) -> CheckReport:
    """Return every problem of a recipe and its DeepSpeed config, of such a config alone, of a run, or of a checkpoint.

    Args:
        recipe: As for `load_recipe`, and so are `allow_code` and the overrides; or a DeepSpeed preset or JSON, a run
            directory, or a checkpoint.
        deepspeed: As for `train`.
        gpus: GPUs of each node; without any, the check is for this machine.
        gpu: GPU model, such as "a100-80g".
        nodes: Number of nodes.

    Returns:
        `ok`, and `findings`: each with `severity`, `what`, `where`, `fix` and `code`.

    Raises:
        RunDirectoryError: `recipe` is a folder, but not a run directory.
        RecipeError: an override is not a plain value.
    """
    arguments, deepspeed_name = _load_arguments_and_config(recipe, deepspeed, overrides, allow_code)
    request = Request(arguments.name, arguments.overrides, deepspeed_name, allow_code=arguments.allow_code)
    report = checking.check(request, MachineFlags(gpus, gpu, nodes), dict(os.environ))  # effect: as the command line
    report.findings = [
        replace(finding, what=_spoken(finding.what), where=_spoken(finding.where), fix=_spoken(finding.fix))
        for finding in report.findings
    ]
    return report


@_in_python_words
def train(
    recipe: Source = None,
    *,
    model: PathLike | Mapping[str, object] | None = None,
    data: Data | None = None,
    val: Data | None = None,
    callbacks: Sequence[Callback] = (),
    deepspeed: PathLike | Mapping[str, object] | None = None,
    work_dir: PathLike | None = None,
    resume: PathLike | None = None,
    resume_weights: bool = False,
    nproc_per_node: int | None = None,
    on_oom: OnOom = "stop",
    max_restarts: int = 0,
    grace_s: float = 300.0,
    start_timeout_s: float = 600.0,
    ignore_fit: bool = False,
    allow_code: bool = False,
    **overrides: object,
) -> Run:
    """Train a recipe as `tuner train` does, in separate processes, and return when the run is done.

    The output of rank 0 appears on `sys.stdout`. Ctrl-C, or a notebook's stop button, saves a checkpoint and raises
    KeyboardInterrupt; a second one ends the run at once. Both only work in the main thread.

    Args:
        recipe: As for `load_recipe`, and so are `allow_code` and the overrides. None: `model` is trained on `data`.
        model: A model's folder, a run's result, or an id on the hub.
        data: Rows to train on: a path or several, an id on the hub, a list of dicts, a `datasets.Dataset` or a
            `pandas.DataFrame`.
        val: Rows to validate on, of the same kinds.
        callbacks: Functions that get each event of the run as a dict, in a thread of this process: `event` is
            "started", "step", "validation", "checkpoint" or "ended". Or import paths, "my_module:MyCallback", of
            classes of transformers' `TrainerCallback`; every rank creates its own.
        deepspeed: A preset, a DeepSpeed JSON, an accelerate config, "auto" or "none"; or a config as a dict.
        work_dir: The run directory. None: work_dirs/RECIPE/TIME.
        resume: A checkpoint or run to resume from; "auto": the newest.
        resume_weights: Resume with the weights only, if the optimizer's states cannot be used.
        nproc_per_node: Processes on this machine. None: one per GPU.
        on_oom: Out of memory: "stop", or "retry" with a smaller micro-batch, then at a higher level.
        max_restarts: How often a run restarts from its last checkpoint after a killed, crashed or hung rank.
        grace_s: Seconds that stopping ranks have to finish the step and save.
        start_timeout_s: Seconds to wait for the other nodes, where variables such as NNODES name several.
        ignore_fit: Start even if the estimate needs more memory than this machine has.

    Raises:
        TunerError: the run cannot start; the error holds every problem.
        RunFailed: it started and failed, or was stopped.
        KeyboardInterrupt: it was interrupted.
    """
    own_overrides = {"model": model, "data": data, "val": val, "callbacks": of_ranks(callbacks) or None}
    overrides = {**{key: value for key, value in own_overrides.items() if value is not None}, **overrides}
    arguments, deepspeed_name = _load_arguments_and_config(recipe, deepspeed, overrides, allow_code)
    request = Request(
        recipe=arguments.name,
        overrides=arguments.overrides,
        deepspeed=deepspeed_name,
        flags=LaunchFlags(nproc_per_node=nproc_per_node),
        work_dir=None if work_dir is None else Path(work_dir),
        resume=None if resume is None else os.fspath(resume),
        resume_weights=resume_weights,
        allow_code=arguments.allow_code,
        ignore_fit=ignore_fit,
        on_oom=on_oom,
        max_restarts=max_restarts,
        grace_s=grace_s,
        start_timeout_s=start_timeout_s,
        output=None if sys.stdout is sys.__stdout__ else sys.stdout,
        on_event=of_this_process(callbacks),
    )
    show_on(sys.stderr)
    environ = dict(os.environ)  # effect: the ranks get it, as those of the command line
    this_machine = hardware.detect(environ)
    with joined(request, environ, this_machine) as other_nodes:
        resolved = resolve_start(request, environ, this_machine, datetime.now().astimezone())
        other_nodes.planned(resolved)
        for line in announcement(resolved, preflight.check(resolved)):
            print(visible(line.in_python), file=sys.stderr)  # effect: what the command line says there too
        other_nodes.ready(resolved)
        code = execute(resolved, other_nodes.meeting)
    run = Run(resolved.run_path)
    require_done(run, code)
    return run


@_in_python_words
@quiet()
def export(
    source: PathLike,
    dest: PathLike,
    *,
    merge: bool = False,
    base: PathLike | None = None,
    dtype: DType | None = None,
    max_shard_size: str = "5GB",
    format: Format = "published",
    quant: str | None = None,
    data: PathLike | None = None,
    push: str | None = None,
    private: bool = False,
    trust_remote_code: bool = False,
) -> Exported:
    """Export a run's result to the folder `dest`, for transformers and peft without tuner, as `tuner export` does.

    Args:
        source: A `Run`, its directory, or a checkpoint of any ZeRO level.
        dest: A folder that does not exist, or is empty.
        merge: Merge the adapter into its base, in the base's precision.
        base: Place of the base, if it differs from training.
        dtype: Type of the weights. None: unchanged.
        max_shard_size: Limit of one weights file.
        format: "llama" writes InternLM in Llama's layout; "gguf" writes one file for Ollama and llama.cpp.
        quant: Weights in fewer bits: "fp8", "nvfp4" or "int4" by torchao; with "gguf", "q8_0", "q4_k_m" and others.
        data: Rows to measure the perplexity on before and after `quant`. None: the validation rows of the run.
        push: "OWNER/NAME" on the Hugging Face hub, to upload it to as well.
        private: Make that repository private if it does not exist yet.
        trust_remote_code: Run the code that comes with the model.

    Returns:
        What was written: `kind`, `num_tensors`, `num_bytes`, `num_files` and more.

    Raises:
        TunerError: there is nothing to export, or it cannot be written; `dest` is untouched then. Or the upload fails,
            and `dest` is kept.
    """
    from tuner.hub.push import check as check_push
    from tuner.hub.push import upload
    from tuner.results.export import Options
    from tuner.results.export import export as write
    from tuner.results.loaded_model import unchanged_random_state

    if private and push is None:
        raise UsageError("private=True needs push", where="private", fix='Add push="OWNER/NAME".')
    max_shard_bytes, folder = parse_bytes(max_shard_size, "max_shard_size"), Path(dest)
    check_dest(folder)
    place, rows = (None if path is None else os.fspath(path) for path in (base, data))
    options = Options(
        merge=merge,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        base=place,
        layout=format,
        quant=quant,
        data=rows,
        name=push,
    )
    saved = find(Path(source), trust_remote_code=trust_remote_code)
    repository = check_push(push, format, private=private) if push else None
    with unchanged_random_state():
        done = write(saved, folder, options, os.environ)  # effect: where llama.cpp is
    if repository:
        upload(folder, done.private_base, repository, kept=True)
    return done


@_in_python_words
@quiet()
def chat(
    source: PathLike,
    *,
    adapter: PathLike | None = None,
    bits: Bits | None = None,
    system: str | None = None,
    max_new_tokens: int = 512,
    temperature: float | None = None,
    top_p: float | None = None,
    seed: int = 42,
    trust_remote_code: bool = False,
) -> Chat:
    """Load a model to chat with, with the chat template and stop tokens of its training.

    Args:
        source: A `Run`, its directory, a checkpoint, a model's folder, or an id on the hub.
        adapter: A folder with an adapter for the base `source`.
        bits: 16, 8 or 4 bits per weight. None: as in training, or 16.
        system: A system prompt.
        max_new_tokens: Limit of tokens per answer.
        temperature: 0 always takes the most likely token. None: the model's default.
        top_p: Sample from the most likely tokens with this total probability.
        seed: Seed of the sampling.
        trust_remote_code: Run the code that comes with the model.

    Returns:
        A conversation: `chat.ask("Why?").text` is the answer, and `chat.turns` what was said.

    Raises:
        TunerError: there is no such model, or it cannot answer.
    """
    from tuner.results import chat as chats
    from tuner.worker.generation import Settings

    adapter_path = None if adapter is None else os.fspath(adapter)
    settings = Settings(max_new_tokens, temperature, top_p)
    this_machine = detect(os.environ)  # effect: as the command line
    return chats.begin(
        os.fspath(source),
        this_machine,
        settings,
        adapter=adapter_path,
        trust_remote_code=trust_remote_code,
        bits=bits,
        system=system,
        seed=seed,
    )


@_in_python_words
@quiet()
def evaluate(
    source: PathLike,
    *,
    data: Data | None = None,
    row_format: str | None = None,
    split: str | None = None,
    max_rows: int | None = None,
    batch_size: int | None = None,
    generate: int = 0,
    out: PathLike | None = None,
    max_new_tokens: int = 512,
    tasks: str | Sequence[str] = (),
    num_fewshot: int | None = None,
    apply_chat_template: bool = False,
    allow_code: bool = False,
    adapter: PathLike | None = None,
    bits: Bits | None = None,
    trust_remote_code: bool = False,
) -> Evaluation:
    """Evaluate a model on rows and on public tasks, as `tuner eval` does.

    Args:
        source: As for `chat`, and so are `adapter`, `bits` and `trust_remote_code`.
        data: Rows as for `train`. None: the run's validation rows; with `tasks` alone, no rows.
        row_format: The shape of a row of `data`. None: detected.
        split: Split of the data set.
        max_rows: Use only the first rows, also of a task.
        batch_size: Rows per batch. None: as in validation.
        generate: Number of rows with prompts to answer; the answers are in `generations`.
        out: A new JSON lines file for the answers.
        max_new_tokens: Limit of tokens per answer.
        tasks: Names of lm-eval tasks.
        num_fewshot: Examples before each question of a task. None: the task's own.
        apply_chat_template: Use the chat template for the tasks; lm-eval's default is plain text.
        allow_code: Call the rewards of the run that are functions of a file or a package.

    Returns:
        `metrics` of the rows (`loss`, `perplexity` ...), `generations`, `answers` (their metrics), and `tasks`.

    Raises:
        TunerError: the model, the rows or a task are wrong, or `out` exists.
    """
    from tuner.results import evaluate as evaluation
    from tuner.results.loaded_model import unchanged_random_state

    file = None if out is None else Path(out)
    if file and file.exists():
        raise UsageError(f"{file} already exists", where="out", fix="Choose a new file.")
    names = tuple(tasks.split(",")) if isinstance(tasks, str) else tuple(tasks)
    rows = None if data is None else _rows("data", data)
    if not isinstance(rows, str | os.PathLike | None):
        problem = f"data = {brief_repr(rows)} is neither a path nor rows"
        raise UsageError(problem, where="data", fix="Give one path, a list of dicts, a Dataset or a DataFrame.")
    wanted = evaluation.Wanted(
        data=None if rows is None else os.fspath(rows),
        row_format=row_format,
        split=split,
        max_rows=max_rows,
        batch_size=batch_size,
        num_answers=generate,
        out=file,
        max_new_tokens=max_new_tokens,
        tasks=names,
        num_fewshot=num_fewshot,
        apply_chat_template=apply_chat_template,
        allow_code=allow_code,
    )
    with unchanged_random_state():
        return evaluation.evaluate(
            os.fspath(source),
            wanted,
            detect(os.environ),  # effect: as the command line
            adapter=None if adapter is None else os.fspath(adapter),
            trust_remote_code=trust_remote_code,
            bits=bits,
        )


@_in_python_words
def serve(
    source: PathLike,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    engine: Engine | None = None,
    adapter: PathLike | None = None,
    bits: Bits | None = None,
    trust_remote_code: bool = False,
    api_key: str | None = None,
    allowed_hosts: Sequence[str] = (),
) -> Server:
    """Serve a model with OpenAI's protocol in a separate process, as `tuner serve` does; return when it answers.

    Args:
        source: As for `chat`, and so are `adapter`, `bits` and `trust_remote_code`.
        host: Address to listen on; "0.0.0.0" listens on all interfaces.
        port: Port to listen on.
        name: The model's name in requests. None: the folder's name.
        engine: None: vLLM if it and a GPU are available, else transformers.
        api_key: What clients must send. None: a new key.
        allowed_hosts: Further host names that requests may be addressed to.

    Returns:
        `url`, `api_key` and `name` for a client, and `stop()`; in a `with` block it stops at the end of it.

    Raises:
        TunerError: the port is taken, or the server ended before it answered.
    """
    from tuner.results.serve import Server, check_key, name_of, new_key

    key = new_key() if api_key is None else api_key
    check_key(key)
    called = name or name_of(os.fspath(adapter or source))
    options = {"host": host, "port": port, "name": called, "engine": engine, "adapter": adapter, "bits": bits}
    flags = [f"--{option}={value}" for option, value in options.items() if value is not None]
    flags += [f"--allowed-host={host_name}" for host_name in allowed_hosts]
    flags += ["--trust-remote-code"] if trust_remote_code else []
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    return Server([os.fspath(source), *flags], f"http://{reachable}:{port}/v1", called, key)


@_in_python_words
@quiet()
def preview_data(
    data: Data | None = None,
    *,
    recipe: Source = None,
    num_rows: int = 3,
    every: bool = False,
    allow_code: bool = False,
    **overrides: object,
) -> Preview:
    """Read the data as training does, and show the samples, as `tuner data` does; no weights are loaded.

    Args:
        data: Rows as for `train`. None: those of the recipe.
        recipe: As for `load_recipe`, and so are `allow_code` and the overrides; without one, `model=` names a model.
        num_rows: Number of samples to show.
        every: Read every row, not only the first 1,000.

    Returns:
        `views` by split (counts, lengths, samples with the trained tokens), `to_json()`.

    Raises:
        TunerError: rows cannot be trained on (the error holds the first of them), or the recipe is wrong.
    """
    arguments = _load_arguments(recipe, overrides if data is None else {"data": data, **overrides}, allow_code)
    loaded = loading.load(arguments.name, arguments.overrides, allow_code=arguments.allow_code)
    environ = os.environ  # effect: packed rows are as long as in a run on the GPUs that the variables show
    return previewing.preview(
        loaded, environ, num_samples=num_rows, first_rows=_FIRST_ROWS, every=every, allow_code=arguments.allow_code
    )


@overload
def _spoken(text: str) -> Text: ...
@overload
def _spoken(text: str | None) -> Text | None: ...
def _spoken(text: str | None) -> Text | None:
    """Return a text in Python's words."""
    return None if text is None else Text(Text(text).in_python)


def _all_spoken(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(map(_spoken, texts))


def _rows(argument: str, rows: object) -> object:
    """Return the path of a file with the rows if they are objects; return anything else unchanged."""
    if isinstance(rows, str | os.PathLike):
        return rows
    return sources.file_of_rows(rows, argument, paths.cache(os.environ) / "rows") or rows  # effect: where the cache is


def _load_arguments(recipe: Source, overrides: Mapping[str, object], allow_code: bool) -> LoadArguments:
    """Return what to load a recipe by. Overrides for a `Recipe` are added to those that it was loaded with."""
    changes = python_calls.overrides_of(
        {key: _rows(key, value) if key in python_calls.ROWS else value for key, value in overrides.items()}
    )
    if isinstance(recipe, Recipe):
        arguments = recipe.arguments or LoadArguments(names.identify(recipe.name), Overrides())
        return LoadArguments(
            arguments.name, python_calls.both(arguments.overrides, changes), allow_code or arguments.allow_code
        )
    if recipe is None:
        return LoadArguments(None, changes, allow_code)
    name = names.identify(os.fspath(recipe))
    if name.kind is NameKind.OTHER_TOOL:
        converted = recipe_of_other_tool(name.text, os.environ)  # effect: where tuner's cache is
        name = Name(str(converted.path), NameKind.RECIPE_FILE, converted.path)
    return LoadArguments(name, changes, allow_code)


def _load_arguments_and_config(
    recipe: Source, deepspeed: PathLike | Mapping[str, object] | None, overrides: Mapping[str, object], allow_code: bool
) -> tuple[LoadArguments, str | None]:
    """Return what to load a recipe by, and the name of the DeepSpeed config; a config as a dict becomes an override."""
    if isinstance(deepspeed, Mapping):
        return _load_arguments(recipe, {**overrides, "deepspeed": dict(deepspeed)}, allow_code), None
    return _load_arguments(recipe, overrides, allow_code), None if deepspeed is None else os.fspath(deepspeed)


def _check(name: str, value: Any) -> None:
    """Raise an error for a value that `_CHOICES` or `_LEAST` does not allow, as click does for the options."""
    choices = get_args(_CHOICES.get(name))
    if choices and value not in (None, *choices):
        listed = ", ".join(map(repr, choices))
        raise UsageError(f"{name} = {value!r} is not one of {listed}", where=name, fix="Use one of them.")
    least = _LEAST.get(name)
    if value is not None and least is not None and not least <= value < math.inf:
        raise UsageError(f"{name} = {value} is out of range", where=name, fix=f"Use a number of at least {least}.")


Callback = str | Callable[[JsonObject], object]


def of_ranks(callbacks: Sequence[Callback]) -> list[str]:
    """Return the import paths among callbacks, which the ranks load.

    Raises:
        UsageError: one is neither an import path nor a function.
    """
    for callback in callbacks:
        # A class such as a `TrainerCallback` cannot leave this process, and training runs in others.
        if isinstance(callback, type) or not (isinstance(callback, str) or callable(callback)):
            fix = "Give functions of one event; of a class its import path, such as 'my_module:MyCallback'."
            raise UsageError(f"{brief_repr(callback)} is not a callback", where="callbacks", fix=fix)
    return [callback for callback in callbacks if isinstance(callback, str)]


def of_this_process(callbacks: Sequence[Callback]) -> Callable[[JsonObject], None] | None:
    """Return what calls the functions among callbacks with each event, in their order, or None if there are none."""
    functions = [callback for callback in callbacks if not isinstance(callback, str)]

    def call(event: JsonObject) -> None:
        for function in [*functions]:
            try:
                function(dict(event))
            except Exception:  # an error in the caller's function must not end the run
                functions.remove(function)
                traceback.print_exc()
                print(f"tuner: {function!r} failed and is not called again.", file=sys.stderr)  # effect: as warnings

    return call if functions else None


class Run:
    """A run directory, in any state, also of a run that another program started. `os.fspath` returns its path.

    Raises:
        RunDirectoryError: `path` is not a run directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = listing.require_run(path)
        self._files = RunDirectory(self.path)

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def state(self) -> State:
        """ "running", "done", "failed", "stopped", "died" (its process is gone) or "damaged": the current state."""
        return listing.look(self.path, self.path.name).state

    @property
    def status(self) -> JsonObject:
        """The content of status.json: state, exit_code, and after a failure its message and diagnosis.

        Raises:
            RunDirectoryError: it cannot be read.
        """
        return self._files.read_status().to_json()

    @property
    def verdict(self) -> JsonObject | None:
        """Whether a finished run has learned: `outcome`, `measure`, `before`, `after`, `steps`, `advice`, `line`.

        None if the run is not done, or has logged fewer than two losses. Errors as for `status`.
        """
        verdict = self._files.read_status().verdict
        return verdict.for_python() if verdict else None

    @property
    def metrics(self) -> list[JsonObject]:
        """A dict for each line of metrics.jsonl, the earliest first: `pandas.DataFrame(run.metrics)` is a table."""
        return metrics.every_line(self._files)

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The complete checkpoints, the earliest first, each with `path` and `step`; only file sizes are checked."""
        return [
            checkpoint
            for checkpoint in reversed(checkpoints.listed(self._files.checkpoints))
            if checkpoint.problem is None
        ]

    @property
    def report(self) -> Path:
        """The report of the run, one HTML file; it is written first if it does not exist."""
        if not self._files.report.exists():
            page.write([self.path], self._files.report)
        return self._files.report

    @quiet()
    def model(self, *, bits: int | None = None, trust_remote_code: bool = False) -> Any:
        """Load the result, or the newest checkpoint, onto the GPUs of this machine or the CPU, for inference only.

        Args:
            bits: 16, 8 or 4 bits per weight. None: as in training, or 16.
            trust_remote_code: Run the code that comes with the model.

        Returns:
            The transformers model, or the PEFT model around it, in eval mode.

        Raises:
            TunerError: there is nothing to load, or it cannot be loaded.
        """
        from tuner.results.loaded_model import load, spec_of  # torch, which a look at the metrics does not need

        spec = spec_of(str(self.path), None, trust_remote_code=trust_remote_code)
        return load(spec, detect(os.environ), bits).model  # effect: as the command line

    @quiet()
    def tokenizer(self, *, trust_remote_code: bool = False) -> Any:
        """Load the tokenizer with the chat template of the training. Argument and errors as for `model`."""
        from tuner.results.loaded_model import encoder_of, spec_of

        return encoder_of(spec_of(str(self.path), None, trust_remote_code=trust_remote_code)).library_object


class RunFailed(TunerError):
    """A run that was started has failed, or was stopped.

    Attributes:
        diagnosis: `cause`, `what`, `rank`, `step` and `next_command` of a failure; empty if the run was stopped.
        code: The cause; `tuner explain` explains it.
        exit_code: The exit code that `tuner train` would have had.
    """

    def __init__(self, run: Run, exit_code: int) -> None:
        status = RunDirectory(run.path).read_status()
        diagnosis = status.diagnosis
        self.run, self.diagnosis = run, diagnosis.to_json() if diagnosis else {}
        problem, fix = status.message or f"the ranks ended with code {exit_code}", None
        if diagnosis:
            self.code, problem = diagnosis.cause, diagnosis.what
            fix = f"Next: `{diagnosis.next_command}`"
        elif exit_code == Stopped.exit_code:
            self.code, problem = Stopped.code, "the run was stopped and saved a checkpoint"
            fix = 'Resume with the same call: work_dir=..., resume="auto"'
        super().__init__(problem.rstrip("."), where=run.path, fix=fix)
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.run, self.exit_code)


def require_done(run: Run, exit_code: int) -> None:
    """Raise the error of a run that has ended, if any; send the signal that stopped it to this program.

    Raises:
        RunFailed: the run failed or was stopped.
        KeyboardInterrupt: the run was interrupted.
    """
    failure = RunFailed(run, exit_code) if exit_code else None
    number = RunDirectory(run.path).read_status().signal
    if number == signal.SIGINT:
        raise KeyboardInterrupt(f"{run.path}: {run.state}") from failure
    if number:
        signal.raise_signal(number)  # the program's own handler is installed again; without one, the program ends here
    if failure:
        raise failure

"""What a run needs beside its model: rows, rewards, a teacher, vLLM or a server of it; the hub, and room for its files.

Rows go through the same code as training's rows. Each question to the hub is short and has a deadline; nothing is
downloaded. If the hub does not answer, the run is warned and may try. A rank checks again what it loads.
"""

from __future__ import annotations

import queue
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tuner import assets, paths, vocabulary
from tuner.data import copies, formats, images, sources
from tuner.data.copies import Seen
from tuner.data.formats import MixedShapes
from tuner.data.pipeline import Pipeline, PlacedSample
from tuner.data.readers.text_files import OnError, fail
from tuner.data.sample import Prompt, images_of, turns_of
from tuner.data.token_bytes import token_bytes
from tuner.errors import (
    DataError,
    DiskError,
    Key,
    MachineError,
    ModelError,
    Option,
    RecipeError,
    TunerError,
    UsageError,
    marked,
)
from tuner.files import read_json_object, sized
from tuner.fit.parameters import has_formula, num_parameters
from tuner.launch import row_counts
from tuner.launch.checks import Finding, host, model_files
from tuner.launch.resolved_run import ResolvedRun
from tuner.machine import libraries
from tuner.recipes import catalog, model_facts, starting_weights
from tuner.recipes.schema import Dataset, RecipeConfig, Rows
from tuner.recipes.schema.rewards import rewards_of
from tuner.recipes.schema.tools import tools_of
from tuner.vocabulary import TEACHER

if TYPE_CHECKING:
    from tuner.rewards.reward_function import TrialRow

_NUM_ROWS = 8
_READ_S = 2.0
"""Seconds of processor time in which all rows of counted files are read before a start: about 20,000 conversations."""
_MAX_LISTED = 20
_REVISIONS = {
    "model.path": "model.revision",
    "model.vision.path": "model.vision.revision",
    TEACHER: "objective.teacher_revision",
}
"""The key of a model on the hub, of the vision tower, and of the teacher -> the key of its revision."""
_NUM_TRIAL_ROWS = 4
"""Rows of each data set on which rewards are tried."""
VLLM = ((0, 22, 0), (0, 31, 0))
"""The oldest and the newest vLLM that TRL 1.16 supports (trl/import_utils.py, is_vllm_available)."""
_SERVER_S = 5.0
"""Seconds that a server of vLLM has to answer."""
_WITHOUT_VLLM = f"Or use {Key('objective.generation.engine', 'transformers')}."
_GENERATION = "objective.generation"


class _Late(Exception):
    """The time to read rows is over."""


def first_rows(run: ResolvedRun) -> Iterator[Finding]:
    """Find what is wrong with the rows of each data set: rows that cannot be read, or that do not fit.

    Of the user's local files that are counted all rows are read, as far as `_READ_S` reach; of others the first. Their
    copies are counted too, unless the plan has counted them.
    """
    config, late_s = run.recipe.config, time.process_time() + _READ_S
    for loader in config.loaders.values():
        if loader.dataset.held_out:  # they are rows of the training data
            continue
        row_keys: list[Seen] | None = []
        for rows in loader.dataset.data_sets:
            is_own = str(rows.path).startswith(assets.ASSET)  # the package's rows are good, and meant as they are
            is_read = run.topology.leads and not loader.dataset.streaming and not is_own
            is_whole = is_read and row_counts.is_counted(rows)
            is_all = is_whole and _are_files(rows)  # of a folder the first file is read
            max_rows = loader.dataset.max_rows if is_whole else _NUM_ROWS
            mistakes: list[DataError] = []
            read = partial(_read, rows, loader.dataset, config, late_s, max_rows)
            try:
                keys_here = read(mistakes.append if loader.dataset.bad_rows else None)
                row_keys = row_keys + keys_here if row_keys is not None and keys_here is not None and is_all else None
            except MixedShapes as error:  # its rows have no common fix
                yield error
            except DataError as error:
                with suppress(TunerError):
                    read(mistakes.append)
                yield from _listed(mistakes) or (error,)
            else:
                yield from _listed(mistakes) if len(mistakes) > loader.dataset.bad_rows else ()
        is_planned = row_counts.read_rows(loader.dataset, config.objective.type) is not None
        if row_keys and not is_planned and (num_copies := copies.count(row_keys)):
            yield copies.warning(num_copies, len(set(row_keys)))


def _listed(mistakes: list[DataError]) -> list[DataError]:
    """Return the first mistakes; the last one says how to leave all of their rows out."""
    count, listed = len(mistakes), mistakes[:_MAX_LISTED]
    if listed:
        last = listed[-1]
        hint = f" {count:,} rows are bad; `tuner data NAME --all --bad` lists all." if count > len(listed) else ""
        fix = f"{marked(last.fix or '')}{hint} Or leave out bad rows: {Key('bad_rows', count)}."
        listed[-1] = DataError(last.what, where=last.where, of_row=last.of_row, fix=fix.strip())
    return listed


def streamed(run: ResolvedRun) -> Iterator[Finding]:
    """Find a streamed data set that cannot be read from the middle; for a folder the ranks check it."""
    rows = run.recipe.config.train_dataloader.dataset
    if not rows.streaming or not rows.path:
        return
    local_path = paths.local(rows.path)
    if local_path is None or _are_files(rows):
        sources.check_stream(rows.path, paths.matching(local_path) if local_path else ())
    yield from ()


def _read(
    rows: Rows, dataset: Dataset, config: RecipeConfig, late_s: float, max_rows: int | None, on_error: OnError | None
) -> list[Seen] | None:
    """Turn rows of one data set into samples; return the keys of the rows, or None if they were not all read.

    Args:
        late_s: When to stop after the first rows, by `time.process_time`.
        max_rows: The most rows that are read.
        on_error: Called for each row that cannot be read or does not fit.

    Raises:
        DataError: there is no such format, a row cannot be read or is not what the objective learns from, or it holds
            an image and the model reads text alone.
    """

    def tell(error: DataError) -> None:
        if on_error is None:
            raise error
        on_error(error)
        if time.process_time() > late_s:
            raise _Late

    row_keys: list[Seen] = []
    with suppress(_Late):
        samples = _samples(rows, dataset, config.objective.type, max_rows, tell, row_keys)
        for number, (place, sample) in enumerate(samples):
            if not config.reads_images and not isinstance(sample, str) and images_of(turns_of(sample)):
                raise images.for_text_alone("the row", place)
            if number >= _NUM_ROWS and time.process_time() > late_s:
                raise _Late
        return row_keys
    return None


def _samples(
    rows: Rows, dataset: Dataset, objective: str, max_rows: int | None, on_error: OnError, row_keys: list[Seen]
) -> Iterator[PlacedSample]:
    """Yield the samples of the first rows of one data set; none if they are not in local files.

    `row_keys` gets the keys of the rows as they are read.
    """
    # Only ranks run a user's row function: it may do anything, also import torch.
    if ":" in (rows.format or ""):
        return
    if rows.format:
        formats.named(rows.format)
    path = rows.path if _are_files(rows) else _first_of_folder(rows)
    if path is None:
        return
    of_rows = {**{name: getattr(rows, name) for name in Rows.model_fields}, "path": path}
    block = dataset.model_copy(update={**of_rows, "mixture": None, "max_rows": max_rows, "val_split": None})
    pipeline = Pipeline(block, objective)
    tally = pipeline.tally()
    tally.row_keys = row_keys
    yield from pipeline.samples(tally, on_error)


def rewards(run: ResolvedRun) -> Iterator[Finding]:
    """Call every reward on the first rows: one that fails, takes too long or is always the same is a mistake."""
    config = run.recipe.config
    if not config.objective.facts.generates:
        return
    if blocks := rewards_of(config.objective):
        from tuner.rewards.reward_function import trial_mistakes  # and a teacher gives none

        yield from trial_mistakes(blocks, trial_rows(config.train_dataloader.dataset, config.objective.type))


def tools(run: ResolvedRun) -> Iterator[Finding]:
    """Find tools that cannot be called with this model, or by these ranks."""
    config = run.recipe.config
    block = tools_of(config.objective)
    if block is None:
        return
    if config.reads_images:
        problem = "a model that reads images calls no tools in tuner"
        yield RecipeError(problem, where="objective.tools", fix="Use a model of text alone.")
    generation, ranks = config.objective.generated_by, run.topology.world_size
    if ranks > 1 and generation and generation.engine == "vllm":
        why = (
            "TRL gathers the prompts of all ranks for each generation, and ranks call tools a different number of times"
        )
        problem = f"with vLLM on {ranks} ranks tools cannot be called: {why}"
        yield RecipeError(problem, where=f"{_GENERATION}.engine", fix=f"Train on one GPU. {_WITHOUT_VLLM}")


def tool_template(run: ResolvedRun) -> Iterator[Finding]:
    """Find a chat template in which TRL cannot read calls; ranks check one that is on the hub."""
    config = run.recipe.config
    chat_template, folder = config.model.chat_template, starting_weights.tokenizer_folder(config.model_dump())
    if tools_of(config.objective) is None or not (chat_template or folder):
        return
    from tuner.rewards.tool_templates import refuse_unknown  # TRL

    if chat_template:
        refuse_unknown(catalog.chat_template(chat_template))
    elif folder and (template := starting_weights.chat_template_of(folder)) is not None:
        described = read_json_object(folder / "tokenizer_config.json").get("response_template")
        refuse_unknown(template, described)
    yield from ()


def tool_functions(run: ResolvedRun) -> Iterator[Finding]:
    """Describe every tool, and begin an environment with the first row: what fails now fails in each completion."""
    config = run.recipe.config
    block = tools_of(config.objective)
    if block is None:
        return
    from tuner.rewards.tool_calls import ENVIRONMENT, described

    rows = trial_rows(config.train_dataloader.dataset, config.objective.type) if block.environment else []
    row = {"prompt": rows[0].prompt, **rows[0].columns} if rows else None
    description = described(block, row)
    if description.scores and not any(reward.type == ENVIRONMENT for reward in rewards_of(config.objective)):
        add = f"Add it: {Key('objective.rewards', [ENVIRONMENT])}."
        yield f"{block.environment} has a method get_reward, which no reward calls. {add}"


def trial_rows(dataset: Dataset, objective: str) -> list[TrialRow]:
    """Return the first rows of each data set that is in local files; a row that cannot be read ends its data set."""
    from tuner.rewards.reward_function import TrialRow

    tried, on_error = [], (lambda _: None) if dataset.bad_rows else fail
    for rows in dataset.data_sets:
        with suppress(DataError):  # `first_rows` reports it
            for _, sample in _samples(rows, dataset, objective, _NUM_TRIAL_ROWS, on_error, []):
                assert isinstance(sample, Prompt), "rewards score answers to prompts"
                tried.append(TrialRow(sample.prompt if sample.text is None else sample.text, sample.columns))
    return tried


def vllm(run: ResolvedRun) -> Iterator[Finding]:
    """Find what vLLM lacks here: its package, a GPU, ranks for its copies of the model, a loss that allows for it."""
    objective = run.recipe.config.objective
    generation = objective.generated_by
    if generation is None or generation.engine == "transformers":
        return
    if objective.facts.drops_correction:
        differ = "vLLM's probabilities differ a little from those of training"
        yield f"{differ}, and the loss of {objective.type} is not corrected for that, as grpo's is."
    installed = libraries.version_of("vllm")
    if installed is None:
        fix = f"Install it (pip install 'trl[vllm]'). {_WITHOUT_VLLM}"
        problem = "generation by vLLM needs the package vllm on every rank"
        yield MachineError(problem, where=f"{_GENERATION}.engine", fix=fix)
    elif not VLLM[0] <= libraries.numbers(installed) <= VLLM[1]:
        oldest, newest = (".".join(map(str, version)) for version in VLLM)
        yield f"vLLM {installed} is installed, and TRL was tested with {oldest} to {newest}."
    if not run.hardware.has_nvidia:
        problem = "generation by vLLM needs NVIDIA GPUs, and this machine has none"
        yield MachineError(problem, where=f"{_GENERATION}.engine", fix=_WITHOUT_VLLM.replace("Or use", "Use"))
    copies, ranks = generation.tensor_parallel_size, run.topology.world_size
    if generation.shares_gpus and ranks % copies:
        problem = f"{ranks} ranks cannot be divided into groups of {copies} that share a copy of the model in vLLM"
        near = max(size for size in range(1, copies + 1) if ranks % size == 0)
        yield RecipeError(problem, where=f"{_GENERATION}.tensor_parallel_size", fix=f"Set it to {near}.")
    quantization = run.recipe.config.quantization
    if generation.shares_gpus and quantization is not None and quantization.bits == 8:
        problem = "vLLM does not support bases in 8 bits"
        yield RecipeError(problem, where="quantization.bits", fix=f"Use 4 bits, or LoRA. {_WITHOUT_VLLM}")


def server(run: ResolvedRun) -> Iterator[Finding]:
    """Find a server of vLLM that does not answer."""
    generation = run.recipe.config.objective.generated_by
    if generation is None or generation.server is None or not run.topology.leads:
        return
    import urllib.error  # few runs have a server
    import urllib.request

    address = generation.server.rstrip("/")
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=_SERVER_S):  # noqa: S310  http, by the schema
            return
    except urllib.error.HTTPError as error:
        problem = f"the server at {address} answers {error.code}"
    except (OSError, ValueError) as error:
        problem = f"the server at {address} does not answer: {getattr(error, 'reason', error)}"
    fix = (
        f"Start it on other GPUs: VLLM_SERVER_DEV_MODE=1 vllm serve {run.recipe.config.model.path} "
        """--weight-transfer-config '{"backend": "nccl"}' --logprobs-mode processed_logprobs --max-logprobs -1"""
    )
    yield MachineError(problem, where=f"{_GENERATION}.server", fix=fix)


def teacher(run: ResolvedRun) -> Iterator[Finding]:
    """Find a teacher that cannot be loaded, or with another vocabulary than the model that is trained."""
    config = run.recipe.config
    taught_by = config.objective.taught_by
    if taught_by is None or taught_by.path is None:
        return
    student_architecture, teacher_architecture = config.architecture, config.teacher_architecture
    if (
        taught_by.shares_vocabulary
        and student_architecture
        and teacher_architecture
        and student_architecture.vocab_size != teacher_architecture.vocab_size
    ):
        yield vocabulary.other_size(student_architecture.vocab_size, teacher_architecture.vocab_size, taught_by.path)
    if teacher_architecture is None or not has_formula(teacher_architecture):
        yield f"the size of the teacher {taught_by.path!r} is not known, so memory is planned without it"
    known_types = model_files.known_types(scores=False)
    if teacher_architecture and known_types and teacher_architecture.model_type not in known_types:
        problem = f"transformers has no language model of the teacher's model_type {teacher_architecture.model_type!r}"
        yield ModelError(problem, where=TEACHER, fix="A newer transformers may support it.")
    teacher_folder = model_files.local_folder(taught_by.path)
    if teacher_folder is not None:
        yield from filter(None, [model_files.only_scores(teacher_folder, TEACHER)])
        yield from model_files.missing_weights(teacher_folder, TEACHER)


def teachers_tokens(run: ResolvedRun) -> Iterator[Finding]:
    """Find a teacher if its tokens cannot be compared with the model's. It reads tokenizer.json; ranks check others."""
    config = run.recipe.config
    taught_by, student = config.objective.taught_by, config.model.path
    if taught_by is None or taught_by.path is None or student is None:
        return
    places = model_files.local_folder(student), model_files.local_folder(taught_by.path)
    if not taught_by.shares_vocabulary:
        for folder, path, where in zip(places, (student, taught_by.path), ("model.path", TEACHER), strict=True):
            if folder and not _is_spelled(folder):
                yield vocabulary.not_spelled(path, where)
        return
    vocabularies = [vocabulary.read_vocabulary(folder) if folder else None for folder in places]
    if vocabularies[0] and vocabularies[1]:
        vocabulary.check_same(vocabularies[0].ids, vocabularies[1].ids, taught_by.path)
    yield from ()


def _is_spelled(folder: Path) -> bool:
    """Return whether it is known which text the tokens of a model's tokenizer.json stand for, or left to the ranks."""
    try:
        return token_bytes(read_json_object(folder / "tokenizer.json")) is not None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return True


def _are_files(rows: Rows) -> bool:
    """Return whether the rows are in local files; only `datasets` knows which files of a folder belong to a split."""
    local_path = paths.local(rows.path) if rows.path else None
    files = paths.matching(local_path) if local_path else []
    return bool(files) and all(file.is_file() for file in files)


def _first_of_folder(rows: Rows) -> str | None:
    """Return the file with the first training rows of a folder; None if only `datasets` knows it."""
    folder = paths.local(rows.path) if rows.path and rows.split == "train" else None
    files = row_counts.files_of_folder(folder) if folder and paths.is_folder(folder) else []
    return str(files[0]) if files and files[0] != folder else None


DEADLINE_S = 5.0
"""The time limit of all questions together."""
_FILES = {"model": "config.json", "dataset": ".gitattributes"}
"""A file that every repository of this kind has; the answer about it shows whether the user may read the repository."""


def reachable(run: ResolvedRun) -> Iterator[Finding]:
    """Find ids on the hub that do not exist, are gated, or cannot be fetched; HF_HUB_OFFLINE leaves a cached model."""
    repositories = list(_wanted(run)) if run.topology.leads else []
    if not repositories:
        return
    from huggingface_hub import constants  # 0.3 s with its client

    answers: queue.Queue[Finding | None] = queue.Queue()
    for kind, name, revision, where in repositories:
        cached, is_offline = _cached(kind, name, revision), constants.is_offline_mode()
        if cached is not None and (is_offline or kind != "model" or model_files.are_here(cached.parent)):
            answers.put(None)
            # Only the tensors of a pickle are read when a tower and an LLM are joined.
            pickled = run.recipe.config.model.vision is not None
            yield from model_files.missing_weights(cached.parent, where, pickled=pickled) if kind == "model" else ()
        elif is_offline:
            answers.put(_offline(name, where) if kind == "model" else None)
        else:
            about = (kind, name, revision, where)
            threading.Thread(target=lambda about=about: answers.put(_ask(*about)), daemon=True).start()
    for _ in repositories:
        try:
            # A server that sends one byte a second never reaches the client's time-out; a thread can be abandoned.
            finding = answers.get(timeout=DEADLINE_S)
        except queue.Empty:
            yield f"the Hugging Face hub did not answer within {DEADLINE_S:g} s; the run will try again."
            return
        if finding is not None:
            yield finding


def download(run: ResolvedRun) -> Iterator[Finding]:
    """Find a disk without room for the weights that the run will fetch from the hub."""
    model, architecture = run.recipe.config.model, run.recipe.config.architecture
    is_on_hub = bool(model.path) and paths.local(str(model.path)) is None
    if not is_on_hub or architecture is None or not has_formula(architecture):
        return
    from huggingface_hub import constants  # 0.01 s, and only where something is fetched

    cached_folder = model_facts.folder_of(str(model.path), model.revision)
    if cached_folder and model_files.are_here(cached_folder):
        return
    cache = host.existing(Path(constants.HF_HUB_CACHE))
    free, needed = shutil.disk_usage(cache).free, 2.0 * num_parameters(architecture)  # published in 16 bits, or in more
    if free < needed:
        message = f"{sized(free)} are free, and the weights of {model.path!r} need {sized(needed)}"
        yield DiskError(message, where=cache, fix="Free space, or set HF_HOME to a folder on another disk.")


def pushes(run: ResolvedRun) -> Iterator[Finding]:
    """Find why the weights cannot be pushed to the repository that the recipe names; nothing is created there."""
    config = run.recipe.config
    name, is_adapter = config.checkpoint.repository, config.adapter is not None
    if not (name and run.topology.leads and run.request.saves_result):
        return
    from tuner.hub import push  # huggingface_hub, 0.3 s

    if is_adapter and config.model.path and paths.local(config.model.path):
        fix = f"Remove {Option('push')}, and push a merged model later: tuner export RUN --merge --push {name}"
        yield UsageError(f"{push.BASE_IS_LOCAL}: {config.model.path}", where=push.PUSH, fix=fix)
        return
    repository = push.check(name, "published", private=config.checkpoint.private)
    weight_files = [file for file in repository.files or () if fnmatchcase(file, "model*.safetensors*")]
    repository.refuse_others(("adapter_model.safetensors", "adapter_config.json") if is_adapter else weight_files)


def _wanted(run: ResolvedRun) -> Iterator[tuple[str, str, str | None, str]]:
    """Yield what the hub must have: its kind, id and revision, and the key that names it."""
    config = run.recipe.config
    models = (config.model, config.model.vision, config.objective.taught_by)
    for model, where in zip(models, _REVISIONS, strict=True):
        if model and model.path and paths.local(model.path) is None:
            yield "model", model.path, model.revision, where
    for loader in config.loaders.values():
        for path in {rows.path for rows in loader.dataset.data_sets}:
            if path and not path.startswith(paths.URL) and paths.local(path) is None:
                yield "dataset", path, None, "dataset.path"


def _cached(kind: str, name: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(name, _FILES[kind], revision=revision, repo_type=kind)
    return Path(path) if isinstance(path, str) else None


def _offline(name: str, where: str) -> MachineError:
    fix = f"Unset HF_HUB_OFFLINE, download it first (hf download), or give a local folder with {Option('model')}."
    return MachineError(f"{name!r} is not in the cache, and HF_HUB_OFFLINE is set", where=where, fix=fix)


def _ask(kind: str, name: str, revision: str | None, where: str) -> Finding | None:
    """Ask the hub for the headers of one file; return an error or a warning, or None if access works."""
    from huggingface_hub import constants, errors, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

    wrong = ModelError if kind == "model" else DataError
    url = hf_hub_url(name, _FILES[kind], repo_type=kind, revision=revision)
    try:
        get_hf_file_metadata(url, timeout=DEADLINE_S)
    except errors.GatedRepoError:
        fix = f"Request access at {constants.ENDPOINT}/{name}, then log in with `hf auth login` or set HF_TOKEN."
        return wrong(f"{name!r} is gated, and this user has no access", where=where, fix=fix)
    except errors.RevisionNotFoundError:
        key = _REVISIONS.get(where, where)
        return wrong(f"{name!r} has no revision {revision!r}", where=key, fix="Use one that it has.")
    except errors.RepositoryNotFoundError:
        fix = "Correct the id. A private one needs `hf auth login` or HF_TOKEN."
        return wrong(f"the hub has no {kind} {name!r}, or this user has no access to it", where=where, fix=fix)
    except errors.RemoteEntryNotFoundError:
        fix = "Use a model in the transformers format; GGUF files and adapters have no config.json."
        return wrong(f"{name!r} holds no {_FILES[kind]}", where=where, fix=fix) if kind == "model" else None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        if status in (401, 403):
            fix = "Log in with `hf auth login`, or set HF_TOKEN to a token with access."
            return wrong(f"the hub denies access to {name!r} ({status})", where=where, fix=fix)
        return f"the Hugging Face hub answers {status} for {name!r}; the run will try again."
    except (httpx.TimeoutException, httpx.RemoteProtocolError, httpx.ReadError):
        return f"the Hugging Face hub did not answer for {name!r}; the run will try again."
    except httpx.TransportError as error:
        fix = "Check the network and the proxy, download it elsewhere (hf download), or give a local folder."
        return MachineError(f"the hub cannot be reached for {name!r}: {error}", where=where, fix=fix)
    return None

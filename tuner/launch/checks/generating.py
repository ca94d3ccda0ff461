"""What an objective that generates needs beside its model: vLLM, or a server of it, and a teacher.

It reads small files and the first bytes of large files. A rank checks again what it loads.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tuner import assets, paths, vocabulary
from tuner.errors import MachineError, ModelError, RecipeError
from tuner.fit.parameters import has_formula
from tuner.launch.checks import Finding, model_files
from tuner.launch.resolved_run import ResolvedRun
from tuner.machine import libraries
from tuner.vocabulary import TEACHER

VLLM = ((0, 22, 0), (0, 31, 0))
"""The oldest and the newest vLLM that TRL 1.16 supports (trl/import_utils.py, is_vllm_available)."""
DEADLINE_S = 5.0
"""Seconds that a server has to answer."""
_WITHOUT = "Or use --set objective.generation.engine=transformers."
_KEY = "objective.generation"


def vllm(run: ResolvedRun) -> Iterator[Finding]:
    """Find what vLLM lacks here: its package, a GPU, and ranks for its copies of the model."""
    generation = run.recipe.config.objective.generated_by
    assert generation is not None, "the caller has looked"
    installed = libraries.version_of("vllm")
    if installed is None:
        fix = f"Install it (pip install 'trl[vllm]'). {_WITHOUT}"
        yield MachineError("generation by vLLM needs the package vllm on every rank", where=f"{_KEY}.engine", fix=fix)
    elif not VLLM[0] <= libraries.numbers(installed) <= VLLM[1]:
        oldest, newest = (".".join(map(str, version)) for version in VLLM)
        yield f"vLLM {installed} is installed, and TRL was tested with {oldest} to {newest}."
    if not run.hardware.has_nvidia:
        problem = "generation by vLLM needs NVIDIA GPUs, and this machine has none"
        yield MachineError(problem, where=f"{_KEY}.engine", fix=_WITHOUT.replace("Or use", "Use"))
    copies, ranks = generation.tensor_parallel_size, run.topology.world_size
    if generation.shares_gpus and ranks % copies:
        problem = f"{ranks} ranks cannot be divided into groups of {copies} that share a copy of the model in vLLM"
        near = max(size for size in range(1, copies + 1) if ranks % size == 0)
        yield RecipeError(problem, where=f"{_KEY}.tensor_parallel_size", fix=f"Set it to {near}.")
    quantization = run.recipe.config.quantization
    if generation.shares_gpus and quantization is not None and quantization.bits == 8:
        problem = "vLLM does not support bases in 8 bits"
        yield RecipeError(problem, where="quantization.bits", fix=f"Use 4 bits, or LoRA. {_WITHOUT}")


def server(run: ResolvedRun) -> Iterator[Finding]:
    """Find a server of vLLM that does not answer."""
    generation = run.recipe.config.objective.generated_by
    if generation is None or generation.server is None or not run.topology.leads:
        return
    address = generation.server.rstrip("/")
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=DEADLINE_S):  # noqa: S310  http, by the schema
            return
    except urllib.error.HTTPError as error:
        problem = f"the server at {address} answers {error.code}"
    except (OSError, ValueError) as error:
        problem = f"the server at {address} does not answer: {getattr(error, 'reason', error)}"
    fix = (
        f"Start it on other GPUs: VLLM_SERVER_DEV_MODE=1 vllm serve {run.recipe.config.model.path} "
        """--weight-transfer-config '{"backend": "nccl"}' --logprobs-mode processed_logprobs --max-logprobs -1"""
    )
    yield MachineError(problem, where=f"{_KEY}.server", fix=fix)


def teacher(run: ResolvedRun) -> Iterator[Finding]:
    """Find a teacher that cannot be loaded, or with another vocabulary than the model that is trained."""
    config = run.recipe.config
    taught_by = config.objective.taught_by
    if taught_by is None or taught_by.path is None:
        return
    ours, theirs = config.architecture, config.teacher_architecture
    if ours and theirs and ours.vocab_size != theirs.vocab_size:
        yield vocabulary.other_size(ours.vocab_size, theirs.vocab_size, taught_by.path)
    if theirs is None or not has_formula(theirs):
        yield f"the size of the teacher {taught_by.path!r} is not known, so memory is planned without it"
    known = model_files.known_types(scores=False)
    if theirs and known and theirs.model_type not in known:
        problem = f"transformers has no language model of the teacher's model_type {theirs.model_type!r}"
        yield ModelError(problem, where=TEACHER, fix="A newer transformers may support it.")
    place = _folder(taught_by.path)
    if place is not None:
        yield from model_files.missing_weights(place, TEACHER)


def teachers_tokens(run: ResolvedRun) -> Iterator[Finding]:
    """Find a teacher with another tokenizer. It reads tokenizer.json; ranks check others."""
    config = run.recipe.config
    taught_by, student = config.objective.taught_by, config.model.path
    if taught_by is None or taught_by.path is None or student is None:
        return
    places = _folder(student), _folder(taught_by.path)
    known = [vocabulary.read(place) if place else None for place in places]
    if known[0] and known[1]:
        vocabulary.check_same(known[0].ids, known[1].ids, taught_by.path)
    yield from ()


def _folder(path: str) -> Path | None:
    """Return a model's folder; None for an id on the hub, and for a model that the package makes."""
    return None if path.startswith(assets.ASSET) else paths.local(path)

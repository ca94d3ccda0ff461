"""The teacher of a run: complete weights, an architecture that transformers has, and the vocabulary of the student.

It reads small files and the first bytes of large files. A rank checks again what it loads.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tuner import assets, paths, vocabulary
from tuner.errors import ModelError
from tuner.fit.parameters import has_formula
from tuner.launch.checks import Finding, model_files
from tuner.launch.resolved_run import ResolvedRun
from tuner.vocabulary import TEACHER


def fitting(run: ResolvedRun) -> Iterator[Finding]:
    """Find a teacher that cannot be loaded, or with another vocabulary than the model that is trained."""
    config = run.recipe.config
    teacher = config.objective.taught_by
    if teacher is None or teacher.path is None:
        return
    ours, theirs = config.architecture, config.teacher_architecture
    if ours and theirs and ours.vocab_size != theirs.vocab_size:
        yield vocabulary.other_size(ours.vocab_size, theirs.vocab_size, teacher.path)
    if theirs is None or not has_formula(theirs):
        yield f"the size of the teacher {teacher.path!r} is not known, so memory is planned without it"
    known = model_files.known_types(scores=False)
    if theirs and known and theirs.model_type not in known:
        problem = f"transformers has no language model of the teacher's model_type {theirs.model_type!r}"
        yield ModelError(problem, where=TEACHER, fix="A newer transformers may support it.")
    place = _folder(teacher.path)
    if place is not None:
        yield from model_files.missing_weights(place, TEACHER)


def same_tokens(run: ResolvedRun) -> Iterator[Finding]:
    """Find a teacher with another tokenizer. It reads tokenizer.json; ranks check others."""
    config = run.recipe.config
    teacher, student = config.objective.taught_by, config.model.path
    if teacher is None or teacher.path is None or student is None:
        return
    places = _folder(student), _folder(teacher.path)
    known = [vocabulary.read(place) if place else None for place in places]
    if known[0] and known[1]:
        vocabulary.check_same(known[0].ids, known[1].ids, teacher.path)
    yield from ()


def _folder(path: str) -> Path | None:
    """Return a model's folder; None for an id on the hub, and for a model that the package makes."""
    return None if path.startswith(assets.ASSET) else paths.local(path)

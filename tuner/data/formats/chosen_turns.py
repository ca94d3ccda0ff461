"""Which turns of a sample carry loss: what the recipe chooses, and what the turns say of themselves.

    all         each turn of the assistant, with its own weight where it has one
    last        those after the last turn of the user: an answer, with the calls and the results of tools before it
    marked      those with a weight above 0; of a turn that has only spans, these
    everything  each token, of prompts too

It reads no rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tuner.data.formats.cells import Misfit
from tuner.data.sample import Chat, Feedback, Message, Pair, Prompt, Sample, TrainedTurns, marks_in, unmarked

RESULT = "is_result"
"""The key of a user's turn that is the result of a tool; no sample that `formats.read_sample` returns has it."""


def chosen(sample: Sample, trained: TrainedTurns) -> Sample:
    """Return a sample in which a turn of the assistant has a weight where it is not 1, and no other turn has one.

    Raises:
        Misfit: a turn asks for loss that it cannot have.
    """
    match sample:
        case str():
            return sample
        case Chat():
            return replace(sample, messages=_chosen(sample.messages, trained))
        case Pair(prompt, better, worse):
            prompt, better, worse = (_chosen(turns, "all") for turns in (prompt, better, worse))
            return replace(sample, prompt=prompt, chosen=better, rejected=worse)
        case Feedback(prompt, completion):
            return replace(sample, prompt=_chosen(prompt, "all"), completion=_chosen(completion, "all"))
        case Prompt(prompt):
            return replace(sample, prompt=_chosen(prompt, "all"))


def _chosen(turns: Sequence[Message], trained: TrainedTurns) -> list[Message]:
    if trained == "everything":
        return [_of_all(turn) for turn in turns]
    first = 0
    if trained == "last":
        question_indices = [at for at, turn in enumerate(turns) if turn["role"] == "user" and not turn.get(RESULT)]
        first = question_indices[-1] if question_indices else 0
    return [_weighed(turn, trained, is_chosen=at >= first) for at, turn in enumerate(turns)]


def _of_all(turn: Message) -> Message:
    if turn.get("weight", 1) != 1 or marks_in(turn):
        says = f"spans {marks_in(turn)}" if marks_in(turn) else f"a weight of {turn['weight']}"
        why = "dataset.trained_turns = 'everything' trains every token"
        raise Misfit(f"a turn of the {turn['role']} has {says}, and {why}")
    return unmarked(turn)


def _weighed(turn: Message, trained: TrainedTurns, *, is_chosen: bool) -> Message:
    bare, weight, spans = unmarked(turn), turn.get("weight"), marks_in(turn)
    if turn["role"] != "assistant":
        if weight or spans:
            why = "only the assistant's turns are trained (dataset.trained_turns = 'everything' trains prompts too)"
            raise Misfit(f"a turn of the {turn['role']} has {'spans' if spans else f'a weight of {weight}'}, and {why}")
        return bare
    if not is_chosen:
        return {**bare, "weight": 0}
    if weight is None:
        weight = 0 if trained == "marked" else 1
    return {**bare, **({} if weight == 1 else {"weight": weight}), **({"spans": spans} if spans else {})}

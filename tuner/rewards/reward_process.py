"""The process of one reward: it answers calls over a pipe until its parent ends.

A message is JSON in UTF-8. The first answer is {'place': 'file:line'} once the function is imported. Each call is
{'prompts': [...], 'completions': [...], ...}, with a list for each column, and its answer {'scores': VALUE}. Instead of
an answer there may be {'error': TEXT, 'where': PLACE, 'fix': TEXT, 'code': CODE}.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from multiprocessing.connection import Connection

from pydantic import TypeAdapter

from tuner.errors import TunerError
from tuner.files import JsonObject
from tuner.machine import kernel
from tuner.recipes.schema.rewards import ModelReward, OwnReward, RewardBlock, Rewards
from tuner.rewards.built_in import Reward, built_in
from tuner.rewards.own_function import line_of, own_function


def _function(block: RewardBlock) -> tuple[Reward, str]:
    if isinstance(block, OwnReward):
        return own_function(block)
    if isinstance(block, ModelReward):
        from tuner.rewards.scoring_model import scoring_model  # torch

        return scoring_model(block), block.type
    return built_in(block), block.type


def _report(error: Exception) -> JsonObject:
    """Return the answer for an exception: its text, and the line of the user's code."""
    if isinstance(error, TunerError):
        return {"error": error.what, "where": error.where, "fix": error.fix, "code": error.code}
    return {"error": f"{type(error).__name__}: {error}", "where": line_of(error), "fix": None, "code": None}


def main() -> None:
    """Import the reward of `argv`, and answer calls.

    Arguments: the reward as JSON, and the number of the pipe.
    """
    kernel.die_with_parent(signal.SIGKILL)  # also out of a regular expression that never ends
    text, number = sys.argv[1:]
    pipe = Connection(int(number))
    os.dup2(2, 1)  # what the user's function prints is not an answer
    try:
        (block,) = TypeAdapter(Rewards).validate_python([json.loads(text)])
        function, place = _function(block)
    except Exception as error:  # the parent reports it
        pipe.send_bytes(json.dumps(_report(error)).encode())
        return
    pipe.send_bytes(json.dumps({"place": place}).encode())
    while True:
        try:
            call = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            answer = {"scores": _plain(function(**call))}
        except Exception as error:  # whatever the user's function raises
            answer = _report(error)
        pipe.send_bytes(json.dumps(answer, default=repr).encode())


def _plain(scores: object) -> object:
    """Return the numbers of a tensor or an array as a list, and anything else as it is."""
    listed = scores.tolist() if hasattr(scores, "tolist") else scores
    if isinstance(listed, list | tuple):
        return [one.item() if hasattr(one, "item") else one for one in listed]
    return listed


if __name__ == "__main__":
    main()

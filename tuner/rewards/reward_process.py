"""A reward in a process of its own, which a deadline can end: `IsolatedReward` starts it, and `main` is what it runs.

A thread cannot be ended: a loop in it, or a regular expression inside C, would hold the rank for ever. The process
answers calls over a pipe until its parent ends. A message is JSON in UTF-8. The first answer is {'place': 'file:line'}
once the function is imported. Each call is {'prompts': [...], 'completions': [...], ...}, with a list for each column,
and its answer {'scores': VALUE}. Instead of an answer there may be {'error': TEXT, 'where': PLACE, 'fix': TEXT, 'code':
CODE}. Not pebble: it ends a worker alone, without what the user's function has started, and its worker runs the rank's
own main module again.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from tuner.errors import MachineError, RewardError, TunerError
from tuner.files import JsonObject
from tuner.machine import kernel
from tuner.pretrained import explained
from tuner.recipes.schema.rewards import ModelReward, OwnReward, RewardBlock, Rewards
from tuner.rewards.built_in import Completion, Reward, Scores, built_in

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_LOADING_S = 120.0
"""Seconds to load a reward of the package: sympy takes one, on a busy machine many."""
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv.pop(1).split('\\n'); from tuner.rewards.reward_process import main; main()"
)


class RewardFailure(Exception):
    """A call of a reward that failed.

    Args:
        problem: What went wrong.
        where: `file:line` in the user's code, or the reward's type.
    """

    def __init__(self, problem: str, where: str) -> None:
        super().__init__(problem, where)
        self.problem, self.where = problem, where


class IsolatedReward:
    """A reward in a process of its own, which starts at the first call and again after each failure that ended it."""

    def __init__(self, block: RewardBlock) -> None:
        self._block = block
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self.place = block.type

    def __call__(self, call: Mapping[str, object]) -> object:
        """Return what the reward returns.

        Raises:
            RewardFailure: it raised an exception, its process ended, or it took more than its timeout.
            RewardError: its function cannot be loaded.
            MachineError: a library is not installed.
        """
        if self._pipe is None:
            self._start()
        assert self._pipe is not None, "it was started"
        with suppress(OSError):  # the process has ended: the answer says how
            self._pipe.send_bytes(json.dumps(call, default=str).encode())
        answer = self._answer(self._block.timeout, "one call")
        if "error" in answer:
            raise RewardFailure(str(answer["error"]), answer["where"] or self.place)
        return answer["scores"]

    def _start(self) -> None:
        pipe, end_of_child = Pipe()
        document = json.dumps(self._block.model_dump(mode="json"))
        argv = [sys.executable, "-P", "-c", _PROGRAM, "\n".join(sys.path), document, str(end_of_child.fileno())]
        # In a session of its own: Ctrl-C is for the run, which ends this process when it ends itself.
        fds = (end_of_child.fileno(),)
        self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, pass_fds=fds, start_new_session=True)
        end_of_child.close()
        self._pipe = pipe
        limit_s = self._block.timeout if isinstance(self._block, OwnReward) else max(self._block.timeout, _LOADING_S)
        answer = self._answer(limit_s, "importing it")
        if "error" in answer:
            self.end()
            error = MachineError if answer["code"] == MachineError.code else RewardError
            raise error(answer["error"], where=answer["where"] or self._block.type, fix=answer["fix"])
        self.place = answer["place"]

    def _answer(self, limit_s: float, work: str) -> dict[str, Any]:
        """Return the answer of the process; end it if it does not answer in time."""
        assert self._pipe is not None and self._process is not None, "it was started"
        end = time.monotonic() + limit_s
        try:
            if self._pipe.poll(max(0.0, end - time.monotonic())):
                answer: dict[str, Any] = json.loads(self._pipe.recv_bytes())
                return answer
        except (EOFError, OSError):
            code = self._process.wait()
            self.end()
            cause = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            raise RewardFailure(f"its process ended {cause}", self.place) from None
        self.end()
        raise RewardFailure(f"{work} took more than {limit_s:g} s (its timeout)", self.place)

    def end(self) -> None:
        """End the process; the next call starts it again."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # with what the user's function started
            self._process.wait()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None

    def __del__(self) -> None:
        with suppress(Exception):  # at the end of Python its modules may be gone
            self.end()


def _function(block: RewardBlock) -> tuple[Reward, str]:
    if isinstance(block, OwnReward):
        return _own_function(block)
    if isinstance(block, ModelReward):
        return _scoring_model(block), block.type
    return built_in(block), block.type


def _own_function(block: OwnReward) -> tuple[Reward, str]:
    """Return a function of the user's, which gets all columns or those that it names, and its place, `file:line`.

    Raises:
        RewardError: there is no such file, module or function, or importing it failed.
    """
    module_name, _, name = block.type.rpartition(":")
    try:
        module = _import_file(Path(block.file).absolute()) if block.file else importlib.import_module(module_name)
    except RewardError:
        raise
    except Exception as error:  # whatever the user's module raises
        problem = f"cannot import {module_name!r}: {type(error).__name__}: {error}"
        fix = None if block.file else "Install the package, or put its folder on PYTHONPATH."
        raise RewardError(problem, where=_line_of(error) or block.type, fix=fix) from error
    function = getattr(module, name, None)
    if not callable(function):
        near = ", ".join(known for known, value in vars(module).items() if inspect.isfunction(value)) or "none"
        raise RewardError(
            f"{module_name} has no function {name!r}", where="objective.rewards", fix=f"Its functions: {near}."
        )
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    def reward(
        *, prompts: Sequence[Completion], completions: Sequence[Completion], **columns: Sequence[object]
    ) -> Scores:
        values = {"prompts": prompts, "completions": completions, **columns}
        return function(**(values if takes_all else {key: values[key] for key in parameters if key in values}))  # type: ignore[no-any-return]

    return reward, _place_of(function, block.type)


def _import_file(file: Path) -> ModuleType:
    """Return the module of a file; it may import the files beside it."""
    if not file.is_file():
        raise RewardError(f"there is no file {str(file)!r}", where="objective.rewards", fix="Check the path.")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec and spec.loader, "the name ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # dataclasses look their module up
    sys.path.insert(0, str(file.parent))
    spec.loader.exec_module(module)
    return module


def _scoring_model(block: ModelReward) -> Reward:
    """Load a reward model, on this rank's GPU if there is one, and return its scores of prompts with completions.

    The weights are whole in this process, at every ZeRO stage.

    Raises:
        RewardError: it cannot be loaded, or it generates texts instead of scoring them.
    """
    import torch  # few rewards are models
    import transformers

    # What they print would stand in the output of `tuner check`: the head of an adapter's base is reported as missing.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("bitsandbytes").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    try:
        with explained(block.path, "objective.rewards"):
            tokenizer = transformers.AutoTokenizer.from_pretrained(block.path, trust_remote_code=False)
            model = _load(block.path)
    except (TunerError, RuntimeError) as error:
        reason = error.what if isinstance(error, TunerError) else str(error).splitlines()[0]
        problem = f"the reward model {block.path!r} cannot be loaded: {reason}"
        fix = "Give the folder of a model that scores answers, as `tuner train --method reward_lora` trains one."
        raise RewardError(problem, where="objective.rewards", fix=fix) from error
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id

    def texts(prompt: Completion, completion: Completion, tools: Sequence[object] | None) -> str:
        if isinstance(prompt, str):
            return prompt + (completion if isinstance(completion, str) else str(completion))
        answer = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else [*completion]
        rendered: str = tokenizer.apply_chat_template([*prompt, *answer], tools=tools, tokenize=False)
        return rendered

    def reward(
        *,
        prompts: Sequence[Completion],
        completions: Sequence[Completion],
        **columns: Sequence[Any],
    ) -> Scores:
        described = columns.get("tools") or [None] * len(prompts)
        rendered = [texts(*values) for values in zip(prompts, completions, described, strict=True)]
        scores: Scores = []
        for start in range(0, len(rendered), block.batch_size):
            part = rendered[start : start + block.batch_size]
            are_chats = not isinstance(prompts[0], str)  # a template writes the special tokens itself
            inputs = tokenizer(part, return_tensors="pt", padding=True, add_special_tokens=not are_chats)
            with torch.inference_mode():
                logits = model(**inputs.to(model.device)).logits
            scores.extend(logits[:, 0].float().tolist())
        return scores

    return reward


def _load(path: str) -> PreTrainedModel:
    import torch  # as in `_scoring_model`
    import transformers

    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"  # effect: rank's GPU
    options: dict[str, Any] = {"num_labels": 1, "dtype": "auto"}
    if (Path(path) / "adapter_config.json").is_file():
        import peft  # few reward models are adapters

        adapted = peft.AutoPeftModelForSequenceClassification.from_pretrained(path, trust_remote_code=False, **options)
        return adapted.to(device).eval()
    auto = transformers.AutoModelForSequenceClassification
    model, loading = auto.from_pretrained(path, trust_remote_code=False, output_loading_info=True, **options)
    if loading["missing_keys"]:
        raise ValueError(f"it has no weights for {min(loading['missing_keys'])}, so it is not a reward model")
    return model.to(device).eval()


def _place_of(function: object, name: str) -> str:
    """Return `file:line` of a function's definition, or its name if it has none."""
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return f"{code.co_filename}:{code.co_firstlineno}" if code else name


def _line_of(error: BaseException) -> str | None:
    """Return `file:line` where the user's code failed: the innermost line outside installed packages and tuner."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    ours = str(Path(__file__).parent.parent)
    frames = traceback.extract_tb(error.__traceback__)
    users = [
        frame
        for frame in frames
        if not frame.filename.startswith(("<", ours, sys.prefix, sys.base_prefix)) or "site-packages" in ours
    ]
    return f"{users[-1].filename}:{users[-1].lineno}" if users else None


def _report(error: Exception) -> JsonObject:
    """Return the answer for an exception: its text, and the line of the user's code."""
    if isinstance(error, TunerError):
        return {"error": error.what, "where": error.where, "fix": error.fix, "code": error.code}
    return {"error": f"{type(error).__name__}: {error}", "where": _line_of(error), "fix": None, "code": None}


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
        return [score.item() if hasattr(score, "item") else score for score in listed]
    return listed


if __name__ == "__main__":
    main()

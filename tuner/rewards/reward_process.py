"""A reward in a process of its own: `IsolatedReward` calls it, and `main` is what the process runs.

Each call is {'prompts': [...], 'completions': [...], ...}, with a list for each column, and its answer {'scores':
VALUE}.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from tuner.errors import RewardError, TunerError
from tuner.files import JsonObject
from tuner.pretrained import explained
from tuner.recipes.schema.rewards import ModelReward, OwnReward, RewardBlock, Rewards
from tuner.rewards.built_in import Completion, Reward, Scores, built_in
from tuner.rewards.isolated_process import Answers, Isolated, loaded, place_of, serve, taken_by

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_LOADING_S = 120.0
"""Seconds to load a reward of the package: sympy takes one, on a busy machine many."""


class IsolatedReward(Isolated):
    """A reward in a process of its own."""

    def __init__(self, block: RewardBlock) -> None:
        start_s = block.timeout if isinstance(block, OwnReward) else max(block.timeout, _LOADING_S)
        limits = {"timeout_s": block.timeout, "start_s": start_s}
        super().__init__(__name__, block.model_dump(mode="json"), block.type, **limits, error=RewardError)

    def scores(self, call: Mapping[str, object]) -> object:
        """Return what the reward returns. Errors as for a call of `Isolated`."""
        return self(call)["scores"]


def _own_function(block: OwnReward) -> tuple[Reward, str]:
    """Return a function of the user's, which gets all columns or those that it names, and its place, `file:line`.

    Raises:
        RewardError: there is no such file, module or function, or importing it failed.
    """
    function = loaded(block.type, "objective.rewards", RewardError)

    def reward(
        *, prompts: Sequence[Completion], completions: Sequence[Completion], **columns: Sequence[object]
    ) -> Scores:
        return function(**taken_by(function, {"prompts": prompts, "completions": completions, **columns}))  # type: ignore[no-any-return]

    return reward, place_of(function, block.type)


def _scoring_model(block: ModelReward) -> Reward:
    """Load a reward model, on this rank's GPU if there is one, and return its scores of prompts with completions.

    The weights are whole in this process, at every ZeRO stage.
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

    def reward(*, prompts: Sequence[Completion], completions: Sequence[Completion], **columns: Sequence[Any]) -> Scores:
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


def _served(document: JsonObject) -> tuple[Answers, str]:
    (block,) = TypeAdapter(Rewards).validate_python([document])
    if isinstance(block, OwnReward):
        function, place = _own_function(block)
    else:
        function, place = _scoring_model(block) if isinstance(block, ModelReward) else built_in(block), block.type
    return lambda call: {"scores": _plain(function(**call))}, place


def main() -> None:
    serve(_served)


def _plain(scores: object) -> object:
    """Return the numbers of a tensor or an array as a list, and anything else as it is."""
    listed = scores.tolist() if hasattr(scores, "tolist") else scores
    if isinstance(listed, list | tuple):
        return [score.item() if hasattr(score, "item") else score for score in listed]
    return listed

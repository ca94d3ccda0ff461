"""The score of a reward model, in the process of its reward: the weights are whole there at every ZeRO stage."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from tuner.errors import RewardError
from tuner.recipes.schema.rewards import ModelReward
from tuner.rewards.built_in import Completion, Reward, Scores


def scoring_model(block: ModelReward) -> Reward:
    """Load a reward model, on this rank's GPU if there is one, and return its scores of prompts with completions.

    Raises:
        RewardError: it cannot be loaded, or it generates texts instead of scoring them.
    """
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(block.path)
        model = _model(block.path)
    except (OSError, ValueError, RuntimeError) as error:
        problem = f"the reward model {block.path!r} cannot be loaded: {str(error).splitlines()[0]}"
        fix = "Give the folder of a model that scores answers, such as one that --set objective.type=reward trained."
        raise RewardError(problem, where="objective.rewards", fix=fix) from error
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id

    def texts(prompt: Completion, completion: Completion) -> str:
        if isinstance(prompt, str):
            return prompt + (completion if isinstance(completion, str) else str(completion))
        answer = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else [*completion]
        rendered: str = tokenizer.apply_chat_template([*prompt, *answer], tokenize=False)
        return rendered

    def reward(*, prompts: Sequence[Completion], completions: Sequence[Completion], **_: object) -> Scores:
        rendered = [texts(*pair) for pair in zip(prompts, completions, strict=True)]
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


def _model(path: str) -> transformers.PreTrainedModel:
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"  # effect: rank's GPU
    if (Path(path) / "adapter_config.json").is_file():
        import peft  # few reward models are adapters

        adapted = peft.AutoPeftModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype="auto")
        return adapted.to(device).eval()
    auto = transformers.AutoModelForSequenceClassification
    model, loading = auto.from_pretrained(path, num_labels=1, dtype="auto", output_loading_info=True)
    if loading["missing_keys"]:
        raise ValueError(f"it has no weights for {min(loading['missing_keys'])}, so it is not a reward model")
    return model.to(device).eval()

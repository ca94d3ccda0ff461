"""A reward model scores completions in a process of its own; a model without a head for scores is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from tests.data.conftest import CHATML, WITH_TOOLS, make_tokenizer
from tuner.errors import RewardError
from tuner.recipes.schema.rewards import ModelReward
from tuner.rewards import RewardFunction, reward_functions

SHAPE = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, vocab_size=512)


def _saved(folder: Path, of_model: type, template: str = CHATML) -> RewardFunction:
    torch.manual_seed(0)
    of_model(LlamaConfig(num_labels=1, pad_token_id=0, **SHAPE)).save_pretrained(folder)
    make_tokenizer(template).save_pretrained(folder)
    block = ModelReward(type="model", path=str(folder), batch_size=2, timeout=120.0)
    return reward_functions((block,), folder=folder)[0]


def test_a_reward_model_scores_prompt_and_completion_together(tmp_path: Path) -> None:
    reward, tokenizer = _saved(tmp_path, LlamaForSequenceClassification), make_tokenizer()
    model = LlamaForSequenceClassification.from_pretrained(tmp_path).eval()
    prompts, completions = ["Why? ", "Who? ", "Why? "], ["It is red.", "A dog.", "Because it is red and not blue."]

    with torch.no_grad():
        texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        expected = [float(model(**tokenizer(text, return_tensors="pt")).logits) for text in texts]
        chat = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "No."}]
        ids = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)
        expected_chat = float(model(**ids).logits)

    assert reward(prompts, completions) == pytest.approx(expected, abs=1e-5)
    assert reward([chat[:1]], [chat[1:]]) == pytest.approx([expected_chat], abs=1e-5)
    reward.close()


@pytest.mark.long
def test_a_reward_model_reads_the_tools_of_each_row(tmp_path: Path) -> None:
    reward, tokenizer = _saved(tmp_path, LlamaForSequenceClassification, WITH_TOOLS), make_tokenizer(WITH_TOOLS)
    model = LlamaForSequenceClassification.from_pretrained(tmp_path).eval()
    chat = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "No."}]
    tools = [{"type": "function", "function": {"name": "seven", "parameters": {}}}]

    with torch.no_grad():
        inputs = [
            tokenizer.apply_chat_template(chat, tools=t, return_tensors="pt", return_dict=True) for t in (tools, None)
        ]
        expected = [float(model(**ids).logits) for ids in inputs]

    assert reward([chat[:1]] * 2, [chat[1:]] * 2, tools=[tools, None]) == pytest.approx(expected, abs=1e-5)
    assert expected[0] != pytest.approx(expected[1], abs=1e-3)
    reward.close()


@pytest.mark.long
def test_a_model_that_generates_is_no_reward_model(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"no weights for score.weight, so it is not a reward model"):
        _saved(tmp_path, LlamaForCausalLM)(["Why?"], ["No."])


@pytest.mark.long
def test_an_adapter_on_a_base_without_a_head_scores_and_prints_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base = LlamaForCausalLM(LlamaConfig(pad_token_id=0, **SHAPE))
    base.save_pretrained(tmp_path / "base")
    scores = LlamaForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
    get_peft_model(scores, LoraConfig(task_type="SEQ_CLS", r=2)).save_pretrained(tmp_path / "adapter")
    make_tokenizer().save_pretrained(tmp_path / "adapter")
    block = ModelReward(type="model", path=str(tmp_path / "adapter"), batch_size=2, timeout=120.0)
    capfd.readouterr()

    (reward,) = reward_functions((block,), folder=tmp_path)

    assert len(reward(["Why?"], ["No."])) == 1
    reward.close()
    assert capfd.readouterr() == ("", "")

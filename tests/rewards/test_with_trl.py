"""TRL's GRPOTrainer takes the reward functions as they are, with their names, weights and missing rewards."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest
import torch
from pydantic import TypeAdapter
from transformers import LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

from tests.data.conftest import make_tokenizer
from tuner.recipes.schema.rewards import Rewards
from tuner.rewards import reward_functions

OWN = """
def length(completions, answer, level):
    assert all(right.isdigit() for right in answer)
    return [None if one == 2 else -len(text) / 10 for text, one in zip(completions, level)]
"""


def test_trl_learns_from_weighted_rewards_and_logs_them_by_name(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(OWN)
    written = [{"type": "length", "target": 20}, {"type": f"{tmp_path}/my_rewards.py:length", "weight": 2.0}, "exact"]
    rewards = reward_functions(TypeAdapter(Rewards).validate_python(written), folder=tmp_path)
    torch.manual_seed(0)
    shape = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, pad_token_id=0, **shape))
    tokenizer = make_tokenizer(pads=True)
    rows = [{"prompt": "1 + 1 =", "answer": "2", "level": 1}, {"prompt": "2 + 2 =", "answer": "4", "level": 2}]
    settings = GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        max_steps=1,
        use_cpu=True,
        bf16=False,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        reward_weights=[block.weight for block in rewards],
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=rewards,
        args=settings,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )

    trainer.train()
    logs = trainer.state.log_history[0]
    for reward in rewards:
        reward.close()

    means = {function.__name__: logs[f"rewards/{function.__name__}/mean"] for function in rewards}
    assert list(means) == ["length", "length_2", "exact"]
    assert means["exact"] == 0 and means["length"] < 0 and means["length_2"] < 0
    # Half of the completions have no second reward.
    assert logs["reward"] == pytest.approx(means["length"] + 2.0 * means["length_2"] / 2, abs=1e-4)
    assert not (tmp_path / "reward_failures.jsonl").exists()

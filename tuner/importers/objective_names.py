"""Other tools' words for what tuner calls an objective: one table, in which a new objective is entered too."""

from __future__ import annotations

from collections.abc import Mapping

WORDS: Mapping[str, Mapping[str, str]] = {
    "axolotl": {"dpo": "dpo", "ipo": "dpo", "orpo": "orpo", "simpo": "simpo", "kto": "kto", "grpo": "grpo"},
    "llamafactory": {"sft": "sft", "pt": "pretrain", "rm": "reward", "dpo": "dpo", "kto": "kto"},
    "swift": {
        **{name: name for name in ("dpo", "orpo", "cpo", "simpo", "kto", "grpo")},
        **{"rm": "reward", "gkd": "distill"},
    },
    "trl": {name: name for name in ("sft", "dpo", "kto", "reward", "orpo", "grpo", "rloo")},
    "xtuner": {"SupervisedFinetune": "sft", "DPO": "dpo", "ORPO": "orpo", "RewardModel": "reward"},
}
"""Tool -> its word -> the objective. They are `rl`, `stage`, `rlhf_type`, the command, and the model's class."""
NEAREST: Mapping[str, str] = {"ebft": "sft", "gdpo": "grpo", "ppo": "grpo"}
"""What other tools have and tuner has not -> the objective that comes nearest, for the rest of the recipe."""

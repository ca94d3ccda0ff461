"""Scores completions: the rewards of the package, and functions of the user's.

built_in        the functions of the package's rewards
reward_process  the process that imports and runs one reward: a loop without end or a crash ends that process alone
isolation       starts that process, and ends it at a deadline
reward_function what the trainer calls: a completion on which a reward fails has no reward
scoring_model   the score of a reward model
trial           calls every reward on the first rows before a run starts
"""

from __future__ import annotations

from tuner.rewards.reward_function import RewardFunction as RewardFunction
from tuner.rewards.reward_function import reward_functions as reward_functions

"""Scores completions: the rewards of the package, and functions of the user's.

built_in        the functions of the package's rewards
reward_process  runs one reward in a process, and ends it at a deadline: an endless loop or a crash ends it alone
reward_function what the trainer calls, and the trial of every reward on the first rows before a run starts
"""

from __future__ import annotations

from tuner.rewards.reward_function import RewardFunction as RewardFunction
from tuner.rewards.reward_function import reward_functions as reward_functions

"""Scores completions, and calls tools: the rewards of the package, and functions of the user's.

built_in         the functions of the package's rewards
isolated_process code of the user's in a process that a deadline ends: an endless loop or a crash ends it alone
leftovers        ends what such code has started, after the rank's end
reward_process   one reward in such a process
reward_function  what the trainer calls, and the trial of every reward on the first rows before a run starts
tool_process     the tools that the model calls, or one environment, in such a process
tool_calls       the calls of the completions that a rank writes at once, and the failures among them
tool_templates   the chat templates from which calls can be read
"""

from __future__ import annotations

from tuner.rewards.reward_function import RewardFunction as RewardFunction
from tuner.rewards.reward_function import reward_functions as reward_functions

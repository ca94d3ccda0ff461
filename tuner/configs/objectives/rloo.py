"""REINFORCE with a leave-one-out baseline: completions of prompts, compared by their rewards."""

_base_ = "grpo"
objective = dict(type="rloo")

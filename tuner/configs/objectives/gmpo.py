"""Geometric-mean policy optimization: GRPO with one ratio a completion, the geometric mean of its tokens' ratios."""

_base_ = "grpo"
objective = dict(type="gmpo")

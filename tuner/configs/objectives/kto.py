"""Kahneman-Tversky optimization on single answers marked good or bad."""

objective = dict(type="kto", beta=0.1)

"""Odds-ratio preference optimization on pairs of answers: no reference model."""

objective = dict(type="orpo", beta=0.1)
optim_wrapper = dict(optimizer=dict(lr=5e-6))

"""Simple preference optimization on pairs of answers: no reference model.

Source: Meng et al., 2024 (arXiv:2405.14734), table 7, for Llama 3 8B Base.
"""

objective = dict(type="simpo", beta=2.0, simpo_gamma=1.0)
optim_wrapper = dict(optimizer=dict(lr=6e-7))

"""Contrastive preference optimization on pairs of answers: no reference model, and the likelihood of the chosen.

Source: Xu et al., 2024 (arXiv:2401.08417), section 4.2, for beta; the rate is that of TRL's CPOConfig.
"""

objective = dict(type="cpo", beta=0.1, cpo_alpha=1.0)
optim_wrapper = dict(optimizer=dict(lr=1e-6))

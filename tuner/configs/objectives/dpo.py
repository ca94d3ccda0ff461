"""Direct preference optimization on pairs of answers."""

objective = dict(type="dpo", beta=0.1, loss_type="sigmoid")

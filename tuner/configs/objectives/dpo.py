"""Direct preference optimization on pairs of answers."""

objective = dict(type="dpo", beta=0.1, loss_type="sigmoid")
optim_wrapper = dict(optimizer=dict(lr=5e-7))

"""SWE-smith: 24,100 traces of an agent that repairs code with tools; MIT."""

train_dataloader = dict(dataset=dict(path="SWE-bench/SWE-smith-trajectories", split="tool", format="messages"))

"""PKU-SafeRLHF: two answers and the more helpful one; 73,907 pairs; CC BY-NC 4.0."""

train_dataloader = dict(dataset=dict(path="PKU-Alignment/PKU-SafeRLHF", name="default", format="better_response"))

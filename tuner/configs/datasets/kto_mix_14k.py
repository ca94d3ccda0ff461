"""Argilla's preference mix as answers marked good or bad, for KTO; 13,500 answers."""

train_dataloader = dict(dataset=dict(path="trl-lib/kto-mix-14k", format="feedback"))

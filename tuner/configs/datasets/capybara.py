"""Capybara: 16,006 conversations of several turns; Apache 2.0."""

train_dataloader = dict(dataset=dict(path="LDJnr/Capybara", format="rounds"))

"""Capybara's conversations with answers judged by GPT-4; 7,563 pairs; Apache 2.0."""

train_dataloader = dict(dataset=dict(path="argilla/distilabel-capybara-dpo-7k-binarized", format="preference"))

"""Intel's pairs of GPT-4's and Llama 2's answers to Orca's questions; 12,859 pairs; Apache 2.0."""

train_dataloader = dict(dataset=dict(path="Intel/orca_dpo_pairs", format="preference"))

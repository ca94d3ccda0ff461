"""Reddit posts and their authors' summaries, as TRL publishes them; 116,722 rows."""

train_dataloader = dict(dataset=dict(path="trl-lib/tldr", format="prompt_completion"))

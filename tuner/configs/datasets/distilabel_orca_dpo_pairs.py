"""Intel's Orca pairs, judged again by Argilla; 12,859 pairs; Apache 2.0."""

train_dataloader = dict(
    dataset=dict(path="argilla/distilabel-intel-orca-dpo-pairs", format="preference", columns=dict(prompt="input"))
)

"""UltraFeedback in pairs, as Zephyr learned from it; 61,135 pairs; MIT."""

train_dataloader = dict(
    dataset=dict(path="HuggingFaceH4/ultrafeedback_binarized", split="train_prefs", format="preference")
)

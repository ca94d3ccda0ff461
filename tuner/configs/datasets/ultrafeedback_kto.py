"""UltraFeedback as answers marked good or bad, for KTO; MIT."""

train_dataloader = dict(dataset=dict(path="argilla/ultrafeedback-binarized-preferences-cleaned-kto", format="feedback"))

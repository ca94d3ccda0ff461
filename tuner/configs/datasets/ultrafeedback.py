"""UltraFeedback in pairs, cleaned by Argilla; 60,917 pairs; MIT."""

train_dataloader = dict(dataset=dict(path="argilla/ultrafeedback-binarized-preferences-cleaned", format="preference"))

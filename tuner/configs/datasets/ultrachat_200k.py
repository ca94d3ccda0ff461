"""UltraChat, filtered for Zephyr; 207,865 conversations; MIT."""

train_dataloader = dict(dataset=dict(path="HuggingFaceH4/ultrachat_200k", split="train_sft", format="messages"))

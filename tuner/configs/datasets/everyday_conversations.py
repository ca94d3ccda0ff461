"""Small talk on everyday topics by Llama 3.1; 2,260 conversations; Apache 2.0."""

train_dataloader = dict(
    dataset=dict(path="HuggingFaceTB/everyday-conversations-llama3.1-2k", split="train_sft", format="messages")
)

"""Llama 2 7B Chat, Meta's chat model."""

model = dict(path="meta-llama/Llama-2-7b-chat-hf")
architecture = "llama2_7b"

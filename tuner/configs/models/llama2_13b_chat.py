"""Llama 2 13B Chat, Meta's chat model."""

model = dict(path="meta-llama/Llama-2-13b-chat-hf")
architecture = "llama2_13b"

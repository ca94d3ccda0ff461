"""Llama 2 70B Chat, Meta's chat model."""

model = dict(path="meta-llama/Llama-2-70b-chat-hf")
architecture = "llama2_70b"

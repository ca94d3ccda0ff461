"""Pythia 1.4B, EleutherAI's base model for the study of training."""

model = dict(path="EleutherAI/pythia-1.4b", chat_template="vicuna")
architecture = dict(_base_="pythia_1b", num_hidden_layers=24, num_attention_heads=16)

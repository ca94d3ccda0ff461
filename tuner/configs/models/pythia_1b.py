"""Pythia 1B, EleutherAI's base model for the study of training."""

model = dict(path="EleutherAI/pythia-1b", chat_template="vicuna")
architecture = dict(
    _base_="pythia_2_8b", num_hidden_layers=16, hidden_size=2048, intermediate_size=8192, num_attention_heads=8
)

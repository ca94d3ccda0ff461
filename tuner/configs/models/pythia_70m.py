"""Pythia 70M, EleutherAI's base model for the study of training."""

model = dict(path="EleutherAI/pythia-70m", chat_template="vicuna")
architecture = dict(
    _base_="pythia_2_8b", num_hidden_layers=6, hidden_size=512, intermediate_size=2048, num_attention_heads=8
)

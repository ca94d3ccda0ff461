"""Pythia 410M, EleutherAI's base model for the study of training."""

model = dict(path="EleutherAI/pythia-410m", chat_template="vicuna")
architecture = dict(
    _base_="pythia_2_8b", num_hidden_layers=24, hidden_size=1024, intermediate_size=4096, num_attention_heads=16
)

"""Pythia 160M, EleutherAI's base model for the study of training."""

model = dict(path="EleutherAI/pythia-160m", chat_template="vicuna")
architecture = dict(
    _base_="pythia_2_8b", num_hidden_layers=12, hidden_size=768, intermediate_size=3072, num_attention_heads=12
)

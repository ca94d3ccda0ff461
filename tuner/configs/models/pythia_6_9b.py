"""Pythia 6.9B, EleutherAI's base model for the study of training."""

model = dict(path="EleutherAI/pythia-6.9b", chat_template="vicuna")
architecture = dict(_base_="pythia_2_8b", hidden_size=4096, intermediate_size=16384, vocab_size=50432)

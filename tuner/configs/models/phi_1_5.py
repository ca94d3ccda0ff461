"""Phi-1.5 1.3B, Microsoft's base model, trained on textbooks."""

model = dict(path="microsoft/phi-1_5", chat_template="vicuna")
architecture = dict(_base_="phi_2", num_hidden_layers=24, hidden_size=2048, intermediate_size=8192)

"""Gemma 3 270M, Google's smallest base model, trained on text."""

model = dict(path="google/gemma-3-270m", chat_template="gemma")
architecture = dict(_base_="gemma3_1b_pt", num_hidden_layers=18, hidden_size=640, intermediate_size=2048)

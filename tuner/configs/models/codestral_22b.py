"""Codestral 22B, Mistral AI's model for code."""

model = dict(path="mistralai/Codestral-22B-v0.1")
architecture = dict(
    _base_="mathstral_7b", num_hidden_layers=56, hidden_size=6144, intermediate_size=16384, num_attention_heads=48
)

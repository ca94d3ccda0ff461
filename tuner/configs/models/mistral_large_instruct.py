"""Mistral Large 2 123B Instruct 2411, Mistral AI's largest dense chat model."""

model = dict(path="mistralai/Mistral-Large-Instruct-2411")
architecture = dict(
    _base_="codestral_22b",
    num_hidden_layers=88,
    hidden_size=12288,
    intermediate_size=28672,
    num_attention_heads=96,
    max_position_embeddings=131072,
)

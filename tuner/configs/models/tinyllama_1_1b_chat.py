"""TinyLlama 1.1B Chat, a small chat model in the shape of Llama 2."""

model = dict(path="TinyLlama/TinyLlama-1.1B-Chat-v1.0")
architecture = dict(
    _base_="llama2_7b",
    num_hidden_layers=22,
    hidden_size=2048,
    intermediate_size=5632,
    num_key_value_heads=4,
    head_dim=64,
    max_position_embeddings=2048,
)

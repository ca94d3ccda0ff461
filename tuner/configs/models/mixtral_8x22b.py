"""Mixtral 8x22B, Mistral AI's base model with 8 experts, 39B active."""

model = dict(path="mistralai/Mixtral-8x22B-v0.1", chat_template="mistral")
architecture = dict(
    _base_="mixtral_8x7b",
    num_hidden_layers=56,
    hidden_size=6144,
    intermediate_size=16384,
    num_attention_heads=48,
    max_position_embeddings=65536,
)

"""Olmo 3 32B, Ai2's open base model."""

model = dict(path="allenai/Olmo-3-1125-32B", chat_template="chatml")
architecture = dict(
    model_type="olmo3",
    num_hidden_layers=64,
    hidden_size=5120,
    intermediate_size=27648,
    num_attention_heads=40,
    num_key_value_heads=8,
    vocab_size=100278,
    tie_word_embeddings=False,
    max_position_embeddings=65536,
)

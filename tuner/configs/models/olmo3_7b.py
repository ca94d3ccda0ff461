"""Olmo 3 7B, Ai2's open base model."""

model = dict(path="allenai/Olmo-3-1025-7B", chat_template="chatml")
architecture = dict(
    model_type="olmo3",
    num_hidden_layers=32,
    hidden_size=4096,
    intermediate_size=11008,
    num_attention_heads=32,
    num_key_value_heads=32,
    vocab_size=100278,
    tie_word_embeddings=False,
    max_position_embeddings=65536,
)

"""Phi-1.5 1.3B, Microsoft's base model, trained on textbooks."""

model = dict(path="microsoft/phi-1_5", chat_template="vicuna")
architecture = dict(
    model_type="phi",
    num_hidden_layers=24,
    hidden_size=2048,
    intermediate_size=8192,
    num_attention_heads=32,
    num_key_value_heads=32,
    vocab_size=51200,
    tie_word_embeddings=False,
    max_position_embeddings=2048,
)

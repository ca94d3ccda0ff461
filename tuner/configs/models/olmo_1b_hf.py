"""OLMo 1B, Ai2's open base model."""

model = dict(path="allenai/OLMo-1B-hf", chat_template="zephyr")
architecture = dict(
    model_type="olmo",
    num_hidden_layers=16,
    hidden_size=2048,
    intermediate_size=8192,
    num_attention_heads=16,
    num_key_value_heads=16,
    vocab_size=50304,
    tie_word_embeddings=True,
    max_position_embeddings=2048,
)

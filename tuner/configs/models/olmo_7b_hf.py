"""OLMo 7B, Ai2's open base model."""

model = dict(path="allenai/OLMo-7B-hf", chat_template="zephyr")
architecture = dict(
    model_type="olmo",
    num_hidden_layers=32,
    hidden_size=4096,
    intermediate_size=11008,
    num_attention_heads=32,
    num_key_value_heads=32,
    vocab_size=50304,
    tie_word_embeddings=False,
    max_position_embeddings=2048,
)

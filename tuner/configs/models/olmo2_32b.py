"""OLMo 2 32B, Ai2's open base model."""

model = dict(path="allenai/OLMo-2-0325-32B", chat_template="zephyr")
architecture = dict(
    model_type="olmo2",
    num_hidden_layers=64,
    hidden_size=5120,
    intermediate_size=27648,
    num_attention_heads=40,
    num_key_value_heads=8,
    vocab_size=100352,
    tie_word_embeddings=False,
    max_position_embeddings=4096,
)

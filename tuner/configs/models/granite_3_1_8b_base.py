"""Granite 3.1 8B, IBM's base model."""

model = dict(path="ibm-granite/granite-3.1-8b-base", chat_template="vicuna")
architecture = dict(
    model_type="granite",
    num_hidden_layers=40,
    hidden_size=4096,
    intermediate_size=12800,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=49152,
    tie_word_embeddings=True,
    max_position_embeddings=131072,
)

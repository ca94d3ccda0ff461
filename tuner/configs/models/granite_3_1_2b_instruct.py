"""Granite 3.1 2B Instruct, IBM's chat model."""

model = dict(path="ibm-granite/granite-3.1-2b-instruct")
architecture = dict(
    model_type="granite",
    num_hidden_layers=40,
    hidden_size=2048,
    intermediate_size=8192,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=49155,
    tie_word_embeddings=True,
    max_position_embeddings=131072,
)

"""Granite 3.3 2B Instruct, IBM's chat model that can think first."""

model = dict(path="ibm-granite/granite-3.3-2b-instruct")
architecture = dict(
    model_type="granite",
    num_hidden_layers=40,
    hidden_size=2048,
    intermediate_size=8192,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=49159,
    tie_word_embeddings=True,
    max_position_embeddings=131072,
)

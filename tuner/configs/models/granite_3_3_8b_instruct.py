"""Granite 3.3 8B Instruct, IBM's chat model that can think first."""

model = dict(path="ibm-granite/granite-3.3-8b-instruct")
architecture = dict(
    model_type="granite",
    num_hidden_layers=40,
    hidden_size=4096,
    intermediate_size=12800,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=49159,
    tie_word_embeddings=True,
    max_position_embeddings=131072,
)

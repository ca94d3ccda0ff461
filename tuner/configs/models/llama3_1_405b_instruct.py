"""Llama 3.1 405B Instruct, Meta's chat model with a context of 128 thousand tokens."""

model = dict(path="meta-llama/Llama-3.1-405B-Instruct", chat_template="llama3_1")
architecture = dict(
    model_type="llama",
    num_hidden_layers=126,
    hidden_size=16384,
    intermediate_size=53248,
    num_attention_heads=128,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
    tie_word_embeddings=False,
    max_position_embeddings=131072,
)

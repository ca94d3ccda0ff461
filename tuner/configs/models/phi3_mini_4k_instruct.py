"""Phi-3 Mini 3.8B Instruct, Microsoft's chat model with a context of 4 thousand tokens."""

model = dict(path="microsoft/Phi-3-mini-4k-instruct")
architecture = dict(
    model_type="phi3",
    num_hidden_layers=32,
    hidden_size=3072,
    intermediate_size=8192,
    num_attention_heads=32,
    num_key_value_heads=32,
    vocab_size=32064,
    tie_word_embeddings=False,
    max_position_embeddings=4096,
)

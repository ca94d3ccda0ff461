"""Phi-4 Mini 3.8B Instruct, Microsoft's small chat model."""

model = dict(path="microsoft/Phi-4-mini-instruct")
architecture = dict(
    _base_="phi3_5_mini_instruct",
    num_attention_heads=24,
    num_key_value_heads=8,
    vocab_size=200064,
    tie_word_embeddings=True,
)

"""Phi-3 Medium 14B Instruct, Microsoft's chat model with a context of 128 thousand tokens."""

model = dict(path="microsoft/Phi-3-medium-128k-instruct")
architecture = dict(
    model_type="phi3",
    num_hidden_layers=40,
    hidden_size=5120,
    intermediate_size=17920,
    num_attention_heads=40,
    num_key_value_heads=10,
    vocab_size=32064,
    tie_word_embeddings=False,
    max_position_embeddings=131072,
)

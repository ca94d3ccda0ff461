"""Phi-4 14B, Microsoft's chat model."""

model = dict(path="microsoft/phi-4")
architecture = dict(
    model_type="phi3",
    num_hidden_layers=40,
    hidden_size=5120,
    intermediate_size=17920,
    num_attention_heads=40,
    num_key_value_heads=10,
    vocab_size=100352,
    tie_word_embeddings=False,
    max_position_embeddings=16384,
)

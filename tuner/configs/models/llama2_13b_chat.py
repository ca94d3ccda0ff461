"""Llama 2 13B Chat, Meta's chat model."""

model = dict(path="meta-llama/Llama-2-13b-chat-hf")
architecture = dict(
    model_type="llama",
    num_hidden_layers=40,
    hidden_size=5120,
    intermediate_size=13824,
    num_attention_heads=40,
    num_key_value_heads=40,
    head_dim=128,
    vocab_size=32000,
    tie_word_embeddings=False,
    max_position_embeddings=4096,
)

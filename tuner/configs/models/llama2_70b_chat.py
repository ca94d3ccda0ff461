"""Llama 2 70B Chat, Meta's chat model."""

model = dict(path="meta-llama/Llama-2-70b-chat-hf")
architecture = dict(
    model_type="llama",
    num_hidden_layers=80,
    hidden_size=8192,
    intermediate_size=28672,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=32000,
    tie_word_embeddings=False,
    max_position_embeddings=4096,
)

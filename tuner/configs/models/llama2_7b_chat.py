"""Llama 2 7B Chat, Meta's chat model."""

model = dict(path="meta-llama/Llama-2-7b-chat-hf")
architecture = dict(
    model_type="llama",
    num_hidden_layers=32,
    hidden_size=4096,
    intermediate_size=11008,
    num_attention_heads=32,
    num_key_value_heads=32,
    head_dim=128,
    vocab_size=32000,
    tie_word_embeddings=False,
    max_position_embeddings=4096,
)

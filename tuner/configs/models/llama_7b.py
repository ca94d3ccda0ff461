"""Llama 7B, Meta's first base model, trained on text."""

model = dict(path="huggyllama/llama-7b", chat_template="llama2")
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
    max_position_embeddings=2048,
)

"""Gemma 3 4B, Google's base model that also sees; its text half."""

model = dict(path="google/gemma-3-4b-pt", chat_template="gemma")
architecture = dict(
    model_type="gemma3_text",
    num_hidden_layers=34,
    hidden_size=2560,
    intermediate_size=10240,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    vocab_size=262208,
    tie_word_embeddings=True,
    max_position_embeddings=131072,
)

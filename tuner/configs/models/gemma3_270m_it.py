"""Gemma 3 270M Instruct, Google's smallest chat model."""

model = dict(path="google/gemma-3-270m-it")
architecture = dict(
    model_type="gemma3_text",
    num_hidden_layers=18,
    hidden_size=640,
    intermediate_size=2048,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=256,
    vocab_size=262144,
    tie_word_embeddings=True,
    max_position_embeddings=32768,
)

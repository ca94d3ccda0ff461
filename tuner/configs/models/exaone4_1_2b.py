"""EXAONE 4.0 1.2B, LG AI Research's small chat model that can think first."""

model = dict(path="LGAI-EXAONE/EXAONE-4.0-1.2B")
architecture = dict(
    model_type="exaone4",
    num_hidden_layers=30,
    hidden_size=2048,
    intermediate_size=4096,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=102400,
    tie_word_embeddings=True,
    max_position_embeddings=65536,
)

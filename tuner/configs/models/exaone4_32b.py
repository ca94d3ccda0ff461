"""EXAONE 4.0 32B, LG AI Research's chat model that can think first."""

model = dict(path="LGAI-EXAONE/EXAONE-4.0-32B")
architecture = dict(
    model_type="exaone4",
    num_hidden_layers=64,
    hidden_size=5120,
    intermediate_size=27392,
    num_attention_heads=40,
    num_key_value_heads=8,
    vocab_size=102400,
    tie_word_embeddings=False,
    max_position_embeddings=131072,
)

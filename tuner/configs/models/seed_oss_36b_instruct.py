"""Seed-OSS 36B Instruct, ByteDance's chat model that can think first."""

model = dict(path="ByteDance-Seed/Seed-OSS-36B-Instruct")
architecture = dict(
    model_type="seed_oss",
    num_hidden_layers=64,
    hidden_size=5120,
    intermediate_size=27648,
    num_attention_heads=80,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=155136,
    tie_word_embeddings=False,
    max_position_embeddings=524288,
)

"""Olmo 3 7B Think, Ai2's open chat model that thinks first."""

model = dict(path="allenai/Olmo-3-7B-Think")
architecture = dict(
    model_type="olmo3",
    num_hidden_layers=32,
    hidden_size=4096,
    intermediate_size=11008,
    num_attention_heads=32,
    num_key_value_heads=32,
    head_dim=128,
    vocab_size=100278,
    tie_word_embeddings=False,
    max_position_embeddings=65536,
)

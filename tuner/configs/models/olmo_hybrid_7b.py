"""OLMo Hybrid 7B, Ai2's open hybrid base model."""

model = dict(path="allenai/Olmo-Hybrid-7B")
architecture = dict(
    model_type="olmo_hybrid",
    num_hidden_layers=32,
    hidden_size=3840,
    intermediate_size=11008,
    num_attention_heads=30,
    vocab_size=100352,
    tie_word_embeddings=False,
    max_position_embeddings=65536,
)

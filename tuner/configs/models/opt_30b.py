"""OPT 30B, Meta's base model of 2022."""

model = dict(path="facebook/opt-30b", chat_template="vicuna")
architecture = dict(
    model_type="opt",
    num_hidden_layers=48,
    hidden_size=7168,
    num_attention_heads=56,
    vocab_size=50272,
    tie_word_embeddings=True,
    max_position_embeddings=2048,
    ffn_dim=28672,
)

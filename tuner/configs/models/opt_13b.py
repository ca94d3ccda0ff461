"""OPT 13B, Meta's base model of 2022."""

model = dict(path="facebook/opt-13b", chat_template="vicuna")
architecture = dict(
    model_type="opt",
    num_hidden_layers=40,
    hidden_size=5120,
    num_attention_heads=40,
    vocab_size=50272,
    tie_word_embeddings=True,
    max_position_embeddings=2048,
    ffn_dim=20480,
)

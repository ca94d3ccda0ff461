"""OPT 6.7B, Meta's base model of 2022."""

model = dict(path="facebook/opt-6.7b", chat_template="vicuna")
architecture = dict(
    model_type="opt",
    num_hidden_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    vocab_size=50272,
    tie_word_embeddings=True,
    max_position_embeddings=2048,
    ffn_dim=16384,
)

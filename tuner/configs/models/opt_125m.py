"""OPT 125M, Meta's base model of 2022."""

model = dict(path="facebook/opt-125m", chat_template="vicuna")
architecture = dict(
    model_type="opt",
    num_hidden_layers=12,
    hidden_size=768,
    num_attention_heads=12,
    vocab_size=50272,
    tie_word_embeddings=True,
    max_position_embeddings=2048,
    ffn_dim=3072,
)

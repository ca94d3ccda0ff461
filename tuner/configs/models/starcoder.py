"""StarCoder 15.5B, BigCode's base model for code."""

model = dict(path="bigcode/starcoder", chat_template="xtuner_default")
architecture = dict(
    model_type="gpt_bigcode",
    num_hidden_layers=40,
    hidden_size=6144,
    num_attention_heads=48,
    vocab_size=49152,
    tie_word_embeddings=True,
    max_position_embeddings=8192,
    multi_query=True,
)

"""GPT-NeoX 20B, EleutherAI's base model."""

model = dict(path="EleutherAI/gpt-neox-20b", chat_template="vicuna")
architecture = dict(
    model_type="gpt_neox",
    num_hidden_layers=44,
    hidden_size=6144,
    intermediate_size=24576,
    num_attention_heads=64,
    vocab_size=50432,
    tie_word_embeddings=False,
    max_position_embeddings=2048,
)

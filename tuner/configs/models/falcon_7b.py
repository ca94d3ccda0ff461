"""Falcon 7B, TII's base model."""

model = dict(path="tiiuae/falcon-7b", chat_template="vicuna")
architecture = dict(
    model_type="falcon",
    num_hidden_layers=32,
    hidden_size=4544,
    num_attention_heads=71,
    vocab_size=65024,
    tie_word_embeddings=True,
    max_position_embeddings=2048,
    multi_query=True,
    parallel_attn=True,
    bias=False,
)

"""Falcon 40B, TII's base model."""

model = dict(path="tiiuae/falcon-40b", chat_template="vicuna")
architecture = dict(
    model_type="falcon",
    num_hidden_layers=60,
    hidden_size=8192,
    num_attention_heads=128,
    vocab_size=65024,
    tie_word_embeddings=True,
    max_position_embeddings=2048,
    new_decoder_architecture=True,
    num_kv_heads=8,
    bias=False,
)

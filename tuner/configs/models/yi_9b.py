"""Yi 9B, 01.AI's base model of English and Chinese."""

model = dict(path="01-ai/Yi-9B", chat_template="chatml")
architecture = dict(
    model_type="llama",
    num_hidden_layers=48,
    hidden_size=4096,
    intermediate_size=11008,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    vocab_size=64000,
    tie_word_embeddings=False,
    max_position_embeddings=4096,
)

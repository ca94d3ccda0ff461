"""Yi 6B 200K, 01.AI's base model with a context of 200 thousand tokens."""

model = dict(path="01-ai/Yi-6B-200K", chat_template="chatml")
architecture = dict(
    model_type="llama",
    num_hidden_layers=32,
    hidden_size=4096,
    intermediate_size=11008,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    vocab_size=64000,
    tie_word_embeddings=False,
    max_position_embeddings=200000,
)

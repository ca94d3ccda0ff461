"""ERNIE 4.5 0.3B, Baidu's small chat model."""

model = dict(path="baidu/ERNIE-4.5-0.3B-PT")
architecture = dict(
    model_type="ernie4_5",
    num_hidden_layers=18,
    hidden_size=1024,
    intermediate_size=3072,
    num_attention_heads=16,
    num_key_value_heads=2,
    head_dim=128,
    vocab_size=103424,
    tie_word_embeddings=True,
    max_position_embeddings=131072,
)

"""GLM-Z1 32B 0414, Z.ai's chat model that thinks first."""

model = dict(path="zai-org/GLM-Z1-32B-0414")
architecture = dict(
    model_type="glm4",
    num_hidden_layers=61,
    hidden_size=6144,
    intermediate_size=23040,
    num_attention_heads=48,
    num_key_value_heads=2,
    head_dim=128,
    vocab_size=151552,
    tie_word_embeddings=False,
    max_position_embeddings=32768,
    attention_bias=False,
)

"""GLM-4 9B Chat, Z.ai's chat model in transformers' own format."""

model = dict(path="zai-org/glm-4-9b-chat-hf")
architecture = dict(
    model_type="glm",
    num_hidden_layers=40,
    hidden_size=4096,
    intermediate_size=13696,
    num_attention_heads=32,
    num_key_value_heads=2,
    head_dim=128,
    vocab_size=151552,
    tie_word_embeddings=False,
    max_position_embeddings=131072,
)

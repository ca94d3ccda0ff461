"""Ministral 3 8B, Mistral AI's small base model that also sees; its text half."""

model = dict(path="mistralai/Ministral-3-8B-Base-2512")
architecture = dict(
    model_type="ministral3",
    num_hidden_layers=34,
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=131072,
    tie_word_embeddings=False,
    max_position_embeddings=262144,
)

"""Ministral 3 14B, Mistral AI's small base model that also sees; its text half; sizes from memory."""

model = dict(path="mistralai/Ministral-3-14B-Base-2512")
architecture = dict(
    model_type="ministral3",
    num_hidden_layers=40,
    hidden_size=5120,
    intermediate_size=16384,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=131072,
    tie_word_embeddings=False,
    max_position_embeddings=262144,
)

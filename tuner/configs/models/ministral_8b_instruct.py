"""Ministral 8B Instruct 2410, Mistral AI's small chat model."""

model = dict(path="mistralai/Ministral-8B-Instruct-2410")
architecture = dict(
    model_type="ministral",
    num_hidden_layers=36,
    hidden_size=4096,
    intermediate_size=12288,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=131072,
    tie_word_embeddings=False,
    max_position_embeddings=32768,
)

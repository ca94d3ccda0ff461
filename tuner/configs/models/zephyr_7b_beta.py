"""Zephyr 7B Beta, Hugging Face's chat model, built on Mistral 7B."""

model = dict(path="HuggingFaceH4/zephyr-7b-beta")
architecture = dict(
    model_type="mistral",
    num_hidden_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=32000,
    tie_word_embeddings=False,
    max_position_embeddings=32768,
)

"""SmolLM2 360M, Hugging Face's small base model of the second generation."""

model = dict(path="HuggingFaceTB/SmolLM2-360M", chat_template="chatml")
architecture = dict(
    model_type="llama",
    num_hidden_layers=32,
    hidden_size=960,
    intermediate_size=2560,
    num_attention_heads=15,
    num_key_value_heads=5,
    head_dim=64,
    vocab_size=49152,
    tie_word_embeddings=True,
    max_position_embeddings=8192,
)

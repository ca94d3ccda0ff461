"""SmolLM 1.7B Instruct, Hugging Face's small chat model."""

model = dict(path="HuggingFaceTB/SmolLM-1.7B-Instruct")
architecture = dict(
    model_type="llama",
    num_hidden_layers=24,
    hidden_size=2048,
    intermediate_size=8192,
    num_attention_heads=32,
    num_key_value_heads=32,
    head_dim=64,
    vocab_size=49152,
    tie_word_embeddings=True,
    max_position_embeddings=2048,
)

"""SmolLM 360M Instruct, Hugging Face's small chat model."""

model = dict(path="HuggingFaceTB/SmolLM-360M-Instruct")
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
    max_position_embeddings=2048,
)

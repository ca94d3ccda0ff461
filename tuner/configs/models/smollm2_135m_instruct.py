"""SmolLM2 135M Instruct, Hugging Face's small chat model of the second generation."""

model = dict(path="HuggingFaceTB/SmolLM2-135M-Instruct")
architecture = dict(
    model_type="llama",
    num_hidden_layers=30,
    hidden_size=576,
    intermediate_size=1536,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    vocab_size=49152,
    tie_word_embeddings=True,
    max_position_embeddings=8192,
)

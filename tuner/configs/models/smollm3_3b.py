"""SmolLM3 3B, Hugging Face's small chat model that can think before it answers."""

model = dict(path="HuggingFaceTB/SmolLM3-3B")
architecture = dict(
    model_type="smollm3",
    num_hidden_layers=36,
    hidden_size=2048,
    intermediate_size=11008,
    num_attention_heads=16,
    num_key_value_heads=4,
    vocab_size=128256,
    tie_word_embeddings=True,
    max_position_embeddings=65536,
)

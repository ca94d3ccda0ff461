"""Command A 111B 03-2025, Cohere's large chat model."""

model = dict(path="CohereLabs/c4ai-command-a-03-2025")
architecture = dict(
    model_type="cohere2",
    num_hidden_layers=64,
    hidden_size=12288,
    intermediate_size=36864,
    num_attention_heads=96,
    num_key_value_heads=8,
    vocab_size=256000,
    tie_word_embeddings=True,
    max_position_embeddings=131072,
)

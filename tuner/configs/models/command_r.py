"""Command R 35B, Cohere's chat model."""

model = dict(path="CohereLabs/c4ai-command-r-v01")
architecture = dict(
    model_type="cohere",
    num_hidden_layers=40,
    hidden_size=8192,
    intermediate_size=22528,
    num_attention_heads=64,
    num_key_value_heads=64,
    vocab_size=256000,
    tie_word_embeddings=True,
    max_position_embeddings=131072,
)

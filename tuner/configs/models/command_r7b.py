"""Command R7B 12-2024, Cohere's small chat model."""

model = dict(path="CohereLabs/c4ai-command-r7b-12-2024")
architecture = dict(
    _base_="command_a",
    num_hidden_layers=32,
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    max_position_embeddings=132096,
)

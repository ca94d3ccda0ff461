"""Command R 32B 08-2024, Cohere's chat model."""

model = dict(path="CohereLabs/c4ai-command-r-08-2024")
architecture = dict(_base_="command_r", intermediate_size=24576, num_key_value_heads=8)

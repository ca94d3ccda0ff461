"""Command R+ 104B, Cohere's large chat model."""

model = dict(path="CohereForAI/c4ai-command-r-plus")
architecture = dict(
    _base_="command_r",
    num_hidden_layers=64,
    hidden_size=12288,
    intermediate_size=33792,
    num_attention_heads=96,
    num_key_value_heads=8,
    use_qk_norm=True,
)

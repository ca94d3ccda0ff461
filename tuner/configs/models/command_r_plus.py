"""Command R+ 104B, Cohere's large chat model."""

model = dict(path="CohereForAI/c4ai-command-r-plus")
architecture = dict(
    model_type="cohere",
    num_hidden_layers=64,
    hidden_size=12288,
    intermediate_size=33792,
    num_attention_heads=96,
    num_key_value_heads=8,
    vocab_size=256000,
    tie_word_embeddings=True,
    max_position_embeddings=131072,
    use_qk_norm=True,
)

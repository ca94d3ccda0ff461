"""DeepSeek Coder 33B, DeepSeek's base model for code."""

model = dict(path="deepseek-ai/deepseek-coder-33b-base", chat_template="deepseek_coder")
architecture = dict(
    model_type="llama",
    num_hidden_layers=62,
    hidden_size=7168,
    intermediate_size=19200,
    num_attention_heads=56,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=32256,
    tie_word_embeddings=False,
    max_position_embeddings=16384,
)

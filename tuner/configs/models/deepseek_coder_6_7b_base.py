"""DeepSeek Coder 6.7B, DeepSeek's base model for code."""

model = dict(path="deepseek-ai/deepseek-coder-6.7b-base", chat_template="deepseek_coder")
architecture = dict(
    model_type="llama",
    num_hidden_layers=32,
    hidden_size=4096,
    intermediate_size=11008,
    num_attention_heads=32,
    num_key_value_heads=32,
    head_dim=128,
    vocab_size=32256,
    tie_word_embeddings=False,
    max_position_embeddings=16384,
)

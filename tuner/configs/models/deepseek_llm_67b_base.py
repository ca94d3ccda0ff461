"""DeepSeek LLM 67B, DeepSeek's first large base model."""

model = dict(path="deepseek-ai/deepseek-llm-67b-base", chat_template="deepseek")
architecture = dict(
    model_type="llama",
    num_hidden_layers=95,
    hidden_size=8192,
    intermediate_size=22016,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=102400,
    tie_word_embeddings=False,
    max_position_embeddings=4096,
)

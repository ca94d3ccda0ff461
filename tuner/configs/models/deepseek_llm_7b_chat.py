"""DeepSeek LLM 7B Chat, DeepSeek's first chat model."""

model = dict(path="deepseek-ai/deepseek-llm-7b-chat")
architecture = dict(
    model_type="llama",
    num_hidden_layers=30,
    hidden_size=4096,
    intermediate_size=11008,
    num_attention_heads=32,
    num_key_value_heads=32,
    head_dim=128,
    vocab_size=102400,
    tie_word_embeddings=False,
    max_position_embeddings=4096,
)
